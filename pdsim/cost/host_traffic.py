"""Traffic between the hosts of a server that spans several hosts: bytes that its forwards send through the NICs.

All-reduces are hierarchical: the GPUs of a host reduce over NVLink, then each GPU sums its share with GPUs of other
hosts; both times add up. Servers that send tokens to their experts do this as DeepEP does. Tokens that move over NVLink
at the same time take no additional time: by DeepEP's tables, the NICs are the bottleneck at 2 to 8 hosts of 8 GPUs
(README.md and docs/legacy.md at 0297fc8).
"""

from math import comb

from pdsim.dataclass import dataclass
from pdsim.system.memory import Layout
from pdsim.system.model import ModelSpec

NIC_SHARE = 0.9
"""Share of a NIC's nominal bandwidth that exchanges and all-reduces between hosts reach. Measured for exchanges with
DeepEP 2 over ConnectX-7 (50 GB/s): 45 GB/s at 2 hosts, 46 GB/s at 4 hosts, without the traffic within hosts.
"""
EXCHANGE_NS = 32_000
"""Fixed time in ns of a dispatch or a combine between hosts. Source: median of DeepEP's low-latency kernels at EP16 to
EP256, minus the time of their bytes at NIC_SHARE."""
ALL_REDUCE_NS = 20_000
"""Additional fixed time in ns of an all-reduce over several hosts, in comparison with an all-reduce within one host
(assumed)."""
_DISPATCHED = 1 + 4 / 128
"""Bytes of one element of a hidden state that is sent to an expert: fp8, with a scale of 4 bytes per 128 elements."""
_BF16 = 2


@dataclass(frozen=True)
class HostMoves:
    """Traffic through each GPU's NIC, for prefill forwards or for decode steps.

    Parameters of its methods: num_tokens: tokens that the instance computes. routed: tokens that experts compute per
    data-parallel instance of the server (the mean over these instances), times the ratio of the busiest GPU's expert
    load to the mean load.
    """

    fixed_ns: float
    """Time in ns that all-reduces and exchanges with experts on other hosts take in one forward besides moving bytes,
    over all layers.
    """
    reduced_bytes: float
    """Bytes that the all-reduces of all layers send through one NIC, for each token that the instance computes. Each
    NIC receives as many bytes."""
    exchanged_bytes: float
    """Bytes per token that one NIC sends in all layers together: inputs on the way to experts of other hosts, and the
    experts' results on the way back. Counted per token that the instance computes.
    """
    bandwidth: float
    """Rate in bytes per second that one NIC reaches in each direction."""

    def out_bytes(self, num_tokens: float) -> float:
        """Bytes that each NIC sends for num_tokens tokens of the instance."""
        return (self.reduced_bytes + self.exchanged_bytes) * num_tokens

    def in_bytes(self, num_tokens: float, routed: float) -> float:
        """Bytes that the NIC of the busiest GPU receives for num_tokens tokens of the instance. routed: see
        HostMoves.
        """
        return self.reduced_bytes * num_tokens + self.exchanged_bytes * routed

    def moving_ns(self, num_tokens: float, routed: float) -> float:
        """Time in ns to send and receive all bytes on idle links, without the fixed time. num_tokens, routed: see
        HostMoves.
        """
        return 1e9 * max(self.out_bytes(num_tokens), self.in_bytes(num_tokens, routed)) / self.bandwidth

    def ns(self, num_tokens: float, routed: float) -> float:
        """Time in ns of all exchanges between hosts in a forward of num_tokens tokens on idle links, including the
        fixed time. routed: see HostMoves.
        """
        return self.fixed_ns + self.moving_ns(num_tokens, routed)


@dataclass(frozen=True)
class HostTraffic:
    """Bytes that one instance exchanges between the hosts of its server, and the time that this takes."""

    prefill: HostMoves
    """Bytes between the hosts in a prefill forward."""
    decode: HostMoves
    """Bytes between the hosts in a decode step."""
    busiest: float
    """Number of tokens that the busiest GPU's experts compute, divided by the mean over all GPUs."""
    overlaps: bool = False
    """True: one half of a batch exchanges tokens while the other half computes (two-batch overlap)."""

    def prefill_ns(self, num_tokens: float, routed: float, computing_ns: float) -> float:
        """Time in ns that exchanges on idle links add to a forward. num_tokens, routed: see HostMoves. computing_ns:
        duration of the forward without exchanges.
        """
        return self._seen_ns(self.prefill.ns(num_tokens, routed), computing_ns)

    def decode_ns(self, num_tokens: float, routed: float, computing_ns: float) -> float:
        """Time in ns by which exchanges and all-reduces between hosts prolong a decode step, if no other transfer uses
        the links. num_tokens, routed: see HostMoves. computing_ns: duration of the step without traffic between hosts
        and without reading KV.
        """
        return self._seen_ns(self.decode.ns(num_tokens, routed), computing_ns)

    def _seen_ns(self, exchange_ns: float, computing_ns: float) -> float:
        return max(0.0, exchange_ns - computing_ns) if self.overlaps else exchange_ns


def host_traffic(layout: Layout, slower: float = 1) -> HostTraffic | None:
    """Returns the traffic of an instance between hosts. None: the instance's server lies within one NVLink domain.
    slower: factor on the times of the traffic.

    Prefill uses DeepEP's normal kernels, which send a token once to each host that has one of its experts. Decode uses
    DeepEP's low-latency kernels, which send a token once per expert. If all GPUs share each expert, or without an
    all-to-all backend, every host gets all tokens.
    """
    if layout.num_domains == 1:
        return None
    spec, num_hosts = layout.model, layout.num_domains
    bandwidth = NIC_SHARE * layout.gpu.nic_bandwidth / slower
    num_exchanges = 2 * spec.experts.num_layers if spec.experts is not None and layout.dp > 1 else 0
    num_reductions = 2 * spec.num_layers if layout.tp > layout.gpus_per_domain else 0
    fixed_ns = slower * (num_exchanges * EXCHANGE_NS + num_reductions * ALL_REDUCE_NS)
    reduced = 0.0
    if num_reductions:
        peers = layout.tp // layout.gpus_per_domain
        each = 2 * (peers - 1) / peers * _BF16 * spec.hidden_size / layout.gpus_per_domain
        reduced = num_reductions * each

    def moves(num_copies: float, element_bytes: float) -> HostMoves:
        exchanged = num_exchanges / 2 * num_copies * element_bytes * spec.hidden_size / layout.tp
        return HostMoves(fixed_ns, reduced, exchanged, bandwidth)

    if spec.experts is None or not layout.sends_to_experts:
        prefill = decode = moves(num_hosts - 1, 2 * _BF16)
    else:
        prefill = moves(num_other_hosts(spec, num_hosts), _DISPATCHED + _BF16)
        decode = moves(spec.experts.num_active * (1 - 1 / num_hosts), _DISPATCHED + _BF16)
    return HostTraffic(prefill, decode, 1 + layout.expert_skew, layout.overlaps_batches)


def num_other_hosts(spec: ModelSpec, num_hosts: int) -> float:
    """Mean number of other hosts to which a token is sent, because they have one of its experts. Routing is assumed to
    be uniform.

    With groups of experts (DeepSeek-V3), a token's experts come from a few groups. If each host holds whole groups, the
    token reaches fewer hosts than without groups.
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
