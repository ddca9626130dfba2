"""Settings of encode instances, which encode images and audio on GPUs of their own (EPD)."""

from pydantic import Field

from pdsim.scenario.sections.fields import Section, Size


class EncodeSettings(Section):
    """Encode instances, each one GPU. With engine sglang (--encoder-only), prefill or aggregated servers hold no
    encoder (--language-only), and queue a prompt when all its embeddings have arrived. With engine vllm
    (--ec-transfer-config, ECCPUConnector with ec_enable_nixl), they get a request when all its items are encoded, and
    read the embeddings. Not possible together with faults, health, elastic, or servers that compute prompts with dp, pp
    or cp. Simulation only.
    """

    instances: int = Field(default=1, ge=1)
    """Number of encode instances. Their names are encode-0, encode-1, …"""
    gpu: str
    """GPU by its name in the catalog."""
    max_batch_size: int = Field(default=8, ge=1)
    """Maximum number of requests whose images or audio clips are taken into a batch (SGLANG_ENCODER_MAX_BATCH_SIZE). A
    request with images and audio clips counts twice.
    """
    step_tokens: int = Field(default=8192, ge=1)
    """Engine vllm: maximum number of tokens of images and audio clips in one step (--max-num-batched-tokens)."""
    cache: Size | None = None
    """Memory of one instance that keeps embeddings (--enable-prefix-mm-cache, SGLANG_VLM_CACHE_SIZE_MB). An entry holds
    the embeddings of the images, or of the audio clips, that the instance got of one request, for later requests of
    which the instance gets the same list. Only forwards of a single request use the memory. None: nothing is kept.
    Engine vllm: size of the host memory for embeddings on each encode instance and on each server that reads them
    (ec_cpu_bytes). The size is for `pdsim launch`; the simulation has room for all embeddings.
    """
    transport: str = "zmq-tcp"
    """Transport of embeddings (--encoder-transfer-backend), by its name in the catalog. Engine sglang: zmq-tcp
    (zmq_to_scheduler) or a transport of Mooncake; each GPU of the receiving server gets all embeddings. Engine vllm: a
    transport of NIXL.
    """

    def wrong_for(self, engine: str) -> str:
        """Returns a message if the engine is vllm and the transport is not one of NIXL, or if a field is given that the
        engine lacks: step_tokens with engine sglang, max_batch_size with vllm. Empty: these settings fit the engine. A
        field with its default value counts as not given, because scenario files that pdsim writes contain all fields.
        """
        if engine == "vllm" and not self.transport.startswith("nixl"):
            return "encode.transport: vLLM's servers read embeddings with NIXL (ECCPUConnector); give nixl-rdma"
        own, other, of = "max_batch_size", "step_tokens", "vLLM"
        if engine == "vllm":
            own, other, of = other, own, "SGLang"
        is_given = getattr(self, other) != type(self).model_fields[other].default
        return f"encode.{other} is a setting of {of}; give {own}" if is_given else ""
