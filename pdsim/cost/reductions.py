"""Times of bf16 all-reduces among the GPUs of a server, by message size."""

from dataclasses import dataclass

from pdsim.system.memory import Layout


@dataclass(frozen=True, kw_only=True)
class LargeMessages:
    """Times of all-reduces of large messages, for which engines call NCCL in place of their own kernel (SGLang 0.5.23:
    distributed/device_communicators/custom_all_reduce.py, from 8 MiB).
    """

    fixed_ns: float
    """Fixed time in ns of one all-reduce."""
    link_efficiency: float
    """Share of the nominal NVLink bandwidth that the all-reduce reaches."""


class AllReduces:
    """Times of ring all-reduces among num_gpus GPUs. If large messages have their own kernel, an all-reduce takes the
    shorter time of both kernels.
    """

    def __init__(
        self, layout: Layout, num_gpus: int, fixed_ns: float, link_efficiency: float, large: LargeMessages | None
    ) -> None:
        token_ns = 1e9 * 2 * (num_gpus - 1) / num_gpus * 2 * layout.model.hidden_size / layout.gpu.nvlink_bandwidth
        """Time in ns of one token's bf16 activations at the nominal rate."""
        self.fixed_ns = fixed_ns
        self._token_ns = token_ns / link_efficiency
        self._large = None if large is None else (large.fixed_ns, token_ns / large.link_efficiency)

    def ns(self, num_tokens: float) -> float:
        """Time in ns of one all-reduce of num_tokens tokens' activations."""
        small_ns = self.fixed_ns + num_tokens * self._token_ns
        if self._large is None:
            return small_ns
        fixed_ns, token_ns = self._large
        return min(small_ns, fixed_ns + num_tokens * token_ns)
