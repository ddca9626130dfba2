"""What a GPU can do: nominal figures; what is reached of them is the cost model's matter."""

from dataclasses import dataclass

from pdsim.system.model import Dtype


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """One GPU; `sources` says where each number comes from. Rates are per second and per direction."""

    name: str
    memory_bytes: float
    memory_bandwidth: float
    flops: dict[Dtype, float]
    """Dense; a type that the GPU has no units for is absent."""
    nvlink_bandwidth: float
    nic_bandwidth: float
    host_bandwidth: float
    """Of the link to the memory of its host."""
    gpus_per_server: int = 8
    """Joined by one NVLink domain, or on one board: as far as tensor parallelism goes."""
    sources: dict[str, str]

    def flops_for(self, dtype: Dtype) -> float:
        """Of the type itself, or of the widest narrower type's compute it runs in: bf16."""
        return self.flops.get(dtype, self.flops["bf16"])
