"""What every rank of an instance does as its leader says, on threads of its own. Plain values that can be pickled."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pdsim.core.messages import Scatter
from pdsim.core.transfer_plan import TransferUnit


class Compute(NamedTuple):
    """Work of the model, behind the work before it."""

    work: Any
    step_id: int | None = None
    """Of a step, which units of its layers wait for."""


class SendUnit(NamedTuple):
    """Transfer worker number `worker` moves a unit, when this rank has computed the layers that it waits for."""

    worker: int
    unit: TransferUnit
    staging_offset_bytes: int | None


class ScatterCell(NamedTuple):
    """From the staging ring into pages, behind the cells before it."""

    command: Scatter
    pages: Sequence[int]


class DigestSent(NamedTuple):
    """Fingerprints of a request's KV, behind what the worker sent before."""

    worker: int
    pages: Sequence[int]
    num_tokens: int


class DigestArrived(NamedTuple):
    pages: Sequence[int]
    num_tokens: int


Task = Compute | SendUnit | ScatterCell | DigestSent | DigestArrived
