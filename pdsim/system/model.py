"""Properties of a language model that do not depend on hardware: parameters, KV bytes, and work of attention."""

from dataclasses import replace
from math import sqrt
from statistics import NormalDist
from typing import ClassVar, Literal

from pdsim.dataclass import dataclass
from pdsim.system.encoder import AudioEncoder, Encoder, VisionEncoder
from pdsim.system.llama import LlamaArchitecture
from pdsim.system.states import CHUNK_TOKENS

Dtype = Literal["bf16", "fp8", "fp4", "int4", "int8"]
"""Data types of weights. Embeddings and output projection are always bf16. int4 and int8 weights are computed in
bf16."""

KvDtype = Literal["fp32", "bf16", "fp8", "fp4"]
"""Data types of KV. fp32 is for CPUs."""

KV_DTYPES: dict[str, KvDtype] = {"float32": "fp32", "bfloat16": "bf16"}
"""Data types of KV by torch's names, which real runs use in records and options."""

StateDtype = Literal["fp32", "fp16", "bf16"]

INDEX_LAYER_BYTES = 132
"""Bytes of an indexer's key of one token in one layer: 128 in fp8, and a scale (SGLang 0.5.23,
model_executor/pool_configurator.py:568)."""
STATE_DTYPE_BYTES: dict[StateDtype, int] = {"fp32": 4, "fp16": 2, "bf16": 2}
DTYPE_BYTES: dict[KvDtype | Dtype, float] = {"fp32": 4, "bf16": 2, "fp8": 1, "fp4": 0.5625, "int4": 0.52, "int8": 1.02}
"""Bytes per element. fp4: including the scales of groups of 16, as in NVFP4 (MXFP4: groups of 32). int4 and int8:
including scales and zeros of groups of 128."""


@dataclass(frozen=True, kw_only=True)
class GroupedQueryAttention:
    """Attention layers with a paged KV cache of key and value heads. Includes multi-head and multi-query attention."""

    KIND: ClassVar = "grouped-query"
    WINDOW_POOL_RATIO: ClassVar = 0.8
    """SGLang's pool for layers with a window holds this share of the main pool's tokens (0.5.23,
    swa_full_tokens_ratio)."""
    index_token_bytes: ClassVar = 0

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of a query or key head."""
    num_window_layers: int = 0
    """Number of layers that attend only to the last window_tokens tokens. has_window_pool tells whether SGLang keeps
    and sends only KV of the window."""
    window_tokens: int = 0
    """Size of the sliding window in tokens. Used with num_window_layers only."""
    has_window_pool: bool = True
    """True: SGLang has a pool of its own for layers with a window, and keeps and sends only KV of the window. False: it
    keeps and sends all KV of these layers (0.5.23, configs/model_config.py:2651, is_hybrid_swa_model).
    """
    value_dim: int | None = None
    """Width of a value head. None: head_dim."""
    num_window_kv_heads: int | None = None
    """Number of KV heads in layers with a window. None: num_kv_heads."""
    window_head_dim: int | None = None
    """Width of key heads in layers with a window. None: head_dim."""
    window_value_dim: int | None = None
    """Width of value heads in layers with a window. None: window_head_dim, or else value_dim."""

    def __post_init__(self) -> None:
        if self.num_window_layers > self.num_layers:
            most = f"expected at most num_layers, {self.num_layers}"
            raise ValueError(f"attention.num_window_layers: {most}, found {self.num_window_layers}")

    @property
    def kept_window_tokens(self) -> int:
        """Number of a request's last tokens whose KV layers with a window need. Engines keep only this KV, except
        SGLang if has_window_pool is False. 0: no layer has a window.
        """
        return self.window_tokens if self.num_window_layers else 0

    @property
    def window_share(self) -> float:
        """Share of the attention layers that have a window."""
        return self.num_window_layers / self.num_layers

    @property
    def _widths(self) -> tuple[int, int]:
        """Width of a key head plus a value head, first in layers without a window, then in layers with one."""
        whole = self.head_dim + (self.value_dim or self.head_dim)
        if self.window_head_dim is None and self.window_value_dim is None:
            return whole, whole
        dim = self.window_head_dim or self.head_dim
        return whole, dim + (self.window_value_dim or self.window_head_dim or self.value_dim or dim)

    def num_kv_elements(self, tp: int) -> int:
        """Number of KV elements per token on one rank, summed over all layers with and without a window. Each rank
        holds at least one KV head. If there are fewer KV heads than ranks, several ranks hold copies of a head.
        """
        return self.num_whole_elements(tp) + self.num_window_elements(tp)

    def num_whole_elements(self, tp: int) -> int:
        """Number of KV elements per token on one rank, summed over the layers that keep the whole context, which are
        the layers without a window.
        """
        return max(1, self.num_kv_heads // tp) * self._widths[0] * (self.num_layers - self.num_window_layers)

    def num_window_elements(self, tp: int) -> int:
        """Number of KV elements per token on one rank, summed over the layers with a window."""
        heads = self.num_kv_heads if self.num_window_kv_heads is None else self.num_window_kv_heads
        return max(1, heads // tp) * self._widths[1] * self.num_window_layers

    @property
    def head_elements(self) -> int:
        """Number of elements of a token's query and of the token's attention output together, in one query head."""
        return self._widths[0]

    @property
    def flops_per_pair(self) -> int:
        """FLOPs of attention for one query token and one context token, over all heads and layers (QK and PV)."""
        whole, window = self._widths
        num_whole = self.num_layers - self.num_window_layers
        return 2 * self.num_query_heads * (num_whole * whole + self.num_window_layers * window)


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: in each layer, a token has one latent, which every rank stores. With
    compress_ratios, several tokens share a latent.
    """

    KIND: ClassVar = "latent"
    WINDOW_POOL_RATIO: ClassVar = 0.1
    """Size of SGLang's pool for layers with a window, as a share of the main pool's tokens, with DeepSeek V4 (0.5.23,
    arg_groups/model_overrides/deepseek_v4.py:48).
    """
    has_window_pool: ClassVar = True

    num_layers: int
    num_query_heads: int
    kv_lora_rank: int
    """Width of a latent without its rotated part."""
    rope_dim: int
    """Width of the rotated part of a key, which all heads share."""
    nope_dim: int
    """Width of the part of a key head that is not rotated."""
    value_dim: int
    """Width of a value head."""
    sparse_tokens: int = 0
    """Maximum number of tokens that a token attends to, chosen by an indexer (DeepSeek sparse attention). 0: a token
    attends to all."""
    compress_ratios: dict[int, int] | None = None
    """For layers that store one latent for several tokens (DeepSeek V4): number of layers (values) by number of tokens
    per latent (keys). None: every layer stores a latent for each token."""
    num_window_layers: int = 0
    """Number of layers that keep the latents of the last kept_window_tokens tokens in addition to compressed latents
    (DeepSeek V4)."""
    kept_window_tokens: int = 0
    index_token_bytes: int = 0
    """Bytes per token of the indexer keys of all layers: fp8 with scales, for every data type of KV (SGLang 0.5.23,
    model_executor/pool_configurator.py:560; vLLM 0.33.0, models/deepseek_v2.py:732)."""

    @property
    def num_index_layers(self) -> int:
        """Number of layers with an indexer. Other layers of sparse attention use the index of an earlier layer. With
        compress_ratios, only layers with the fewest tokens per latent have an indexer, and its keys stand for as many
        tokens as the latents.
        """
        key_tokens = min(self.compress_ratios) if self.compress_ratios else 1
        return self.index_token_bytes * key_tokens // INDEX_LAYER_BYTES

    @property
    def window_share(self) -> float:
        """Share of the layers in which a token attends to a limited number of tokens."""
        return 1.0 if self.sparse_tokens else 0.0

    @property
    def window_tokens(self) -> int:
        """Maximum number of tokens that a token attends to, in layers that limit this number. 0: no layer does."""
        return self.sparse_tokens

    @property
    def _latents_per_token(self) -> float:
        if self.compress_ratios is None:
            return self.num_layers
        return sum(num_layers / ratio for ratio, num_layers in self.compress_ratios.items())

    def num_kv_elements(self, tp: int) -> int:
        del tp
        return int((self.kv_lora_rank + self.rope_dim) * self._latents_per_token)

    def num_window_elements(self, tp: int) -> int:
        """Number of KV elements per token in all layers with a sliding window. num_kv_elements excludes them."""
        del tp
        return (self.kv_lora_rank + self.rope_dim) * self.num_window_layers

    @property
    def head_elements(self) -> int:
        """Number of elements of one query and of its output together, in decode, for one query head. The query is as
        wide as a latent; the output has no rotated part.
        """
        return 2 * self.kv_lora_rank + self.rope_dim

    @property
    def flops_per_pair(self) -> float:
        """FLOPs of attention in prefill for one query token and one context token, over all heads and layers. Keys and
        values are expanded from the latent.
        """
        return 2 * self._latents_per_token * self.num_query_heads * (self.nope_dim + self.rope_dim + self.value_dim)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Routed experts of a model's mixture-of-experts layers."""

    num_layers: int
    """Number of layers with routed experts."""
    num_experts: int
    """Number of routed experts in each layer that has routed experts."""
    num_active: int
    """Number of routed experts that each token uses."""
    intermediate_size: int
    """Inner width of one expert."""
    weight_dtype: Dtype | None = None
    """Data type of the experts' weights. None: the model's type. Experts compute at the rate of the model's type."""
    input_size: int | None = None
    """Width of an expert's input and output, if the model projects hidden states to this width before its experts.
    None: the model's hidden size."""
    num_matrices: int = 3
    """Number of matrices of one expert: 3 (gate, up, down) or 2 (up, down)."""

    def num_params(self, hidden_size: int) -> int:
        """Number of parameters of all experts in all layers."""
        each = self.num_matrices * (self.input_size or hidden_size) * self.intermediate_size
        return self.num_layers * self.num_experts * each

    def fraction_read(self, num_tokens: float, num_gpus: int = 1) -> float:
        """Share of the experts on a GPU that at least one of num_tokens tokens uses, if routing is uniform. num_gpus:
        number of GPUs that hold whole experts. With several GPUs, the result is for the GPU with the most used experts.

        The number of used experts on a GPU is taken as normal, with the variance of drawing without replacement. Blom's
        formula then gives the expected maximum over num_gpus GPUs.
        """
        unused: float = (1 - self.num_active / self.num_experts) ** num_tokens
        if num_gpus == 1 or unused == 1:
            return 1 - unused
        above = NormalDist().inv_cdf((num_gpus - 0.375) / (num_gpus + 0.25))
        return min(1.0, 1 - unused + above * sqrt((1 - unused) * unused * (num_gpus - 1) / (self.num_experts - 1)))


@dataclass(frozen=True, kw_only=True)
class RecurrentState:
    """State of fixed size that linear-attention layers keep for a request."""

    num_layers: int
    """Number of layers of linear attention."""
    conv_bytes: int
    """Bytes of one layer's convolution state of one request, over all ranks."""
    ssm_elements: int
    """Number of elements of one layer's recurrent state of one request, over all ranks."""
    chunk_tokens: int = CHUNK_TOKENS
    """Number n of tokens (config.json: mamba_chunk_size). While kernels compute a prompt, they write its state after
    every n tokens."""

    def num_bytes(self, dtype: StateDtype) -> int:
        return self.num_layers * (self.conv_bytes + self.ssm_elements * STATE_DTYPE_BYTES[dtype])


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model. Fields have the meaning of config.json's fields; `sources` names the source of each number."""

    name: str
    num_params: float
    num_active_params: float
    """Number of parameters that each token uses."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_context_tokens: int
    weight_dtype: Dtype
    num_params_wider_than_fp4: float = 0
    """Number of parameters that stay in bf16 in the model's fp4 checkpoint. Embeddings and output projection are not
    included."""
    num_params_in_bf16: float = 0
    """Number of layers' parameters that stay in bf16 in the model's checkpoint. Embeddings and output projection are
    not included. Not used for fp4 weights: see the field num_params_wider_than_fp4.
    """
    kv_dtype: KvDtype | None = None
    """Data type of KV that the checkpoint names. None: the checkpoint names none."""
    tied_embeddings: bool = False
    attention: GroupedQueryAttention | LatentAttention
    experts: Experts | None = None
    """Routed experts. None: every MLP computes all tokens."""
    state: RecurrentState | None = None
    """State of layers with linear attention. None: the model has no such layers."""
    num_nextn_layers: int = 0
    """Number of the checkpoint's layers that predict further tokens (MTP). Other fields do not include these layers. 0:
    there are none."""
    llama: LlamaArchitecture | None = None
    """Details that real mode needs. Cost models use only `routing`. None: real mode cannot run the model."""
    encoder: VisionEncoder | None = None
    """The image encoder. Its parameters are counted here only, not in num_params. None: there is none, or the entry
    leaves it out.
    """
    audio_encoder: AudioEncoder | None = None
    """The audio encoder. Its parameters are counted here only, not in num_params. None: there is none, or the entry
    leaves it out.
    """
    sources: dict[str, str]

    @property
    def encoders(self) -> dict[str, Encoder]:
        found: dict[str, Encoder | None] = {"image": self.encoder, "audio": self.audio_encoder}
        return {modality: encoder for modality, encoder in found.items() if encoder is not None}

    def in_dtype(self, dtype: Dtype) -> "ModelSpec":
        """Returns the model with its weights in one data type. Embeddings and output projection stay in bf16, and with
        fp4 also num_params_wider_than_fp4 parameters.
        """
        experts = None if self.experts is None else replace(self.experts, weight_dtype=None)
        return replace(self, weight_dtype=dtype, num_params_in_bf16=0, experts=experts)

    def with_redundant(self, num_redundant: int) -> "ModelSpec":
        """Returns the model with num_redundant additional copies of experts in each layer that has experts."""
        if self.experts is None:
            return self
        experts = replace(self.experts, num_experts=self.experts.num_experts + num_redundant)
        added = experts.num_params(self.hidden_size) - self.num_expert_params
        return replace(self, experts=experts, num_params=self.num_params + added)

    @property
    def weight_dtypes(self) -> tuple[Dtype, ...]:
        """Data type of the weights and, if it differs, that of the routed experts: one or two types."""
        own = None if self.experts is None else self.experts.weight_dtype
        return (self.weight_dtype,) if own is None else (self.weight_dtype, own)

    @property
    def weight_bytes(self) -> float:
        return self.shared_bytes + self.expert_bytes

    @property
    def num_expert_params(self) -> int:
        """Number of parameters of all routed experts."""
        return 0 if self.experts is None else self.experts.num_params(self.hidden_size)

    @property
    def num_embedding_params(self) -> int:
        """Number of parameters of an input embedding that is used only for lookup. 0: the embedding is also the output
        projection (tied).
        """
        return 0 if self.tied_embeddings else self.vocab_size * self.hidden_size

    @property
    def expert_bytes(self) -> float:
        return self.num_expert_params * DTYPE_BYTES[self.weight_dtypes[-1]]

    @property
    def shared_bytes(self) -> float:
        """Bytes of all weights except routed experts."""
        narrow = self.num_params - self.num_expert_params - self._num_wide_params
        return narrow * DTYPE_BYTES[self.weight_dtype] + self._num_wide_params * DTYPE_BYTES["bf16"]

    @property
    def _num_wide_params(self) -> float:
        """Number of parameters that stay in bf16 although weight_dtype is narrower: embedding, output projection and
        parts of the layers. 0 if weight_dtype is bf16.
        """
        if self.weight_dtype == "bf16":
            return 0
        return self.vocab_size * self.hidden_size * (2 - self.tied_embeddings) + self._num_kept_params

    @property
    def _num_kept_params(self) -> float:
        """Number of the layers' parameters that stay in bf16 although weight_dtype is narrower. 0: none."""
        return self.num_params_wider_than_fp4 if self.weight_dtype == "fp4" else self.num_params_in_bf16

    @property
    def shared_bytes_read(self) -> float:
        """Bytes of weights that every forward reads. Routed experts are not included."""
        return self.shared_bytes - self.num_embedding_params * DTYPE_BYTES["bf16"]

    @property
    def wide_bytes_read(self) -> float:
        """Bytes of bf16 weights that every forward reads, if weight_dtype is narrower. 0 if weight_dtype is bf16."""
        return DTYPE_BYTES["bf16"] * max(0, self._num_wide_params - self.num_embedding_params)

    @property
    def wide_flops_per_token(self) -> float:
        """FLOPs per token of matrix products with the layers' weights that stay in bf16 although weight_dtype is
        narrower. Does not include the output projection, which a prompt needs for one token only.
        """
        return 2 * self._num_kept_params

    def expert_bytes_read(self, num_tokens: float, num_gpus: int = 1) -> float:
        """Bytes of experts' weights that a forward of num_tokens tokens reads. num_gpus: number of GPUs that hold whole
        experts. With several GPUs: num_gpus times the bytes of the GPU that reads most, because the others wait for
        this GPU.
        """
        return 0.0 if self.experts is None else self.expert_bytes * self.experts.fraction_read(num_tokens, num_gpus)

    @property
    def expert_flops_per_token(self) -> float:
        """FLOPs of one token in the routed experts that compute it."""
        if self.experts is None:
            return 0.0
        return 2 * self.experts.num_params(self.hidden_size) * self.experts.num_active / self.experts.num_experts

    @property
    def flops_per_token(self) -> float:
        """FLOPs of one token in all matrix products, without attention."""
        return 2 * (self.num_active_params - self.num_embedding_params)
