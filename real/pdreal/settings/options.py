"""Options of a real run: flags of pdreal for which a scenario has no field."""

import os
from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter, validators

from pdreal.settings.host import Hosts

Device = Literal["cpu", "cuda"]
RealDtype = Literal["float32", "bfloat16"]
KvCacheDtype = Literal["auto", "fp8"]
Quantization = Literal["fp8"]
RealA2a = Literal["none", "deepep"]
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
    """Flags of `pdreal run` and `pdreal serve`. The docstring of a field is the help text of its flag, unless the flag
    has its own.
    """

    device: OnDevice = "cpu"
    dtype: Dtype = "float32"
    """Data type of weights, activations, and KV unless kv_cache_dtype sets it."""
    kv_cache_dtype: Annotated[KvCacheDtype, Parameter(help="Type of KV; auto means --dtype.")] = "auto"
    """Data type of the KV. fp8 is e4m3."""
    weights: str = "seed:0"
    """Weights: seed:N for random weights, or the folder of a checkpoint."""
    quantization: Quantization | None = None
    """Store the layers' matrices in fp8 with block scales; on a CPU, only round their values to fp8. None: matrices
    have the type of --dtype, but on a GPU those that a checkpoint has in fp8 stay in fp8, except projections to
    queries, keys and values of models with linear attention."""
    threads: Threads = None
    """Number of threads of each rank, for torch on the CPU. None: the cores of this process, divided among the
    ranks."""
    watchdog_timeout: Annotated[float, Parameter(validator=validators.Number(gt=0))] = 300.0
    """Maximum time of a forward in s. A rank whose forward takes longer counts as hung, and ends. 300 is SGLang's
    default."""
    check_kv: Annotated[bool, Parameter(negative=())] = False
    """Compare the KV of every request on sender and receiver."""
    record_experts: Annotated[bool, Parameter(parse=False)] = False
    """Record the number of tokens of each expert in each step. A flag of `run`, which has a folder for the record."""
    hosts: Annotated[Hosts | None, Parameter(parse=False)] = None
    """Hosts of the instances. None: all instances run on the launcher's host."""

    def threads_of_rank(self, num_ranks: int) -> int:
        return self.threads or max(1, len(os.sched_getaffinity(0)) // num_ranks)

    def cores_of_rank(self, index: int, num_ranks: int) -> tuple[int, ...]:
        """CPU cores of a rank: an equal part of this process's cores, because ranks that share cores slow each other.
        index: of the rank among num_ranks ranks of this host. On GPUs, and with more ranks than cores: all cores.
        """
        cores = sorted(os.sched_getaffinity(0))
        share = len(cores) // num_ranks
        return tuple(cores[index * share : (index + 1) * share] if share and self.device == "cpu" else cores)
