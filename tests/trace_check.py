"""Checks that Perfetto will draw a Chrome trace as meant. Perfetto's own check is not used, because it needs a
download.
"""

from collections import defaultdict

KEYS = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "C": {"name", "pid", "tid", "ts", "args"},
    "b": {"name", "cat", "id", "pid", "tid", "ts"},
    "e": {"name", "cat", "id", "pid", "tid", "ts"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}
"""Fields that an event must have, by its phase (the field `ph`)."""
_ROUNDING_US = 1e-6
"""Tolerance in us. Times are whole ns written in us, so the sum of two may differ in the last bit."""


def problems(events):
    """A sentence for each problem of the events. Empty: there is none."""
    found = [*_unknown(events), *_out_of_order(events), *_unnamed(events)]
    if found:
        return found
    slices = _by(events, "X", "pid", "tid")
    return [*_not_nested(slices), *_unmatched(events), *_loose_arrows(events, slices)]


def _unknown(events):
    for event in events:
        if event.get("ph") not in KEYS:
            yield f"unknown phase: {event}"
        elif missing := KEYS[event["ph"]] - event.keys():
            yield f"{sorted(missing)} missing: {event}"
        elif event.get("ts", 0) < 0 or event.get("dur", 0) < 0:
            yield f"negative time: {event}"
        elif event["ph"] == "C" and any(value < 0 for value in event["args"].values()):
            yield f"negative counter: {event}"


def _out_of_order(events):
    last = 0
    for event in events:
        if event["ph"] == "M":
            continue
        if event["ts"] < last:
            yield f"before what precedes it: {event}"
        last = event["ts"]


def _unnamed(events):
    named = [(e["pid"], e["tid"] if e["name"] == "thread_name" else None) for e in events if e["ph"] == "M"]
    if len(named) != len(set(named)):
        yield "a process or track has two names"
    used = {event["pid"] for event in events if event["ph"] != "M"}
    if used != {pid for pid, tid in named if tid is None}:
        yield f"processes used, {sorted(used)}, are not those that are named"
    for pid, tid in {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} - set(named):
        yield f"track {tid} of process {pid} has slices and no name"


def _not_nested(slices):
    for (pid, tid), track in slices.items():
        open_until = []
        for event in track:
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + _ROUNDING_US:
                open_until.pop()
            if open_until and end > open_until[-1] + _ROUNDING_US:
                yield f"on track {tid} of process {pid} ends after the slice around it: {event}"
            open_until.append(end)


def _unmatched(events):
    for key, track in _by(events, "be", "cat", "id").items():
        begun = []
        for event in track:
            if event["ph"] == "b":
                begun.append(event["name"])
            elif not begun or begun.pop() != event["name"]:
                yield f"{key} ends what did not begin last: {event}"
        if begun:
            yield f"{key} never ends: {begun}"


def _loose_arrows(events, slices):
    for key, ends in _by(events, "sf", "cat", "id").items():
        if [end["ph"] for end in ends] != ["s", "f"]:
            yield f"arrow {key} has {[end['ph'] for end in ends]}"
        for end in ends:
            around = slices.get((end["pid"], end["tid"]), ())
            if not any(one["ts"] <= end["ts"] <= one["ts"] + one["dur"] + _ROUNDING_US for one in around):
                yield f"no slice around the end of an arrow: {end}"


def _by(events, phases, *keys):
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] in phases:
            tracks[tuple(event[key] for key in keys)].append(event)
    return tracks
