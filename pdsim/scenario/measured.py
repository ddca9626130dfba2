"""The range in which a profile was measured, and what a run did outside it."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator

from pdsim.cost.step_times import Measured, Range
from pdsim.metrics.records import StepRecord
from pdsim.scenario.section import Section


def _ordered(values: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= values[0] <= values[1]:
        raise ValueError(f"a range is [least, most], found {list(values)}")
    return values


Bounds = Annotated[tuple[float, float], AfterValidator(_ordered)]


class MeasuredSettings(Section):
    """Least and most that was measured of a step; profiles have it. None: not measured, or not told."""

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
        if self.outside == "extend":
            return None
        given = (self.prefill_new_tokens, self.prefill_context_tokens, self.decode_batch)
        return Measured(*(Range() if bounds is None else Range(*bounds) for bounds in given))

    def exceeded(self, steps: Iterable[StepRecord]) -> list[str]:
        """One message for each field, with the value that is farthest outside."""
        extremes: dict[str, tuple[float, float]] = {}
        for step in steps:
            for name, low, high in _sizes(step):
                least, most = extremes.get(name, (low, high))
                extremes[name] = min(least, low), max(most, high)
        return [
            message
            for name, (least, most) in extremes.items()
            if (bounds := getattr(self, name)) is not None
            for value in ((most,) if most > bounds[1] else (least,) if least < bounds[0] else ())
            for message in [self._message(name, value, bounds)]
        ]

    def _message(self, name: str, value: float, bounds: tuple[float, float]) -> str:
        goes_on = self.outside == "extend" or name == "decode_context_tokens"
        what = "the fitted line goes on" if goes_on else "times are those of the nearest measured step"
        return f"{name} {value:,.0f} is outside what was measured, {bounds[0]:,.0f} to {bounds[1]:,.0f}: {what}"


def _sizes(step: StepRecord) -> Iterator[tuple[str, float, float]]:
    """Fields of the settings, each with the least and the most of it in a record."""
    if step.kind == "decode":
        grown = step.num_requests * (step.num_steps - 1)
        yield "decode_batch", step.num_requests, step.num_requests
        yield "decode_context_tokens", step.num_context_tokens, step.num_context_tokens + grown
    else:
        yield "prefill_new_tokens", step.num_tokens, step.num_tokens
        yield "prefill_context_tokens", step.num_context_tokens, step.num_context_tokens
