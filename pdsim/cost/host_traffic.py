"""Bytes that forwards of a server over several hosts move between its hosts, over NICs.

All-reduces are hierarchical: GPUs of a host reduce over NVLink, and each sums its share with its peers on other hosts.
Whole experts get their tokens as DeepEP sends them. Parts over NVLink proceed beside those over NICs, which are the
bottleneck at 2 to 8 hosts of 8 GPUs by DeepEP's tables (README.md and docs/legacy.md at 0297fc8).
"""

from dataclasses import dataclass
from math import comb

from pdsim.system.memory import Layout
from pdsim.system.model import ModelSpec

NIC_SHARE = 0.9
"""Share of a NIC's bandwidth that exchanges reach. DeepEP 2 over ConnectX-7 of 50 GB/s: 45 GB/s without the traffic
inside hosts at 2 hosts (90 GB/s with it), 46 GB/s at 4."""
EXCHANGE_NS = 32_000
"""Time of a dispatch or combine between hosts beyond its bytes. The median of DeepEP's low-latency kernels at EP16 to
EP256, whose bytes move at NIC_SHARE."""
ALL_REDUCE_NS = 20_000
"""Time by which an all-reduce over hosts is longer than one in a host, beyond its bytes (assumed)."""
_DISPATCHED = 1 + 4 / 128
"""Bytes of an element on its way to experts: fp8, and a scale of 4 bytes for 128 elements."""
_BF16 = 2


@dataclass(frozen=True)
class HostMoves:
    """Bytes of one kind of forward on the NIC of each GPU."""

    fixed_ns: float
    """Time of all layers beyond bytes."""
    reduced_bytes: float
    """Bytes of all layers for each token of the instance: sent and received by all-reduces."""
    exchanged_bytes: float
    """Bytes of all layers that a token of the instance sends to experts and receives back."""
    bandwidth: float
    """Bytes per second that one NIC reaches in each direction."""

    def out_bytes(self, num_tokens: float) -> float:
        """Bytes sent for the instance's own tokens."""
        return (self.reduced_bytes + self.exchanged_bytes) * num_tokens

    def in_bytes(self, num_tokens: float, routed: float) -> float:
        """Bytes received. routed: tokens of the busiest GPU's experts, as a number of tokens of an instance."""
        return self.reduced_bytes * num_tokens + self.exchanged_bytes * routed

    def moving_ns(self, num_tokens: float, routed: float) -> float:
        """Time of the bytes on idle links."""
        return 1e9 * max(self.out_bytes(num_tokens), self.in_bytes(num_tokens, routed)) / self.bandwidth

    def ns(self, num_tokens: float, routed: float) -> float:
        """Time on idle links."""
        return self.fixed_ns + self.moving_ns(num_tokens, routed)


@dataclass(frozen=True)
class HostTraffic:
    """Traffic of one instance between the hosts of its server."""

    prefill: HostMoves
    decode: HostMoves
    busiest: float
    """Expert tokens of the busiest GPU over the mean."""
    overlaps: bool = False
    """True: one half of a batch is exchanged while the other half is computed (two-batch overlap)."""

    def prefill_ns(self, num_tokens: float, routed: float, computing_ns: float) -> float:
        """Time by which exchanges on idle links prolong a forward that computes so long."""
        return self._seen_ns(self.prefill.ns(num_tokens, routed), computing_ns)

    def decode_ns(self, num_tokens: float, routed: float, computing_ns: float) -> float:
        """The same for a decode step, whose time without its KV is given."""
        return self._seen_ns(self.decode.ns(num_tokens, routed), computing_ns)

    def _seen_ns(self, exchange_ns: float, computing_ns: float) -> float:
        return max(0.0, exchange_ns - computing_ns) if self.overlaps else exchange_ns


def host_traffic(layout: Layout) -> HostTraffic | None:
    """Traffic of an instance; None: its server lies within one NVLink domain.

    Prefill has DeepEP's normal kernels, which send a token once to each host of its experts, and decode those of low
    latency, which send it once for each expert. Where all GPUs share each expert, each host gets all tokens.
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
    """Mean number of other hosts that have an expert of a token, whose routing is uniform.

    Where experts are chosen from some groups only and hosts hold whole groups, fewer hosts are reached.
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
