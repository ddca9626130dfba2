"""Rows of a server's client, split into forwards and what lies around them: HTTP, tokenizer, host.

A prompt's TTFT is forward + around. Streams that decode on the same GPUs wait for the forward at most, so rows of
`stall` tell the two apart; prompts that come together tell which part of `around` one request spends after another.
"""

from dataclasses import dataclass, replace

import numpy as np

from pdsim.calibration.fit.regression import ABOVE_LEAST, Fitted
from pdsim.calibration.fit.rows import OBSERVED, Floats, Measurements, Rows

_SHARES_GPUS = 0.3
"""Streams that wait for less than this share of a prompt's TTFT are on other GPUs than prefill."""
_MOST_AROUND = 0.9
"""Share of the shortest TTFT that may lie around its forward."""
CANNOT_TELL = (
    "a client cannot tell, and the profile leaves out: KV transfers, a scheduler's own time (forwards have it), "
    "a batch of prefill and decode mixed, the size of the KV pool"
)
MESSAGES_NS = 2 * 50_000.0
"""Messages of a simulated request on its way: network.message_latency, by default."""


@dataclass(frozen=True)
class Around:
    """Time of a request around its forward."""

    time_ns: float
    bursts: tuple[Rows, ...] = ()
    notes: tuple[str, ...] = ()

    def front_end_ns(self, prefill: Fitted) -> dict[str, float]:
        """Settings of front_end: the serial part, and the rest."""
        service_ns = min(self._serial_ns(prefill), self.time_ns)
        return {"service": service_ns, "latency_in": max(0.0, self.time_ns - service_ns - MESSAGES_NS)}

    def _serial_ns(self, prefill: Fitted) -> float:
        """Time of a burst beyond that of two forwards, of its first prompt and of all others, per other prompt."""
        found: list[float] = []
        for rows in self.bursts:
            prompts, new, times_ns = (rows.columns[name] for name in ("prompts", "new_tokens", "time_ns"))
            forwards_ns = _forward_ns(prefill, new / prompts, 1) + _forward_ns(
                prefill, new - new / prompts, prompts - 1
            )
            found += ((times_ns - self.time_ns - forwards_ns) / (prompts - 1)).tolist()
        return max(0.0, float(np.median(found))) if found else 0.0


def without_around(measurements: Measurements) -> tuple[Measurements, Around | None]:
    """The measurements with rows of prefill instead of ttft; unchanged, and None, where there are no such rows."""
    rows = {rows.kind: rows for rows in measurements.rows if rows.kind in OBSERVED}
    if "ttft" not in rows:
        return measurements, None
    ttft = rows["ttft"]
    around_ns, notes = _around_ns(rows)
    if not ttft.columns["context_tokens"].any():
        notes += ("no prompt had a cached prefix: the server caches none, or its times do not show it",)
    around_ns = min(around_ns, _MOST_AROUND * float(ttft.columns["time_ns"].min()))
    one, none = np.ones(len(ttft)), np.zeros(len(ttft))
    columns = {**ttft.columns, "time_ns": ttft.columns["time_ns"] - around_ns, "prompts": one, "graph": none}
    forwards = replace(ttft, kind="prefill", columns=columns)
    kept = tuple(one for one in measurements.rows if one.kind not in OBSERVED)
    bursts = tuple(one for one in measurements.rows if one.kind == "burst")
    return replace(measurements, rows=(*kept, forwards)), Around(around_ns, bursts, (*notes, CANNOT_TELL))


def _around_ns(rows: dict[str, Rows]) -> tuple[float, tuple[str, ...]]:
    """Part of a prompt's TTFT beyond the wait of streams; a round trip where there are none on the same GPUs."""
    if "stall" in rows:
        stall = rows["stall"].columns
        alone_ns = _alone_ns(rows["ttft"].columns, stall["new_tokens"])
        if np.median(stall["time_ns"] / alone_ns) > _SHARES_GPUS:
            long = alone_ns > ABOVE_LEAST[0] * alone_ns.min()
            counted = long if long.any() else np.ones_like(long)
            return max(0.0, _least_beyond(stall["new_tokens"][counted], (alone_ns - stall["time_ns"])[counted])), ()
        notes = (
            "streams do not wait for prompts: prefill is elsewhere, and its times have the transfer of KV in them",
        )
    else:
        notes = ("no rows of stall: what lies around a forward is taken for one round trip",)
    round_trips_ns = rows["round_trip"].columns["time_ns"] if "round_trip" in rows else np.zeros(1)
    return float(np.median(round_trips_ns)), notes


def _least_beyond(new_tokens: Floats, beyond_ns: Floats) -> float:
    """The least of the medians by length."""
    lengths = np.round(np.log2(new_tokens))
    return float(min(np.median(beyond_ns[lengths == length]) for length in np.unique(lengths)))


def _alone_ns(ttft: dict[str, Floats], new_tokens: Floats) -> Floats:
    """TTFT of single prompts without a cached prefix, between the nearest lengths."""
    fresh = ttft["context_tokens"] == 0
    tokens, times_ns = ttft["new_tokens"][fresh], ttft["time_ns"][fresh]
    lengths = np.round(np.log2(tokens) * 2)
    shapes = np.unique(lengths)
    middle_tokens, middle_ns = (
        np.array([np.median(values[lengths == shape]) for shape in shapes]) for values in (tokens, times_ns)
    )
    return np.asarray(np.interp(new_tokens, middle_tokens, middle_ns))


def _forward_ns(prefill: Fitted, new_tokens: Floats, prompts: Floats | int) -> Floats:
    none = np.zeros_like(new_tokens)
    sizes = {
        "new_tokens": new_tokens,
        "context_tokens": none,
        "prompts": prompts + none,
        "graph": none,
        "time_ns": none,
    }
    return prefill.times_ns(sizes)
