"""Options of a real run: what the flags of pdreal say, and scenarios do not."""

import os
from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter, validators

from pdreal.settings.host import Hosts

Device = Literal["cpu", "cuda"]
RealDtype = Literal["float32", "bfloat16"]
KvCacheDtype = Literal["auto", "fp8"]
Quantization = Literal["fp8"]
OnDevice = Annotated[Device, Parameter(help="Device of the models: cpu or cuda.")]
Dtype = Annotated[RealDtype, Parameter(help="Type of weights and KV.")]
Threads = Annotated[
    int | None,
    Parameter(
        validator=validators.Number(gte=1),
        help="Number of CPU threads per rank [the cores divided by the ranks].",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags of `pdreal run` and `pdreal serve`. A field's docstring is its help, where it has no other."""

    device: OnDevice = "cpu"
    dtype: Dtype = "float32"
    """Type of weights, of KV unless it has its own, and of all that is computed."""
    kv_cache_dtype: Annotated[KvCacheDtype, Parameter(help="Type of KV; auto means --dtype.")] = "auto"
    """fp8 is e4m3."""
    weights: str = "seed:0"
    """Weights: seed:N for random weights, or the folder of a checkpoint."""
    quantization: Quantization | None = None
    """Store the layers' matrices in fp8 with block scales."""
    threads: Threads = None
    """Threads of each rank, for torch on the CPU; None divides the cores of this process among the ranks."""
    watchdog_timeout: Annotated[float, Parameter(validator=validators.Number(gt=0))] = 300.0
    """Seconds that a forward may take. A rank whose forward takes longer hangs, and ends. 300 is SGLang's default."""
    check_kv: Annotated[bool, Parameter(negative=())] = False
    """Compare the KV of every request on sender and receiver."""
    record_experts: Annotated[bool, Parameter(parse=False)] = False
    """Keep how many tokens each expert saw in each step: a flag of `run`, which has a folder for it."""
    hosts: Annotated[Hosts | None, Parameter(parse=False)] = None
    """Machines that have the instances; None: this one."""

    def threads_of_rank(self, num_ranks: int) -> int:
        return self.threads or max(1, len(os.sched_getaffinity(0)) // num_ranks)

    def cores_of_rank(self, index: int, num_ranks: int) -> tuple[int, ...]:
        """An equal part of this process's cores on a CPU, where ranks that share cores slow each other.

        All cores on GPUs, and where there are more ranks than cores.
        """
        cores = sorted(os.sched_getaffinity(0))
        share = len(cores) // num_ranks
        return tuple(cores[index * share : (index + 1) * share] if share and self.device == "cpu" else cores)
