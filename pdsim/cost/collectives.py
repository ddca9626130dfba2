"""Times of collectives among the GPUs of a server: bf16 all-reduces by message size, and collectives among GPUs that
divide the tokens of prompts or the KV of requests.
"""

from collections.abc import Callable
from typing import NamedTuple

from pdsim.dataclass import dataclass
from pdsim.system.memory import Layout
from pdsim.system.model import LatentAttention

_BF16 = 2
_LOG_SUM_EXP = 4
"""Bytes of one query head's log-sum-exp, which is needed to merge attention outputs over parts of a context."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Times of one kind of collective, of NCCL or of an engine: a fixed time, and a time in proportion to the bytes."""

    fixed_ns: float
    """Fixed time in ns of one call."""
    link_efficiency: float
    """Share of the nominal NVLink bandwidth that the collective reaches."""

    def ns(self, nominal_ns: float) -> float:
        """Time in ns of one call. nominal_ns: time in ns of the call's bytes at the nominal NVLink bandwidth."""
        return self.fixed_ns + nominal_ns / self.link_efficiency


class Nccl(NamedTuple):
    """NCCL's collectives. Engines call them for large all-reduces, all-gathers and reduce-scatters."""

    large_all_reduce: Collective
    """All-reduces of large messages (SGLang 0.5.23: distributed/device_communicators/custom_all_reduce.py, from
    8 MiB)."""
    gather: Collective
    """Times of all-gathers, and of reduce-scatters."""


class AllReduces:
    """Times of ring all-reduces among num_gpus GPUs, and of their halves: an all-gather and a reduce-scatter.

    With nccl, an all-reduce takes the shorter time of the engine's kernel and NCCL's, and an all-gather or a
    reduce-scatter takes NCCL's time. Without nccl, an all-gather or a reduce-scatter is timed as an all-reduce of half
    the bytes by the engine's kernel.
    """

    def __init__(
        self, layout: Layout, num_gpus: int, fixed_ns: float, link_efficiency: float, nccl: Nccl | None
    ) -> None:
        self._token_ns = (
            1e9 * 2 * (num_gpus - 1) / num_gpus * 2 * layout.model.hidden_size / layout.gpu.nvlink_bandwidth
        )
        """Time in ns in which one GPU sends its bytes of a ring all-reduce of one token's bf16 hidden state, at the
        nominal NVLink bandwidth."""
        self._own = Collective(fixed_ns=fixed_ns, link_efficiency=link_efficiency)
        self._nccl = nccl

    def ns(self, num_tokens: float) -> float:
        """Time in ns of one all-reduce of num_tokens tokens' activations."""
        nominal_ns = num_tokens * self._token_ns
        own_ns = self._own.ns(nominal_ns)
        return own_ns if self._nccl is None else min(own_ns, self._nccl.large_all_reduce.ns(nominal_ns))

    def half_ns(self, num_tokens: float) -> float:
        """Time in ns of an all-gather or a reduce-scatter of num_tokens tokens' activations. Each moves half of the
        bytes of an all-reduce.
        """
        gather = self._own if self._nccl is None else self._nccl.gather
        return gather.ns(num_tokens * self._token_ns / 2)


class LayerSums:
    """Times of the all-reduces that add up the outputs of an instance's layers, two per layer. A layer whose tokens are
    sent to their experts has a reduce-scatter and an all-gather instead.
    """

    def __init__(self, layout: Layout, all_reduces: Callable[..., AllReduces]) -> None:
        """all_reduces: called with the argument num_gpus, returns the times of all-reduces among this number of
        GPUs.
        """
        experts = layout.model.experts
        self._cp = layout.cp
        self._num_halves = 2 * experts.num_layers if experts and layout.sends_to_experts and layout.tp > 1 else 0
        """Number of reduce-scatters and all-gathers together in a forward: two in each layer with experts. 0 unless
        tokens are sent to their experts and tp is above 1."""
        self._num_own = 2 * layout.model.num_layers - self._num_halves if layout.tp > 1 else 0
        self._own = all_reduces(num_gpus=min(layout.tp, layout.gpus_per_domain))
        """Times of all-reduces among the GPUs of one context-parallel group or, if the group spans several NVLink
        domains, among its GPUs of one domain."""
        self._num_joint = 0 if experts is None or layout.cp == 1 else experts.num_layers
        self._joint = all_reduces(num_gpus=layout.tp * layout.cp)
        """Times of all-reduces of experts' outputs among the GPUs of all context-parallel groups."""

    def ns(self, num_tokens: int, num_groups: int) -> float:
        """Time in ns of one forward's all-reduces, and of the reduce-scatters and all-gathers that stand in their
        place. num_groups: number of context-parallel groups of GPUs that share the forward's tokens. 1: each group
        computes all tokens, and all-reduces over all groups add up the experts' outputs. More: groups gather the
        experts' outputs instead, in a time that Collectives.of_prompts gives.
        """
        num_joint = 0 if num_groups == self._cp else self._num_joint
        num_own = max(0, self._num_own - num_joint)
        own_ns = num_own * self._own.ns(num_tokens / num_groups) if num_own else 0.0
        if self._num_halves:
            own_ns += self._num_halves * self._own.half_ns(num_tokens / num_groups)
        return own_ns + num_joint * self._joint.ns(num_tokens) if num_joint else own_ns


class RankSums:
    """Times of giving the tokens of all data-parallel ranks to each GPU's experts, and of summing the results."""

    def __init__(self, layout: Layout, num_layers: int, all_reduces: AllReduces, bandwidth: float | None) -> None:
        """num_layers: number of layers with experts. all_reduces: times of all-reduces among all GPUs of the server.
        bandwidth: bytes per second at which a GPU copies activations; None: copies take no time.
        """
        copied_bytes = num_layers * 8 * layout.model.hidden_size
        self._copied_ns = 1e9 * copied_bytes / bandwidth if bandwidth else 0.0
        """Time in ns for each token of the server's ranks, over all layers with experts, of copies in bf16: a GPU fills
        the buffer of all tokens with zeros, copies the sum (SGLang 0.5.12, layers/dp_attention.py:471 and 495) and
        reads it for the router. 0: bandwidth is None."""
        self._num_calls = 2 * num_layers
        self._dp = layout.dp
        self._sums_prompts = layout.sums_prompts
        self._all_reduces = all_reduces

    def prefill_ns(self, num_tokens: float) -> float:
        """Time in ns for giving tokens to experts and summing results, over all layers of a forward with prompts.
        num_tokens: mean number of tokens of a rank.
        """
        if not self._sums_prompts:
            return self.decode_ns(num_tokens)
        all_tokens = num_tokens * self._dp
        return self._num_calls * self._all_reduces.ns(all_tokens) + self._copied_ns * all_tokens

    def decode_ns(self, num_tokens: float) -> float:
        """Time in ns for giving tokens to experts and summing results, over all layers of a decode step. num_tokens:
        mean number of tokens of a rank.
        """
        return self._num_calls * self._all_reduces.half_ns(num_tokens * self._dp)


class Gathers(NamedTuple):
    """Time of the collectives of one forward: a fixed time and a time per token."""

    fixed_ns: float = 0
    """Fixed time in ns of a forward's collectives."""
    token_ns: float = 0
    """Additional time in ns for each token."""

    def ns(self, num_tokens: float) -> float:
        """Returns the time in ns of all collectives for num_tokens tokens; 0 without tokens."""
        return self.fixed_ns + num_tokens * self.token_ns if num_tokens else 0.0


NO_GATHERS = Gathers()


@dataclass(frozen=True)
class Collectives:
    """Times of the collectives by which a server's GPUs share prompts (context parallelism) and divided KV (DCP). Each
    collective is assumed to have the fixed time of an all-reduce, and to reach the share of NVLink bandwidth that
    all-reduces reach.
    """

    layout: Layout
    fixed_ns: float
    """Fixed time in ns of one collective."""
    link_efficiency: float
    """Share of the nominal NVLink bandwidth that collectives reach."""

    def of_prompts(self) -> Gathers:
        """Fixed time, and time per computed prompt token, of the collectives of context parallelism in a prefill
        forward. These collectives give each layer's keys and values to all context-parallel groups of GPUs, hidden
        states to the experts, and the experts' outputs to all groups. 0 without context parallelism.
        """
        cp, model = self.layout.cp, self.layout.model
        if cp == 1:
            return NO_GATHERS
        num_experts = 0 if model.experts is None else model.experts.num_layers
        num_bytes = self.layout.read_token_bytes + 2 * _BF16 * num_experts * model.hidden_size
        return self._gathers(model.attention.num_layers + 2 * num_experts, num_bytes * (cp - 1) / cp)

    def of_queries(self) -> Gathers:
        """Fixed time, and time per computed token, of a forward's collectives for attention to divided KV (DCP). Each
        GPU receives the queries of its DCP group's heads and, for its own heads, the other GPUs' outputs with their
        log-sum-exps (SGLang 0.5.23, layers/dcp/comm.py: all_gather_q_for_mla_decode and dcp_a2a_lse_reduce; vLLM
        0.33.0, v1/attention/ops/dcp.py: cp_lse_ag_out_rs). 0 without DCP.
        """
        layout, attention = self.layout, self.layout.model.attention
        if layout.dcp == 1:
            return NO_GATHERS
        head_bytes = _BF16 * attention.head_elements + _LOG_SUM_EXP
        num_bytes = (layout.dcp - 1) * attention.num_query_heads // layout.tp * head_bytes * attention.num_layers
        return self._gathers(layout.dcp_rules.num_exchanges * attention.num_layers, num_bytes)

    def of_contexts(self) -> Gathers:
        """Fixed time, and time per context token of a prompt, of the collectives in which each GPU receives the latents
        that the other GPUs of its DCP group hold (SGLang 0.5.23, layers/dcp/comm.py: all_gather_kv_cache_for_dcp; vLLM
        0.33.0, MLADCPManager.kv_gather). 0 without DCP or latent attention.
        """
        layout, attention = self.layout, self.layout.model.attention
        if layout.dcp == 1 or not isinstance(attention, LatentAttention):
            return NO_GATHERS
        return self._gathers(attention.num_layers, (layout.dcp - 1) * layout.read_token_bytes)

    def _gathers(self, num_collectives: int, token_bytes: float) -> Gathers:
        """Returns the time of a forward's num_collectives collectives. token_bytes: bytes that each GPU receives for
        each token whose data are gathered, summed over all collectives.
        """
        rate = self.layout.gpu.nvlink_bandwidth * self.link_efficiency
        return Gathers(num_collectives * self.fixed_ns, 1e9 * token_bytes / rate)
