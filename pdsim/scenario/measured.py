"""What a profile was measured on, and how far it reaches."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator

from pdsim.cost.step_times import Measured, SizeRange
from pdsim.metrics.records import StepRecord
from pdsim.scenario.fields import Section

_TITLES = {
    "prefill_new_tokens": "new tokens of a forward",
    "prefill_context_tokens": "context tokens of a forward",
    "decode_batch": "batch",
    "decode_context_tokens": "KV tokens of a batch",
}
_GOES_ON = "decode_context_tokens"
"""A decode step is a line in them, which is not clamped."""


def _ordered(values: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= values[0] <= values[1]:
        raise ValueError(f"a range is [least, most], found {list(values)}")
    return values


Bounds = Annotated[tuple[float, float], AfterValidator(_ordered)]


class Setup(Section):
    """A model, and what it runs on."""

    model: str | None = None
    """None: not told, here and below."""
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    device: str | None = None
    """GPU of the catalog; other devices by their own name."""
    tp: tuple[int, int] = (1, 1)
    """Of prefill and of decode."""
    dp: tuple[int, int] = (1, 1)

    def __str__(self) -> str:
        return ", ".join(part for part in self.parts().values() if part)

    def differences(self, run: "Setup") -> list[str]:
        """Parts of a run's setup that are not this one's."""
        mine, theirs = self.parts(), run.parts()
        told = (name for name in mine if getattr(self, name) is not None)
        return [theirs[name] or f"no {name}" for name in told if mine[name] != theirs[name]]

    def parts(self) -> dict[str, str | None]:
        """What is said of each field; nothing where there is nothing to say."""
        return {
            "model": self.model,
            "weight_dtype": f"{self.weight_dtype} weights" if self.weight_dtype else "",
            "kv_dtype": f"{self.kv_dtype} KV" if self.kv_dtype else "",
            "tp": _sizes_of_roles("TP", self.tp),
            "dp": "" if self.dp == (1, 1) else _sizes_of_roles("DP", self.dp),
            "device": self.device,
        }


def _sizes_of_roles(what: str, sizes: tuple[int, int]) -> str:
    prefill, decode = sizes
    return f"{what}{prefill}" if prefill == decode else f"{what}{prefill} to {what}{decode}"


class MeasuredSettings(Setup):
    """Setup, and least and most of a step, that times were measured on; profiles have it. None: not told."""

    scaled_from: str | None = None
    """Where nothing was measured on this setup: what its times are scaled from."""
    prefill_new_tokens: Bounds | None = None
    """Of one forward."""
    prefill_context_tokens: Bounds | None = None
    """Of all its prompts together."""
    decode_batch: Bounds | None = None
    decode_context_tokens: Bounds | None = None
    """KV tokens of all requests of one step."""
    outside: Literal["clamp", "extend"] = "clamp"
    """A step outside takes as long as the nearest that was measured, or its cost model is asked anyway."""

    def bounds(self) -> Measured | None:
        """Sizes that times are clamped to; None if they are not."""
        given = (self.prefill_new_tokens, self.prefill_context_tokens, self.decode_batch)
        if self.outside == "extend" or not any(given):
            return None
        return Measured(*(SizeRange() if bounds is None else SizeRange(*bounds) for bounds in given))

    def __str__(self) -> str:
        if self.model is None:
            return "profile does not say what it was measured on"
        if self.scaled_from is not None:
            return f"profile scaled from {self.scaled_from} to {super().__str__()}, where nothing was measured"
        return f"profile measured on {super().__str__()}"

    def exceeded(self, steps: Iterable[StepRecord]) -> list[str]:
        """Each field that steps leave, with the value that is farthest outside."""
        found = []
        for name, (least, most) in reached(steps).items():
            bounds = getattr(self, name)
            if bounds is not None and (most > bounds[1] or least < bounds[0]):
                value = most if most > bounds[1] else least
                found.append(self._exceeded(name, value, SizeRange(*bounds)))
        return found

    def _exceeded(self, name: str, value: float, bounds: SizeRange) -> str:
        goes_on = self.outside == "extend" or name == _GOES_ON
        taken = "" if goes_on else f", taken as {bounds.nearest(value):,.0f}"
        return f"{_TITLES[name]} {value:,.0f} (measured {bounds.least:,.0f} to {bounds.most:,.0f}{taken})"


def reached(steps: Iterable[StepRecord]) -> dict[str, tuple[float, float]]:
    """Least and most of the sizes of steps, by the field that bounds them."""
    extremes: dict[str, tuple[float, float]] = {}
    for step in steps:
        for name, low, high in _sizes(step):
            least, most = extremes.get(name, (low, high))
            extremes[name] = min(least, low), max(most, high)
    return extremes


def _sizes(step: StepRecord) -> Iterator[tuple[str, float, float]]:
    """Fields of the settings, each with the least and the most of it in a record."""
    if step.kind == "decode":
        grown = step.num_requests * (step.num_steps - 1)
        yield "decode_batch", step.num_requests, step.num_requests
        yield "decode_context_tokens", step.num_context_tokens, step.num_context_tokens + grown
    else:
        yield "prefill_new_tokens", step.num_tokens, step.num_tokens
        yield "prefill_context_tokens", step.num_context_tokens, step.num_context_tokens
