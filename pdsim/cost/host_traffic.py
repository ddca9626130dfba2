"""Bytes that forwards of a server over several hosts send between its hosts, through the NICs.

All-reduces are hierarchical: the GPUs of a host reduce over NVLink, and each GPU sums its share with its peers on other
hosts. Expert-parallel servers send tokens as DeepEP does. NVLink and NIC traffic overlap, and the NICs are the
bottleneck at 2 to 8 hosts of 8 GPUs by DeepEP's tables (README.md and docs/legacy.md at 0297fc8).
"""

from dataclasses import dataclass
from math import comb

from pdsim.system.memory import Layout
from pdsim.system.model import ModelSpec

NIC_SHARE = 0.9
"""Share of a NIC's bandwidth that exchanges reach. DeepEP 2 over ConnectX-7 of 50 GB/s: 45 GB/s without the traffic
inside hosts at 2 hosts (90 GB/s with it), 46 GB/s at 4.
"""
EXCHANGE_NS = 32_000
"""Time in ns of a dispatch or combine between hosts, without the time of its bytes. Source: median of DeepEP's
low-latency kernels at EP16 to EP256, with bytes at NIC_SHARE.
"""
ALL_REDUCE_NS = 20_000
"""Time in ns by which an all-reduce over several hosts is longer than one within a host, without the time of its bytes
(assumed).
"""
_DISPATCHED = 1 + 4 / 128
"""Bytes of an element that is sent to experts: fp8, with a scale of 4 bytes for 128 elements."""
_BF16 = 2


@dataclass(frozen=True)
class HostMoves:
    """Traffic of one kind of forward through the NIC of each GPU."""

    fixed_ns: float
    """Time in ns of all layers' exchanges without the time of their bytes."""
    reduced_bytes: float
    """Bytes per token of the instance that all-reduces of all layers send, and also receive."""
    exchanged_bytes: float
    """Bytes per token of the instance that all layers send to experts and receive back."""
    bandwidth: float
    """Bytes per second that one NIC reaches in each direction."""

    def out_bytes(self, num_tokens: float) -> float:
        """Bytes that each NIC sends for the instance's own tokens."""
        return (self.reduced_bytes + self.exchanged_bytes) * num_tokens

    def in_bytes(self, num_tokens: float, routed: float) -> float:
        """Bytes received. routed: tokens of the busiest GPU's experts, as a number of tokens of an instance."""
        return self.reduced_bytes * num_tokens + self.exchanged_bytes * routed

    def moving_ns(self, num_tokens: float, routed: float) -> float:
        """Time in ns of the bytes on idle links."""
        return 1e9 * max(self.out_bytes(num_tokens), self.in_bytes(num_tokens, routed)) / self.bandwidth

    def ns(self, num_tokens: float, routed: float) -> float:
        """Time in ns of all exchanges on idle links, with the fixed time."""
        return self.fixed_ns + self.moving_ns(num_tokens, routed)


@dataclass(frozen=True)
class HostTraffic:
    """Traffic of one instance between the hosts of its server."""

    prefill: HostMoves
    decode: HostMoves
    busiest: float
    """Tokens of the busiest GPU's experts, relative to the mean GPU."""
    overlaps: bool = False
    """True: half of a batch exchanges while the other half computes (two-batch overlap)."""

    def prefill_ns(self, num_tokens: float, routed: float, computing_ns: float) -> float:
        """Time in ns by which exchanges on idle links prolong a forward. computing_ns: duration of the forward without
        them.
        """
        return self._seen_ns(self.prefill.ns(num_tokens, routed), computing_ns)

    def decode_ns(self, num_tokens: float, routed: float, computing_ns: float) -> float:
        """Time in ns by which exchanges on idle links prolong a decode step. computing_ns: its duration without
        exchanges and KV.
        """
        return self._seen_ns(self.decode.ns(num_tokens, routed), computing_ns)

    def _seen_ns(self, exchange_ns: float, computing_ns: float) -> float:
        return max(0.0, exchange_ns - computing_ns) if self.overlaps else exchange_ns


def host_traffic(layout: Layout) -> HostTraffic | None:
    """Traffic of an instance between hosts. None: its server lies within one NVLink domain.

    Prefill uses DeepEP's normal kernels, which send a token once to each host that has one of its experts. Decode uses
    DeepEP's low-latency kernels, which send a token once per expert. If all GPUs share each expert, every host gets all
    tokens.
    """
    if layout.num_domains == 1:
        return None
    spec, num_hosts = layout.model, layout.num_domains
    bandwidth = NIC_SHARE * layout.gpu.nic_bandwidth
    num_exchanges = 2 * spec.experts.num_layers if spec.experts is not None and layout.dp > 1 else 0
    num_reductions = 2 * spec.num_layers if layout.tp > layout.gpus_per_domain else 0
    fixed_ns = num_exchanges * EXCHANGE_NS + num_reductions * ALL_REDUCE_NS
    reduced = 0.0
    if num_reductions:
        peers = layout.tp // layout.gpus_per_domain
        each = 2 * (peers - 1) / peers * _BF16 * spec.hidden_size / layout.gpus_per_domain
        reduced = num_reductions * each

    def moves(num_copies: float, element_bytes: float) -> HostMoves:
        exchanged = num_exchanges / 2 * num_copies * element_bytes * spec.hidden_size / layout.tp
        return HostMoves(fixed_ns, reduced, exchanged, bandwidth)

    if spec.experts is None or not layout.has_whole_experts:
        prefill = decode = moves(num_hosts - 1, 2 * _BF16)
    else:
        prefill = moves(num_other_hosts(spec, num_hosts), _DISPATCHED + _BF16)
        decode = moves(spec.experts.num_active * (1 - 1 / num_hosts), _DISPATCHED + _BF16)
    return HostTraffic(prefill, decode, 1 + layout.expert_skew, layout.overlaps_batches)


def num_other_hosts(spec: ModelSpec, num_hosts: int) -> float:
    """Mean number of other hosts that have an expert of a token, with uniform routing.

    If a token's experts come from a few groups, and hosts hold whole groups, a token reaches fewer hosts.
    """
    experts, routing = spec.experts, None if spec.llama is None else spec.llama.routing
    assert experts is not None
    if routing is None or routing.num_groups % num_hosts:
        return (num_hosts - 1) * (1 - (1 - 1 / num_hosts) ** experts.num_active)
    total, active, held = routing.num_groups, routing.num_active_groups, routing.num_groups // num_hosts
    missed = 0.0
    for num_own in range(max(0, active + held - total), min(held, active) + 1):
        chance = comb(held, num_own) * comb(total - held, active - num_own) / comb(total, active)
        missed += chance * (1 - num_own / active) ** experts.num_active
    return (num_hosts - 1) * (1 - missed)
