"""Options of a real run: what the flags of pdreal say, and scenarios do not."""

import os
from dataclasses import dataclass
from typing import Literal

Device = Literal["cpu", "cuda"]
RealDtype = Literal["float32", "bfloat16"]
KvCacheDtype = Literal["auto", "fp8"]
Quantization = Literal["fp8"]


@dataclass(frozen=True, kw_only=True)
class Options:
    device: Device = "cpu"
    dtype: RealDtype = "float32"
    """Type of weights, of KV unless it has its own, and of all that is computed."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """fp8 is e4m3."""
    quantization: Quantization | None = None
    """Of the layers' matrices, in blocks; a checkpoint that has it has it anyway."""
    weights: str = "seed:0"
    """Random by that seed, or the folder of a checkpoint."""
    threads: int | None = None
    """Threads of each rank, for torch on the CPU; None divides the cores of this process among the ranks."""
    check_kv: bool = False
    """Compare the KV of every request on both sides as it arrives."""
    record_experts: bool = False
    """Keep how many tokens each expert saw in each step."""

    def threads_of_rank(self, num_ranks: int) -> int:
        return self.threads or max(1, len(os.sched_getaffinity(0)) // num_ranks)

    def cores_of_rank(self, index: int, num_ranks: int) -> tuple[int, ...]:
        """An equal part of this process's cores on a CPU, where ranks that share cores slow each other.

        All cores on GPUs, and where there are more ranks than cores.
        """
        cores = sorted(os.sched_getaffinity(0))
        share = len(cores) // num_ranks
        return tuple(cores[index * share : (index + 1) * share] if share and self.device == "cpu" else cores)
