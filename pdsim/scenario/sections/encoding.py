"""Settings of encode instances, which encode images and audio on GPUs of their own (EPD)."""

from pydantic import Field

from pdsim.scenario.sections.fields import Section, Size


class EncodeSettings(Section):
    """Encode instances (--encoder-only), each one GPU. Prefill or aggregated servers then hold no encoder
    (--language-only), and queue a prompt when all its embeddings have arrived.

    With engine sglang only, and without faults, health, elastic, dp, pp and cp. Simulation only.
    """

    instances: int = Field(default=1, ge=1)
    """Number of encode instances. Their names are encode-0, encode-1, …"""
    gpu: str
    """GPU by its name in the catalog."""
    max_batch_size: int = Field(default=8, ge=1)
    """Maximum number of requests whose images or audio clips are taken into a batch (SGLANG_ENCODER_MAX_BATCH_SIZE)."""
    cache: Size | None = None
    """Memory of one instance that keeps embeddings (--enable-prefix-mm-cache, SGLANG_VLM_CACHE_SIZE_MB), by the list of
    a request's items. Only forwards of a single request use the memory. None: nothing is kept."""
    transport: str = "zmq-tcp"
    """Transfer engine of embeddings (--encoder-transfer-backend), by name in the catalog: zmq-tcp
    (zmq_to_scheduler), or one of Mooncake. Each GPU of the receiving server gets all embeddings."""
