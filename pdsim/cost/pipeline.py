"""Times of a forward that passes through pipeline stages, each with its layers on GPUs of its own."""

from dataclasses import dataclass

from pdsim.system.memory import Layout
from pdsim.system.model import stage_layers

LINK_EFFICIENCY = 0.8
"""Share of a link's bandwidth that activations reach: an assumption, as that of all-reduces in a roofline."""


@dataclass(frozen=True)
class PipelineTimes:
    """Stages of an instance, whose cost model tells the time of the largest."""

    shares: tuple[float, ...]
    """Time of each stage, over that of the largest."""
    hop_token_ns: float
    """Time of one token's activations to the next stage."""

    def pass_on(self, start_ns: int, largest_ns: int, num_tokens: int, free_ns: list[int]) -> int:
        """Send a forward through all stages; the time when it leaves the last. free_ns: when each stage is free."""
        hop_ns, end_ns = round(self.hop_token_ns * num_tokens), start_ns
        for stage, share in enumerate(self.shares):
            begin_ns = max(end_ns + (hop_ns if stage else 0), free_ns[stage])
            free_ns[stage] = end_ns = begin_ns + max(1, round(share * largest_ns))
        return end_ns


def pipeline_times(layout: Layout, num_layers: int) -> PipelineTimes:
    """num_layers: of the whole model. Hidden states and residuals go on in bf16, a part of them from each rank."""
    layers, gpu = stage_layers(num_layers, layout.pp), layout.gpu
    bandwidth = gpu.nvlink_bandwidth if layout.num_gpus <= gpu.gpus_per_server else gpu.nic_bandwidth
    return PipelineTimes(
        shares=tuple(n / max(layers) for n in layers),
        hop_token_ns=1e9 * 4 * layout.model.hidden_size / (layout.tp * bandwidth * LINK_EFFICIENCY),
    )
