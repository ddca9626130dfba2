"""Times of steps and of the host's work: the settings of a scenario's `cost`."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, model_validator

from pdsim.cost.model import CostSettings
from pdsim.cost.settings import Kernels
from pdsim.metrics.records import StepRecord
from pdsim.scenario.sections.component import Component
from pdsim.scenario.sections.fields import Bandwidth, Duration, Section

Interval = tuple[Annotated[CostSettings, Component()], Annotated[CostSettings, Component()]]

End = Literal["fastest", "slowest"]

ENDS: tuple[End, ...] = get_args(End)

Group = Literal["prefill", "decode", "outside"]

GROUPS: tuple[Group, ...] = get_args(Group)
"""The groups of times that are uncertain together: prefill forwards, decode steps, and times outside the GPUs."""


_TITLES = {
    "prefill_new_tokens": "new tokens of a forward",
    "prefill_context_tokens": "context tokens of a forward",
    "decode_batch": "batch",
    "decode_context_tokens": "KV tokens of a batch",
}


def _ordered(values: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= values[0] <= values[1]:
        raise ValueError(f"a range is [least, most], found {list(values)}")
    return values


Bounds = Annotated[tuple[float, float], AfterValidator(_ordered)]


class Setup(Section):
    """A model with its data types, on a GPU, with the parallel sizes of prefill and decode."""

    model: str | None = None
    """Name of the model. None: not known."""
    weight_dtype: str | None = None
    """Data type of the weights. None: not known."""
    kv_dtype: str | None = None
    """Data type of the KV. None: not known."""
    device: str | None = None
    """Name of the GPU in the catalog, or of a CPU. None: not known."""
    tp: tuple[int, int] = (1, 1)
    """Tensor-parallel sizes of prefill and of decode."""
    dp: tuple[int, int] = (1, 1)
    """Data-parallel sizes of prefill and of decode."""
    ep: tuple[int, int] | None = None
    """Expert-parallel sizes of prefill and of decode. None: not known."""
    moe_a2a_backend: tuple[str, str] | None = None
    """Libraries that send tokens to whole experts in prefill and in decode. None: not known."""
    pp: int = 1
    """Number of pipeline stages of the servers that prefill."""
    cp: int = 1
    """Context-parallel size of prefill: number of groups of GPUs that share a prompt."""
    dcp: int = 1
    """Decode context parallelism: number of GPUs that divide each request's KV."""
    draft_tokens: int | None = None
    """Number of tokens that decode steps verify for each request. If given, measured times include drafting. None: the
    measured steps had no drafts, or it is not known.
    """

    def __str__(self) -> str:
        return ", ".join(part for part in self.parts().values() if part)

    def differences(self, run: "Setup") -> list[str]:
        """One text for each known field of this setup that has another value in the setup `run`. The text is the value
        in `run`, or "no" and the field's name if `parts` has no text for the field of `run`.
        """
        mine, theirs = self.parts(), run.parts()
        known = (name for name in mine if getattr(self, name) is not None)
        return [theirs[name] or f"no {name}" for name in known if mine[name] != theirs[name]]

    def parts(self) -> dict[str, str | None]:
        """Describes each field in a short text, by the field's name. An empty text: the field has its default value;
        for weight_dtype and kv_dtype: the value is not known. None: the value of another field is not known.
        """
        return {
            "model": self.model,
            "weight_dtype": f"{self.weight_dtype} weights" if self.weight_dtype else "",
            "kv_dtype": f"{self.kv_dtype} KV" if self.kv_dtype else "",
            "tp": _sizes_of_roles("TP", self.tp),
            "dp": "" if self.dp == (1, 1) else _sizes_of_roles("DP", self.dp),
            "ep": None if self.ep is None else "" if self.ep == (1, 1) else _sizes_of_roles("EP", self.ep),
            "moe_a2a_backend": None if self.moe_a2a_backend is None else _backends(self.moe_a2a_backend),
            "pp": "" if self.pp == 1 else f"PP{self.pp} prefill",
            "cp": "" if self.cp == 1 else f"CP{self.cp} prefill",
            "dcp": "" if self.dcp == 1 else f"DCP{self.dcp} decode",
            "draft_tokens": f"{self.draft_tokens} draft tokens" if (self.draft_tokens or 1) > 1 else "",
            "device": self.device,
        }


def _sizes_of_roles(what: str, sizes: tuple[int, int]) -> str:
    prefill, decode = sizes
    return f"{what}{prefill}" if prefill == decode else f"{what}{prefill} to {what}{decode}"


def _backends(of_roles: tuple[str, str]) -> str:
    prefill, decode = (backend.replace("none", "no") for backend in of_roles)
    either = f"{prefill} all-to-all" if prefill == decode else f"{prefill} all-to-all to {decode} all-to-all"
    return "" if of_roles == ("none", "none") else either


class MeasuredSettings(Setup):
    """Setup and step sizes [least, most] at which times were measured, as `pdsim calibrate` writes them.

    Commands print a warning if a run exceeds these sizes, because its step times are then extrapolated. A size that is
    None is not known.
    """

    role: Literal["prefill", "decode"] | None = None
    """The role that was measured, if only one was. Sizes and device are those of this role. None: both roles were
    measured.
    """
    scaled_from: str | None = None
    """Setup of the profile from which `pdsim scale` computed the times. None: the times were measured on this setup."""
    prefill_new_tokens: Bounds | None = None
    """Smallest and largest number of new tokens of one forward."""
    prefill_context_tokens: Bounds | None = None
    """Smallest and largest number of tokens that were cached or computed before, over all prompts of a forward."""
    decode_batch: Bounds | None = None
    """Smallest and largest number of requests of a decode step."""
    decode_context_tokens: Bounds | None = None
    """Smallest and largest number of KV tokens that a decode step reads."""

    def __str__(self) -> str:
        of_role = "" if self.role is None else f" of {self.role}"
        if self.model is None:
            return f"profile{of_role} does not say what it was measured on"
        if self.scaled_from is not None:
            return f"profile{of_role} scaled from {self.scaled_from} to {super().__str__()}, where nothing was measured"
        return f"profile{of_role} measured on {super().__str__()}"

    def exceeded(self, steps: Iterable[StepRecord]) -> list[str]:
        """Returns a text for each size field that the steps exceed, with the smallest size if it is below the measured
        sizes, and the largest if it is above them. Fields that are None are left out.
        """
        found = []
        for name, (least, most) in reached(steps).items():
            bounds = getattr(self, name)
            if bounds is None:
                continue
            outside = [least] * (least < bounds[0]) + [most] * (most > bounds[1])
            if outside:
                values = " and ".join(f"{value:,.0f}" for value in outside)
                found.append(f"{_TITLES[name]} {values} (measured {bounds[0]:,.0f} to {bounds[1]:,.0f})")
        return found


def reached(steps: Iterable[StepRecord]) -> dict[str, tuple[float, float]]:
    """Returns (smallest, largest) size that the steps have, by the field of MeasuredSettings that limits this size."""
    extremes: dict[str, tuple[float, float]] = {}
    for step in steps:
        for name, low, high in _sizes(step):
            least, most = extremes.get(name, (low, high))
            extremes[name] = min(least, low), max(most, high)
    return extremes


def _sizes(step: StepRecord) -> Iterator[tuple[str, float, float]]:
    """Yields the size fields of MeasuredSettings that apply to a step, each with the smallest and the largest size in
    the record.
    """
    if step.kind == "decode":
        grown = step.num_requests * (step.num_steps - 1)
        yield "decode_batch", step.num_requests, step.num_requests
        yield "decode_context_tokens", step.num_context_tokens, step.num_context_tokens + grown
    elif step.kind == "prefill":
        yield "prefill_new_tokens", step.num_tokens, step.num_tokens
        yield "prefill_context_tokens", step.num_context_tokens, step.num_context_tokens


ENCODE_SPREAD = 2
"""Assumed uncertainty of an encoder's time: the real time lies between the modelled time divided by this factor and the
modelled time multiplied by it.
"""


class HostSettings(Section):
    """CPU time of the instances' scheduler loops. Times without `decode` in their name belong to prefill; `launch`
    belongs also to decode and aggregated instances that compute prompts, and `loading` to all instances. `slowdown` is
    a factor on the host work of all instances.
    """

    start: Duration = 0
    """Time from choosing a forward to its first kernel, on an idle GPU."""
    launch: Duration = 0
    """Time from choosing a forward to the end of its launch. Until then the loop takes no message, and the forward does
    not end.
    """
    result: Duration = 0
    """Time of processing the result of a forward."""
    send: Duration = 0
    """Time in which the loop hands the KV of one request to the transfer workers. Workers run only when the loop
    releases Python's GIL. A request's transfer therefore starts after the loop has also handed over the next request
    (with staging: the next two), or earlier if no further request is ready.
    """
    decode_step: Duration = 0
    """Time between two steps of a decode loop, while its GPU is idle."""
    decode_request: Duration = 0
    """Additional time between two decode steps, for each request of the batch."""
    decode_prefill: Duration = 0
    """Additional time around a prefill forward on an instance that also decodes, such as an aggregated instance. The
    GPU is idle in this time.
    """
    loading: Duration = 0
    """Time of loading weights and capturing CUDA graphs, from the restart of a killed instance until it serves."""
    slowdown: float = Field(default=1, gt=0)
    """Factor on the time of all host work: scheduler loops, launches of forwards, and starting batches and descriptors
    of transfers.
    """

    @property
    def is_none(self) -> bool:
        """True if the loop of a prefill instance takes no CPU time: start, launch, result and send are 0."""
        return not (self.start or self.launch or self.result or self.send)

    def slowed(self) -> "HostSettings":
        """Returns these settings, with start, launch, result and send multiplied by `slowdown`, and `slowdown` 1."""
        times = {name: round(self.slowdown * getattr(self, name)) for name in ("start", "launch", "result", "send")}
        return self.model_copy(update={**times, "slowdown": 1})


class ColdKernels(Section):
    """Time to compile a kernel that allocates pages. SGLang has such a kernel (0.5.12: two) for each number of
    requests, rounded up to a power of two. A step that first needs a kernel waits until it is compiled.
    """

    prefill: Duration = 0
    """Time for one kernel of prefill forwards. The number of a forward's prompts counts as the number of requests."""
    decode: Duration = 0
    """Time to compile one kernel for decode steps."""


class CostChoice(Section):
    """Times of steps. `cost: X` sets the cost model of both roles; `cost: {profile: FILE}` reads fitted settings."""

    prefill: Annotated[CostSettings, Component("kernels")] = Kernels()
    """Cost model of prefill forwards."""
    decode: Annotated[CostSettings, Component("kernels")] = Kernels()
    """Cost model of decode steps."""
    prefill_interval: Interval | None = None
    """Fastest and slowest cost models of prefill forwards, as `pdsim scale` writes them. None: with cost kernels, the
    range of measured kernels; otherwise no range.
    """
    decode_interval: Interval | None = None
    """Fastest and slowest cost models of decode steps. None: with cost kernels, the range of measured kernels;
    otherwise no range.
    """
    host: HostSettings = HostSettings()
    """CPU time of the instances' scheduler loops."""
    graph_sizes: tuple[int, ...] | Literal["sglang"] | None = None
    """Batch sizes with CUDA graphs (--cuda-graph-bs-decode). Larger batches run without graphs.

    sglang: SGLang's sizes. None: the engine's sizes, if the cost model is `kernels` and the model has experts;
    otherwise every batch runs at exactly its size. Fitted profiles have their own sizes.
    """
    graph_empty_row_kv: float = Field(default=0, ge=0)
    """A CUDA graph computes a fixed number of requests, its rows. Rows beyond the batch are empty. This is the time of
    an empty row, as a share of the time in which the row of a request reads its KV. Empty rows take time because
    attention kernels divide the context as if every row had a request."""
    graph_empty_rows_free: bool = False
    """True: apart from graph_empty_row_kv, empty rows of a CUDA graph (rows without a request) take no time. This holds
    for two kinds of servers: those with whole experts that skip empty rows, and real mode with experts, where all empty
    rows choose the same experts.
    """
    eager_layer: Duration = 310_000
    """Minimum time of a layer in a decode step without a CUDA graph. The default was measured for Qwen3-8B on an H200;
    the cost model roofline has the same default in prefill_layer.
    """
    attention_sm_bandwidth: Bandwidth | None = Field(default=None, gt=0)
    """Maximum KV bandwidth of one SM. If set, decode attention runs in waves of one thread block per SM, and reads a
    shared prefix once per wave. None: with cost kernels an H200's value, unless the model has latent KV; otherwise no
    waves.
    """
    attention_merge: Duration = 0
    """Additional time of each layer in a decode step, if attention divides contexts among several SMs and must then
    merge the parts.
    """
    encode_factor: float = Field(default=1, gt=0)
    """Factor on the times of image encoders. These times are computed as rooflines; nobody measured them, so real times
    may be half or twice as long.
    """
    cold_start: dict[Annotated[int, Field(ge=1)], Duration] = Field(default={})
    """Additional time of an instance's n-th decode step with several requests, by n. Means of four cold servers with
    SGLang 0.5.12 on H200: `{1: 232 ms, 2: 52 ms, 8: 48 ms, 130: 51 ms}` (experiments/sglang-h200).
    """
    cold_kernels: ColdKernels | None = None
    """Time to compile kernels that allocate pages, on servers whose Triton cache is empty. Each instance compiles for
    itself, and again after a restart. SGLang 0.5.12 on H200s of two machines: `{prefill: 249 ms, decode: 87 ms}` and
    `{prefill: 200 ms, decode: 66 ms}` (experiments/sglang-stamps-h200). None: the cache has the kernels.
    """
    measured: MeasuredSettings | None = None
    """Setup in which the times were measured, and the smallest and largest steps that were measured (tokens, requests).
    None: no warnings about steps outside these sizes.
    """

    @model_validator(mode="after")
    def _is_whole(self) -> "CostChoice":
        sizes = self.graph_sizes
        if isinstance(sizes, tuple) and (not sizes or min(sizes) < 1):
            raise ValueError(f"graph_sizes are batch sizes, at least one and each at least 1, found {list(sizes)}")
        return self

    def at(self, corner: Mapping[Group, End]) -> "CostChoice":
        """These costs, in which each of the given groups has the fastest or slowest times of its range. Groups without
        a range do not change, except that prefill always multiplies or divides encode_factor by ENCODE_SPREAD. The
        group outside has no effect. corner: "fastest" or "slowest" for each of these groups.
        """
        update: dict[str, Any] = {}
        if (end := corner.get("prefill")) is not None:
            update["encode_factor"] = self.encode_factor * (ENCODE_SPREAD if end == "slowest" else 1 / ENCODE_SPREAD)
        for role, end in corner.items():
            if role != "outside" and (ends := self._ends(role)):
                update |= {role: ends[ENDS.index(end)], f"{role}_interval": None}
        return self.model_copy(update=update)

    @property
    def is_cold(self) -> bool:
        """True if the first steps of an instance take longer than later ones of the same size."""
        return bool(self.cold_start) or self.cold_kernels is not None

    @property
    def uncertain(self) -> tuple[Group, ...]:
        """The roles whose step times have a range (from the fastest to the slowest server that measured kernels allow),
        because no server was measured.
        """
        return tuple(role for role in GROUPS if role != "outside" and self._ends(role))

    def _ends(self, role: str) -> Interval | None:
        settings = getattr(self, role)
        found: Interval | None = getattr(self, f"{role}_interval")
        return settings.ends if found is None and isinstance(settings, Kernels) else found

    @property
    def is_of_kernels(self) -> bool:
        """True if the cost of some role comes from measurements of single kernels, not of a server."""
        return isinstance(self.prefill, Kernels) or isinstance(self.decode, Kernels)
