"""Times of collectives among GPUs that divide the tokens of prompts or the KV of requests."""

from typing import NamedTuple

from pdsim.dataclass import dataclass
from pdsim.system.memory import Layout
from pdsim.system.model import LatentAttention

_BF16 = 2
_LOG_SUM_EXP = 4
"""Bytes of one query head's log-sum-exp, which is needed to merge attention outputs over parts of a context."""


class Gathers(NamedTuple):
    """Time of the collectives of one forward: a fixed time and a time per token."""

    fixed_ns: float = 0
    """Fixed time in ns of a forward's collectives."""
    token_ns: float = 0
    """Additional time in ns for each token."""

    def ns(self, num_tokens: float) -> float:
        """Returns the time in ns for num_tokens tokens; 0 without tokens."""
        return self.fixed_ns + num_tokens * self.token_ns if num_tokens else 0.0


NO_GATHERS = Gathers()


@dataclass(frozen=True)
class Collectives:
    """Collectives among a server's GPUs. Each collective has the fixed time and the bandwidth of an all-reduce."""

    layout: Layout
    fixed_ns: float
    """Fixed time in ns of one collective."""
    link_efficiency: float
    """Share of the nominal NVLink bandwidth that collectives reach."""

    def of_prompts(self) -> Gathers:
        """Collectives of context parallelism, per prompt token. Keys and values of each layer go to all
        context-parallel groups of GPUs. Hidden states go to the experts, and the experts' outputs come back.
        """
        cp, model = self.layout.cp, self.layout.model
        if cp == 1:
            return NO_GATHERS
        num_experts = 0 if model.experts is None else model.experts.num_layers
        num_bytes = self.layout.read_token_bytes + 2 * _BF16 * num_experts * model.hidden_size
        return self._gathers(model.attention.num_layers + 2 * num_experts, num_bytes * (cp - 1) / cp)

    def of_queries(self) -> Gathers:
        """Collectives of divided KV, per computed token. Each GPU receives the queries of its group's heads and, for
        its own heads, the other GPUs' outputs with their log-sum-exps (SGLang 0.5.23, layers/dcp/comm.py:
        all_gather_q_for_mla_decode and dcp_a2a_lse_reduce; vLLM 0.33.0, v1/attention/ops/dcp.py: cp_lse_ag_out_rs).
        """
        layout, attention = self.layout, self.layout.model.attention
        if layout.dcp == 1:
            return NO_GATHERS
        head_bytes = _BF16 * attention.head_elements + _LOG_SUM_EXP
        num_bytes = (layout.dcp - 1) * attention.num_query_heads // layout.tp * head_bytes * attention.num_layers
        return self._gathers(layout.dcp_rules.num_exchanges * attention.num_layers, num_bytes)

    def of_contexts(self) -> Gathers:
        """Collectives of divided latent KV, per context token of a prompt. Each GPU receives the latents that other
        GPUs hold (SGLang 0.5.23, layers/dcp/comm.py: all_gather_kv_cache_for_dcp; vLLM 0.33.0,
        MLADCPManager.kv_gather).
        """
        layout, attention = self.layout, self.layout.model.attention
        if layout.dcp == 1 or not isinstance(attention, LatentAttention):
            return NO_GATHERS
        return self._gathers(attention.num_layers, (layout.dcp - 1) * layout.read_token_bytes)

    def _gathers(self, num_collectives: int, token_bytes: float) -> Gathers:
        """Time of num_collectives collectives in each forward. token_bytes: bytes per token that each GPU receives in
        all of them.
        """
        rate = self.layout.gpu.nvlink_bandwidth * self.link_efficiency
        return Gathers(num_collectives * self.fixed_ns, 1e9 * token_bytes / rate)
