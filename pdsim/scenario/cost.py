"""Times of steps and of the host's work: the settings of a scenario's `cost`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from pdsim.cost.model import CostSettings
from pdsim.cost.settings import Kernels
from pdsim.scenario.component import Component
from pdsim.scenario.fields import Bandwidth, Duration, Section
from pdsim.scenario.profile import MeasuredSettings

Interval = tuple[Annotated[CostSettings, Component()], Annotated[CostSettings, Component()]]

End = Literal["fastest", "slowest"]

ENDS: tuple[End, ...] = get_args(End)

Group = Literal["prefill", "decode", "outside"]

GROUPS: tuple[Group, ...] = get_args(Group)
"""Times that are off together: forwards, decode steps, and those outside the GPUs."""


class HostSettings(Section):
    """CPU time of the instances' loops: of prefill, but for the two fields of decode."""

    start: Duration = 0
    """Time from choosing a forward to its first kernel, on a GPU that waits for it."""
    launch: Duration = 0
    """Time of launching a forward, during which the loop sees no result."""
    result: Duration = 0
    """Time of taking in a result."""
    send: Duration = 0
    """Time of handing one request's KV to the transfer workers, one after another. They begin as the loop has handed on
    the next one, or the last; what is staged one later."""
    decode_step: Duration = 0
    """Time between two steps of a decode loop, while its GPU rests."""
    decode_request: Duration = 0
    """Time added for each request of the batch."""
    slowdown: float = Field(default=1, gt=0)
    """Factor of all host work: of the loops, launches of forwards, batches and descriptors of transfers."""

    @property
    def is_none(self) -> bool:
        """True if a prefill loop takes no time."""
        return not (self.start or self.launch or self.result or self.send)

    def slowed(self) -> "HostSettings":
        """Times of a prefill loop with the slowdown applied to them."""
        times = {name: round(self.slowdown * getattr(self, name)) for name in ("start", "launch", "result", "send")}
        return self.model_copy(update={**times, "slowdown": 1})


class CostChoice(Section):
    """Times of steps. `cost: X` sets both roles; `cost: {profile: FILE}` reads fitted settings."""

    prefill: Annotated[CostSettings, Component("kernels")] = Kernels()
    """Cost model of forwards."""
    decode: Annotated[CostSettings, Component("kernels")] = Kernels()
    """Cost model of decode steps."""
    prefill_interval: Interval | None = None
    """Fastest and slowest cost models of forwards, as `pdsim scale` writes them; None: times are certain."""
    decode_interval: Interval | None = None
    """The same of decode steps."""
    host: HostSettings = HostSettings()
    """Work of the instances' loops on their CPU."""
    graph_sizes: tuple[int, ...] | Literal["sglang"] | None = None
    """Batches that CUDA graphs were captured for (--cuda-graph-bs); larger ones run without graphs.

    sglang: SGLang's sizes. None: a decode step is as large as its batch. Fitted profiles have their own.
    """
    graph_empty_row_kv: float = Field(default=0, ge=0)
    """Time of each empty row of a graph, as a share of what a row takes to read its KV: parts of the context are dealt
    out as if all rows had one."""
    eager_layer: Duration = 310_000
    """The least that a layer takes without a graph: Qwen3-8B on H200, as prefill_layer_ns of the roofline."""
    attention_sm_bandwidth: Bandwidth | None = Field(default=None, gt=0)
    """KV that one SM takes in at most. Decode attention then runs in waves of one thread block for each SM, and reads a
    shared prefix once in each wave; None: that of an H200's with kernels, else without waves."""
    attention_merge: Duration = 0
    """Time of a layer in which contexts are split among SMs."""
    cold_start: dict[Annotated[int, Field(ge=1)], Duration] = Field(default={})
    """Stall of an instance's n-th decode step of several requests, by n. SGLang 0.5.12 on H200, four of seven servers:
    `{1: 232 ms, 2: 52 ms, 8: 48 ms, 130: 51 ms}` (experiments/sglang-h200)."""
    measured: MeasuredSettings | None = None
    """Setup and sizes that the times were measured on; None: every size counts as known."""

    @model_validator(mode="after")
    def _is_whole(self) -> "CostChoice":
        sizes = self.graph_sizes
        if isinstance(sizes, tuple) and (not sizes or min(sizes) < 1):
            raise ValueError(f"graph_sizes are batch sizes, at least one and each at least 1, found {list(sizes)}")
        return self

    def at(self, corner: Mapping[Group, End]) -> "CostChoice":
        """This cost with roles at an end of their interval, where they have one."""
        update: dict[str, Any] = {}
        for role, end in corner.items():
            if role != "outside" and (ends := self._ends(role)):
                update |= {role: ends[ENDS.index(end)], f"{role}_interval": None}
        return self.model_copy(update=update)

    @property
    def uncertain(self) -> tuple[Group, ...]:
        """Roles whose times have an interval."""
        return tuple(role for role in GROUPS if role != "outside" and self._ends(role))

    def _ends(self, role: str) -> Interval | None:
        settings = getattr(self, role)
        found: Interval | None = getattr(self, f"{role}_interval")
        return settings.ends if found is None and isinstance(settings, Kernels) else found

    @property
    def is_of_kernels(self) -> bool:
        """True if no server was measured."""
        return isinstance(self.prefill, Kernels) or isinstance(self.decode, Kernels)
