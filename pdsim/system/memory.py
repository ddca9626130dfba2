"""Number of KV pages that fit into a GPU's memory, by SGLang's arithmetic (0.5.23, memory_hook and pool_configurator).

vLLM's defaults are those of 0.33.0: config/cache.py and EngineArgs.get_batch_defaults of engine/arg_utils.py.
"""

from math import lcm
from typing import Literal, NamedTuple

from pdsim.dataclass import dataclass
from pdsim.inputs import InputError
from pdsim.system.catalog import GpuSpec
from pdsim.system.draft import DraftModel
from pdsim.system.encoder import VisionEncoder
from pdsim.system.model import (
    DTYPE_BYTES,
    INDEX_LAYER_BYTES,
    GroupedQueryAttention,
    KvDtype,
    LatentAttention,
    ModelSpec,
    StateDtype,
)
from pdsim.system.states import (
    CHUNK_TOKENS,
    KERNEL_BLOCK_TOKENS,
    LATENT_BLOCK_TOKENS,
    StateBlocks,
    StateMemory,
    StateRule,
    block_tokens,
    state_blocks,
)

GIB = 1 << 30
MIB = 1 << 20

RUNTIME_BYTES = 2e9
"""Bytes of CUDA context, NCCL and workspaces. They are part of the memory share mem_fraction_static. With about 2 GB,
pool sizes agree with published logs (Qwen3-32B on B200: 2.12 M tokens, 37 running requests)."""


Role = Literal["prefill", "decode", "aggregated"]
"""Role of a server in a cluster."""


A2aBackend = Literal["none", "deepep", "mori"]
"""Library that sends tokens to whole experts of other GPUs. none: each GPU gets all tokens. mori is timed as deepep."""


class LayoutError(InputError):
    """Raised if a model cannot be laid out on the given GPUs."""


class TokenBytes(NamedTuple):
    """KV bytes of one token on one rank."""

    whole: int
    """Bytes in layers that keep a token's KV until its request ends."""
    window: int
    """KV bytes of one token in layers that keep KV only for a request's last tokens."""


class DcpRules(NamedTuple):
    """An engine's rules for decode context parallelism (DCP), in which GPUs divide each request's KV."""

    num_exchanges: int
    """Number of collectives per layer in which GPUs exchange queries and outputs."""
    divides_index: bool
    """True: GPUs divide the indexer's keys. False: each GPU holds all of them."""


DCP_RULES = {"sglang": DcpRules(2, divides_index=False), "vllm": DcpRules(3, divides_index=True)}
"""Rules of each engine. Queries are exchanged by an all-gather. Outputs are exchanged by one all-to-all with SGLang
(a2a: 0.5.23, arg_groups/overrides.py:1388), and by an all-gather and a reduce-scatter with vLLM (ag_rs: 0.33.0,
config/parallel.py:613). Indexer keys: SGLang 0.5.23, model_executor/pool_configurator.py:401; vLLM 0.33.0,
v1/kv_cache_interface.py:553.
"""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A model on the GPUs of one instance, with its attention divided over tp ranks.

    With data-parallel attention, several instances form one server. Each instance has its own tp ranks and KV, and all
    instances share the routed experts.
    """

    model: ModelSpec
    """The model or, with several pipeline stages, the stage with most layers."""
    gpu: GpuSpec
    tp: int
    dp: int = 1
    """Number of data-parallel instances that form one server."""
    pp: int = 1
    """Number of pipeline stages of the instance. Each stage has tp GPUs."""
    cp: int = 1
    """Number of groups of tp GPUs that divide the tokens of a prompt. Each group has the prompt's whole KV, and all
    weights except routed experts."""
    dcp: int = 1
    """Number of GPUs that divide each request's KV by tokens, where without DCP they would hold copies. tp is a
    multiple of dcp."""
    dcp_rules: DcpRules = DCP_RULES["sglang"]
    """The engine's rules for KV that is divided by DCP."""
    has_whole_experts: bool = False
    """True: each GPU of a server holds some experts completely. False: each GPU holds a part of every expert."""
    moe_a2a_backend: A2aBackend | None = None
    """Library that sends tokens to whole experts of other GPUs. None: the default, which is deepep if dp > 1 and the
    server spans several NVLink domains, and none otherwise."""
    sums_prompts: bool = True
    """How a forward with prompts gives tokens to the experts of all ranks, and gets the results. Used if dp > 1 and
    sends_to_experts is False, within one NVLink domain. True: by two all-reduces (SGLang 0.5.23,
    layers/dp_attention.py:187 and 661). False: by an all-gather and a reduce-scatter, as a decode step does (vLLM
    0.33.0, distributed/device_communicators/all2all.py:55)."""
    switches_reduce: bool = True
    """True: NVSwitches add up large messages of NCCL's all-reduces (NVLS). False: GPUs add them up, as SGLang chooses
    by default (0.5.23, entrypoints/engine.py:1909)."""
    expert_skew: float = 0
    """Number of tokens that the busiest GPU's experts compute, divided by the mean of all GPUs, minus 1."""
    overlaps_batches: bool = False
    """True: one half of a batch exchanges tokens between hosts while the other half computes."""
    attention_backend: Literal["flashinfer"] | None = None
    """Library of attention kernels. None: the engine's default for the GPU."""
    num_draft_layers: int = 0
    """Number of attention layers of a draft model. Each has as much KV as a layer of the model (SGLang 0.5.23,
    model_executor/pool_configurator.py: cell_size * draft_num_layers / num_layers)."""
    draft: DraftModel | None = None
    """Draft model whose weights are on the same GPUs. None: there is no draft model."""
    num_verified_tokens: int = 1
    """Number of tokens per request that one decode step computes."""
    hisparse_ratio: int | None = None
    """Number of tokens in host memory for each token of the pool. The GPU holds indexer keys of all these tokens in all
    layers (SGLang 0.5.23, model_executor/pool_configurator.py:594). None: all KV is on the GPU."""
    kv_dtype: KvDtype
    """Data type of KV."""
    state_dtype: StateDtype = "fp32"
    """Data type of linear-attention states."""

    def __post_init__(self) -> None:
        attention, name = self.model.attention, self.model.name
        if self.num_domains > 1:
            self._require_whole_domains()
        if self.tp < 1 or attention.num_query_heads % self.tp:
            raise LayoutError(f"tp {self.tp} does not divide the {attention.num_query_heads} query heads of {name}")
        if isinstance(attention, GroupedQueryAttention):
            small, large = sorted((self.tp, attention.num_kv_heads))
            if large % small:
                raise LayoutError(
                    f"tp {self.tp} and the {attention.num_kv_heads} KV heads of {name}: neither divides the other"
                )
        if self.dcp > 1:
            self._require_copies_of_kv()
        backend = self.moe_a2a_backend or "none"
        if backend != "none" and (self.model.experts is None or not self.sends_to_experts):
            found = f"{self.num_server_gpus} GPUs and {'whole' if self.has_whole_experts else 'divided'} experts"
            raise LayoutError(
                f"moe_a2a_backend {backend}: pdsim models {backend} with whole experts on several GPUs only; "
                f"found {name} with {'no experts' if self.model.experts is None else found}"
            )
        if backend != "none" and self.dp == 1 and (self.cp > 1 or self.num_domains > 1):
            beside = f"cp {self.cp}" if self.cp > 1 else f"{self.num_domains} NVLink domains"
            raise LayoutError(f"moe_a2a_backend {backend}: pdsim does not model dp 1 and {beside} with it")

    def _require_whole_domains(self) -> None:
        """Raises LayoutError for servers on several NVLink domains that SGLang or pdsim does not support. Each domain
        must have equally many of the server's ranks (SGLang 0.5.23, arg_groups/validation_hook.py:179). Each
        data-parallel instance must fit into one domain or fill whole domains. pdsim does not model pipeline stages and
        context parallelism on several domains.
        """
        num_gpus, num_domains, name, word = self.num_server_gpus, self.num_domains, self.gpu.name, self.gpu.domain
        where = f"tp {num_gpus} spans {num_domains} {word}s of {self.gpu.gpus_per_server} {name}"
        if num_gpus % num_domains:
            raise LayoutError(f"{where}, which cannot each have equally many ranks; use a multiple of {num_domains}")
        each = self.gpus_per_domain
        if each % self.tp and self.tp % each:
            fits = f"must fit into one {word} or fill {word}s"
            raise LayoutError(f"{where}, {each} on each: the {self.tp} GPUs of an instance {fits}")
        if self.pp > 1 or self.cp > 1:
            beside = f"pp {self.pp}" if self.pp > 1 else f"cp {self.cp}"
            raise LayoutError(f"{where}; pdsim does not model {beside} with it: at most {self.gpu.gpus_per_server}")

    def _require_copies_of_kv(self) -> None:
        """Raises LayoutError if DCP cannot divide the KV, or if the model has layers with a window. DCP needs groups of
        dcp GPUs in one NVLink domain that would otherwise hold the same KV heads.
        """
        attention, name, wrong = self.model.attention, self.model.name, ""
        num_heads = attention.num_kv_heads if isinstance(attention, GroupedQueryAttention) else 1
        if self.tp % self.dcp:
            wrong = f"it does not divide the {self.tp} GPUs of a data-parallel rank"
        elif num_heads * self.dcp > self.tp:
            wrong = (
                f"{self.tp} GPUs hold {name}'s {num_heads} KV heads; dcp is at most {max(1, self.tp // num_heads)} "
                "(vLLM 0.33.0, config/model.py:1591; SGLang 0.5.23, arg_groups/attention_hook.py:67)"
            )
        elif attention.num_window_layers:
            at = "vLLM 0.33.0, v1/kv_cache_interface.py:950; SGLang 0.5.23, layers/attention/triton_backend.py:2013"
            wrong = f"{name} has layers with a window, whose KV engines do not divide ({at})"
        elif self.gpus_per_domain % self.dcp:
            wrong = f"pdsim does not model groups over several {self.gpu.domain}s of {self.gpus_per_domain} of the GPUs"
        if wrong:
            raise LayoutError(f"dcp {self.dcp}: {wrong}")

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp * self.cp

    @property
    def num_server_gpus(self) -> int:
        """Number of a server's GPUs that take part in the same collectives: the GPUs of all its data-parallel
        instances, or only those of one stage if the server has several pipeline stages.
        """
        return self.tp * self.dp * self.cp

    @property
    def num_domains(self) -> int:
        """Number of NVLink domains that a pipeline stage of a server spans. A domain is a host or a rack of several
        hosts.
        """
        return -(-self.num_server_gpus // self.gpu.gpus_per_server)

    @property
    def gpus_per_domain(self) -> int:
        """Number of the server's GPUs in each NVLink domain."""
        return self.num_server_gpus // self.num_domains

    @property
    def sends_to_experts(self) -> bool:
        """True if each GPU computes the layers outside attention for its own share of the instance's tokens only, and
        sends a token to the GPUs of the token's experts (SGLang 0.5.23, layers/layer_boundary/factories.py:262). False:
        each GPU gets all tokens.
        """
        backend = self.moe_a2a_backend or ("deepep" if self.dp > 1 and self.num_domains > 1 else "none")
        return self.num_server_gpus > 1 and self.has_whole_experts and backend != "none"

    @property
    def read_token_bytes(self) -> int:
        """KV bytes of one context token that attention reads on one rank, over all the rank's layers. With DCP, a rank
        reads 1 / dcp of the token's KV.
        """
        return int(self.model.attention.num_kv_elements(self.tp) * DTYPE_BYTES[self.kv_dtype]) // self.dcp

    @property
    def kv_token_bytes(self) -> int:
        """KV bytes of one token on one rank, for the layers of the model and of the draft model. Keys of an indexer are
        included. DCP divides the model's KV by dcp, but not the draft's (SGLang 0.5.23,
        model_executor/pool_configurator.py:307).
        """
        own, index = self.read_token_bytes, self.model.attention.index_token_bytes
        drafts = (own * self.dcp + index) * self.num_draft_layers // self.model.attention.num_layers
        return own + index // (self.dcp if self.dcp_rules.divides_index else 1) + drafts

    def token_bytes(self, engine: str) -> "TokenBytes":
        """KV bytes of one token on one rank: in layers that keep all KV, and in layers that keep only a window's KV.
        engine: sglang or vllm.
        """
        attention = self.model.attention
        if not attention.num_window_layers or (engine == "sglang" and not attention.has_window_pool):
            return TokenBytes(self.kv_token_bytes, 0)
        window = int(attention.num_window_elements(self.tp) * DTYPE_BYTES[self.kv_dtype])
        beside = isinstance(attention, LatentAttention)
        return TokenBytes(self.kv_token_bytes - (0 if beside else window), window)

    def _mean_token_bytes(self, engine: str) -> float:
        """Bytes of memory that one rank needs for each token of the KV pool, including KV of layers with a window.
        engine: sglang or vllm.

        SGLang: layers with a window have a pool of their own, with a fixed share of the main pool's tokens. pdsim
        assumes that this second pool is never full. HiSparse: the GPU also has indexer keys of tokens in host memory.
        vLLM (0.33.0, v1/core/kv_cache_utils.py, get_max_concurrency_for_kv_cache_config; kv_cache_interface.py,
        max_admission_blocks_per_request): the mean over the tokens of a request of max_context_tokens. Layers with a
        window keep the window's tokens and the tokens of two forwards under way.
        """
        whole, window = self.token_bytes(engine)
        attention, longest = self.model.attention, self.model.max_context_tokens
        if engine == "sglang":
            if self.hisparse_ratio is not None:
                keys = INDEX_LAYER_BYTES * attention.num_layers
                whole += self.hisparse_ratio * keys - attention.index_token_bytes
            return whole + attention.WINDOW_POOL_RATIO * window
        if self.model.state is not None:
            whole = round(whole * self.state_blocks.padding)
        held = attention.kept_window_tokens + _FORWARDS_UNDER_WAY * vllm_batch(self.gpu).num_tokens
        return whole + min(1.0, held / longest) * window

    @property
    def num_kv_layers(self) -> int:
        """Number of layers with KV on one rank, including the draft's layers."""
        return self.model.attention.num_layers + self.num_draft_layers

    @property
    def state_bytes(self) -> int:
        """Bytes of one request's linear-attention state on one rank."""
        return 0 if self.model.state is None else self.model.state.num_bytes(self.state_dtype) // self.tp

    @property
    def weight_bytes_per_rank(self) -> float:
        """Bytes of weights on one rank, of the model, its encoders and its draft."""
        shared, routed = self.model.shared_bytes, self.model.expert_bytes
        shared += sum([encoder.weight_bytes for encoder in self.model.encoders.values()])
        if self.draft is not None:
            shared, routed = shared + self.draft.own_bytes, routed + self.draft.expert_bytes
        return shared / self.tp + routed / (self.tp * self.dp * self.cp)

    def states(self, mem_fraction: float, rule: StateRule | None = None) -> StateMemory:
        """Number of slots for linear-attention states on one rank, and bytes of the rank's memory for states.
        mem_fraction: share of the GPU's memory for weights, runtime, KV and states (mem_fraction_static). rule: gives
        the number. (0, 0): the model has no such states, or rule is None, as with vLLM, whose states take KV pages.
        """
        if not self.state_bytes or rule is None:
            return StateMemory(0, 0)
        return rule.memory(self._room(mem_fraction), self.state_bytes)

    @property
    def state_blocks(self) -> StateBlocks:
        """How vLLM divides its pool of blocks between KV and states. The model must have layers of linear attention."""
        assert self.model.state is not None
        return state_blocks(self.num_kv_layers, self.model.state.num_layers)

    def block_tokens(self, page_size: int) -> int:
        """Number of tokens of a vLLM block. page_size: the block size that the user gives. If the model has
        linear-attention layers, vLLM makes blocks so large that one layer's KV of a block has at least the bytes of a
        request's state of one layer.
        """
        state = self.model.state
        if state is None:
            return page_size
        is_latent = isinstance(self.model.attention, LatentAttention)
        unit = max(page_size, LATENT_BLOCK_TOKENS if is_latent else KERNEL_BLOCK_TOKENS)
        if state.chunk_tokens == CHUNK_TOKENS:  # gated delta nets leave states at whole chunks (gdn_attn.py:34)
            unit = lcm(unit, CHUNK_TOKENS)
        token_bytes = self.kv_token_bytes / self.num_kv_layers
        return max(page_size, block_tokens(self.state_bytes / state.num_layers, token_bytes, unit))

    def _room(self, mem_fraction: float) -> float:
        """Number of bytes on one rank for KV and states: the share mem_fraction of the GPU's memory, minus weights and
        runtime.
        """
        return self.gpu.memory_bytes * mem_fraction - self.weight_bytes_per_rank - RUNTIME_BYTES

    def pool_tokens(
        self, mem_fraction: float, page_size: int, *, engine: str = "sglang", states: StateRule | None = None
    ) -> int:
        """Number of tokens whose KV fits into memory, in whole pages. mem_fraction: share of the GPU's memory for
        weights, runtime, KV and states. engine: sglang or vllm. states: rule for the number of linear-attention states
        outside of pages; None: there are none.

        Raises LayoutError if weights and states leave no room.
        """
        static, state_bytes = self.gpu.memory_bytes * mem_fraction, self.states(mem_fraction, states).num_bytes
        room = self._room(mem_fraction) - state_bytes
        tokens = int(room // self._mean_token_bytes(engine)) // page_size * page_size
        if tokens <= 0:
            weights = self.weight_bytes_per_rank + RUNTIME_BYTES + max(0.0, state_bytes)
            drafts = "" if self.draft is None else ", its draft"
            states_too = " and states of linear attention" if state_bytes > 0 else ""
            raise LayoutError(
                f"{self.model.name} in {self.model.weight_dtype}{drafts}{states_too} needs {weights / 1e9:.1f} GB on "
                f"each of {self.tp} {self.gpu.name}, which give {static / 1e9:.1f} GB (memory fraction "
                f"{mem_fraction:g}): no room for KV; use a larger tp or GPU"
            )
        return tokens


@dataclass(frozen=True, kw_only=True)
class MemoryTier:
    """SGLang's defaults that depend on the memory size of a GPU."""

    chunked_prefill_tokens: int
    """Default maximum tokens of a prefill forward."""
    max_graph_batch: int
    """SGLang's default for the largest batch of decode steps that runs as a CUDA graph."""


def memory_tier(gpu: GpuSpec, tp: int) -> MemoryTier:
    wide = tp >= 4  # noqa: PLR2004
    tiers = (
        (20, 2048, 8, 8),
        (35, 4096, 48, 160),
        (60, 4096, 32, 160),
        (90, 8192, 256, 512),
        (160, 8192, 256, 512),
    )
    for below_gib, chunk, batch, wide_batch in tiers:
        if gpu.memory_bytes < below_gib * GIB:
            return MemoryTier(chunked_prefill_tokens=chunk, max_graph_batch=wide_batch if wide else batch)
    return MemoryTier(chunked_prefill_tokens=16384, max_graph_batch=512)


def default_mem_fraction(
    gpu: GpuSpec, num_gpus: int, role: Role, chunk_tokens: int | None, max_running: int | None, *, draft_tokens: int = 1
) -> float:
    """SGLang's default of mem_fraction_static. num_gpus: GPUs of a server. chunk_tokens: tokens of a prefill chunk
    (None: 16,384); not used with role decode. Used with role decode only: max_running, the limit of running requests
    (None: max_graph_batch), and draft_tokens, the number of tokens per request that a decode step computes.
    """
    tier = memory_tier(gpu, num_gpus)
    graphs = (0 if role == "prefill" else 2 * tier.max_graph_batch) + (0 if role == "decode" else 1536)
    if role == "decode":
        activation = max((max_running or tier.max_graph_batch) * draft_tokens, 2048)
    else:
        activation = max(chunk_tokens or 16384, 2048)
    memory_mib = gpu.memory_bytes / MIB
    reserved = 512 + 1.5 * activation + num_gpus / 8 * 1024 + graphs
    if memory_mib > 60 * 1024:
        reserved = max(reserved, 10240)
    return round((memory_mib - reserved) / memory_mib, 3)


def encoder_share(encoder: VisionEncoder) -> float:
    """Factor by which mem_fraction_static's default is multiplied on servers that encode images, because encoders need
    memory (SGLang 0.5.23, arg_groups/memory_hook.py:417, adjust_mem_fraction_for_vlm, which counts 24 layers if a
    config names their number `depth`).
    """
    complexity = (encoder.hidden_size / 1024) ** 2
    return 0.95 * max(0.8, min(1.05, 1 - 0.1 * (complexity - 1)))


def default_max_running(pool_tokens: int, max_context_tokens: int) -> int:
    """SGLang's default of max_running_requests. pool_tokens: tokens that the KV pool holds. max_context_tokens: maximum
    number of tokens of one request.
    """
    by_context = int(pool_tokens / max_context_tokens * 512)
    return min(max(2048, min(by_context, 4096)), pool_tokens // 2)


VLLM_MEM_FRACTION = 0.92
"""vLLM's default of gpu_memory_utilization."""


_FORWARDS_UNDER_WAY = 2
"""Number of forwards that vLLM's asynchronous scheduling has under way at the same time."""


class VllmBatch(NamedTuple):
    """Default limits of one forward of a vLLM engine. Each data-parallel rank is one engine."""

    num_tokens: int
    """Maximum number of tokens (max_num_batched_tokens)."""
    num_requests: int
    """Maximum number of requests (max_num_seqs)."""


def vllm_batch(gpu: GpuSpec) -> VllmBatch:
    if gpu.memory_bytes >= 160 * GIB:
        return VllmBatch(num_tokens=16384, num_requests=1024)
    if gpu.memory_bytes >= 70 * GIB and "a100" not in gpu.name:
        return VllmBatch(num_tokens=8192, num_requests=1024)
    return VllmBatch(num_tokens=2048, num_requests=256)
