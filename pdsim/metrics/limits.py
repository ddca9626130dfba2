"""What limits a run as a whole: the resource of which more would help most, and the numbers that say so.

Some resources work (a GPU, a link, the posting of descriptors): one that works all the time is the limit, whatever
queues up before it. Others are held (pages, slots), and one that is mostly missing is the limit, unless those who hold
it mostly wait for one that works, and it works almost all the time. If nothing is missing, the clients are the limit:
a closed loop could send more, and an open one has been served.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import log

from pdsim.metrics.explain import StageTimes, stage_times
from pdsim.metrics.records import RunRecords, StepRecord
from pdsim.metrics.usage import InstanceUsage, PathUsage, Window, instance_usage, loaded_window, parts_of, path_usage

_FULL = 0.9
"""Of the time: what works so much is the limit."""
_MISSING = 0.5
"""Of the time: what is missing so much is the limit."""
_TIE = 0.05
_LITTLE_GAIN = 0.25
"""In tokens per second, of twice the batch."""
_LARGE, _SMALL = 0.9, 0.3
"""Batches that are compared, by the largest of the run."""

RELIEF = {
    "prefill compute": "prefill.instances, prefill.tp, a faster prefill.gpu",
    "prefill slots": "prefill.max_running_requests",
    "prefill KV": "prefill.mem_fraction, prefill.tp, prefill.instances",
    "decode KV": "decode.mem_fraction, decode.tp, decode.instances; decode.radix_cache if prefixes are shared",
    "decode batch cap": "decode.max_running_requests",
    "decode steps": "decode.instances, decode.tp, a faster decode.gpu; decode.radix_cache if prefixes are shared",
    "link": "network.bandwidth",
    "descriptor cost": "page_size; network.staging where tensor-parallel sizes differ",
    "transfer set-up": "network.transport",
    "staging ring": "network.staging.ring",
    "client concurrency": "client.concurrency",
    "load": "",
}
"""Resources, and the fields of a scenario that give more of each."""

AGGREGATED_RELIEF = {
    "prefill compute": "aggregated.instances, aggregated.tp, a faster aggregated.gpu",
    "prefill slots": "aggregated.max_running_requests",
    "prefill KV": "aggregated.mem_fraction, aggregated.tp, aggregated.instances",
    "decode KV": "aggregated.mem_fraction, aggregated.tp, aggregated.instances",
    "decode batch cap": "aggregated.max_running_requests",
    "decode steps": "aggregated.instances, aggregated.tp, a faster aggregated.gpu",
    "client concurrency": RELIEF["client concurrency"],
    "load": RELIEF["load"],
}
"""Where the same instances decode: what can limit them, and the fields that they have."""


@dataclass(frozen=True)
class Limit:
    resource: str
    """One of RELIEF; "load" if nothing is missing and more would not be sent."""
    where: str
    evidence: str
    """One sentence."""
    is_aggregated: bool = False

    @property
    def relief(self) -> str:
        return (AGGREGATED_RELIEF if self.is_aggregated else RELIEF)[self.resource]


@dataclass(frozen=True)
class _Candidate:
    share: float
    """Of the time: works, or is missing."""
    limit: Limit
    stages: tuple[str, ...]
    """Of requests that wait for it or use it, if it works; that hold it, if it is held."""


_ON_PREFILL = ("prefill_forward", "prefill_transfer_kv_cache")
_ON_DECODE = ("prefill_waiting", *_ON_PREFILL, "decode_transferred", "decode_forward")
_EVERYWHERE = ("front_end", "decode_bootstrap", *_ON_DECODE, "response")


def limiting_resource(records: RunRecords, max_concurrency: int | None = None) -> Limit:
    """Needs recorded levels. max_concurrency: of a closed loop."""
    return _limit_in(loaded_window(records), records, max_concurrency)


def limits_over_time(
    records: RunRecords, max_concurrency: int | None = None, *, num_windows: int = 24
) -> list[tuple[Window, Limit]]:
    """What limits the run in each of so many equal parts of its time. Needs recorded levels."""
    return [(window, _limit_in(window, part, max_concurrency)) for window, part in parts_of(records, num_windows)]


def _limit_in(window: Window, records: RunRecords, max_concurrency: int | None) -> Limit:
    limit = _limit(records, max_concurrency, window)
    return replace(limit, is_aggregated=any(request.is_aggregated for request in records.requests))


def _limit(records: RunRecords, max_concurrency: int | None, window: Window) -> Limit:
    instances, paths = instance_usage(records, window), path_usage(records, window)
    if not instances:
        return Limit("load", "", "nothing ran")
    stages = stage_times(records.requests)
    working = [*_compute(instances), *_transfers(paths, stages)]
    busiest = max(working, key=lambda one: one.share, default=None)
    if busiest is not None and busiest.share >= _FULL:
        return busiest.limit
    missing = [one for one in _missing(instances, stages) if one.share >= _MISSING]
    most = max((one.share for one in missing), default=0.0)
    held = next((one for one in missing if one.share >= most - _TIE), None)
    if held is None and max_concurrency is not None:
        held = _client(records, instances, max_concurrency, window)
    if held is None:
        return _load(instances, stages, working)
    if busiest is not None and _helps_more(busiest, held, stages):
        return busiest.limit
    return _decode_steps(records, instances, held.limit) or held.limit


def _helps_more(working: _Candidate, held: _Candidate, stages: Sequence[StageTimes]) -> bool:
    """Work at twice the speed halves the time that holders spend on it; twice as many holders fill its idle time."""
    time = {stage.stage: stage.mean_ms for stage in stages}
    at_work = sum(time.get(stage, 0.0) for stage in working.stages if stage in held.stages)
    share = at_work / max(1e-9, sum(time.get(stage, 0.0) for stage in held.stages))
    return 1 / (1 - share / 2) > min(2.0, 1 / max(working.share, 1e-9))


# What works.


def _compute(instances: Iterable[InstanceUsage]) -> Iterable[_Candidate]:
    for use in instances:
        evidence = f"{use.instance_id} computes {_percent(use.computing)} of the time"
        if use.mean_waiting >= 1:
            evidence += f" while {use.mean_waiting:,.1f} prompts wait for their turn"
        limit = Limit("prefill compute", use.instance_id, evidence)
        yield _Candidate(use.computing, limit, ("prefill_waiting", "prefill_forward"))


def _transfers(paths: Iterable[PathUsage], stages: Iterable[StageTimes]) -> Iterable[_Candidate]:
    """Pairs first: they say most."""
    wait = _seconds(_mean_s(stages, "prefill_transfer_kv_cache"))
    for path in sorted(paths, key=lambda path: not (path.source and path.target)):
        where = path.where
        moving = (
            f"bytes move on {where} {_percent(path.moving)} of the time, {wait} a prompt that compute does not hide"
        )
        yield _transfer(path.moving, "link", where, moving)
        workers = f"the transfer workers of {where}"
        size = _kilobytes(path.num_bytes / max(1, path.num_descriptors))
        sizes = f"{path.num_descriptors / path.num_transfers:,.0f} of {size}"
        ring = f"cells wait {_seconds(path.mean_ring_wait_s)} each for room in the ring of {path.target or 'decode'}, "
        ring += f"and {_percent(path.ring)} of the time all workers idle for it"
        found = {
            "link": (path.occupied - path.ring - path.posting - path.setup, moving),
            "staging ring": (path.ring, ring),
            "descriptor cost": (
                path.posting,
                f"{workers} post descriptors {_percent(path.posting)} of the time, {sizes} a transfer",
            ),
            "transfer set-up": (path.setup, f"{workers} set transfers up {_percent(path.setup)} of the time"),
        }
        resource = max(found, key=lambda name: found[name][0])
        yield _transfer(path.occupied, resource, where, found[resource][1])


def _transfer(share: float, resource: str, where: str, evidence: str) -> _Candidate:
    return _Candidate(share, Limit(resource, where, evidence), ("prefill_transfer_kv_cache",))


# What is held. What is missing on prefill is soon missing on decode as well: so prefill comes first.


def _missing(instances: Sequence[InstanceUsage], stages: Sequence[StageTimes]) -> Iterable[_Candidate]:
    transfer = _seconds(_mean_s(stages, "prefill_transfer_kv_cache"))
    for use in instances:
        if use.computing and not use.decoding:
            for resource, share, what in (
                ("prefill slots", use.lacks_slots, "slot"),
                ("prefill KV", use.lacks_pages, "page"),
            ):
                evidence = f"{use.instance_id} has no {what} for the next prompt {_percent(share)} of the time and "
                evidence += f"computes only {_percent(use.computing)}: transfers hold them for {transfer} more"
                yield _Candidate(share, Limit(resource, use.instance_id, evidence), _ON_PREFILL)
    for use in instances:
        if use.decoding or not use.computing:
            waiting = f"{use.mean_running:,.1f} requests run and {use.mean_waiting:,.1f} wait"
            evidence = f"{use.instance_id} has no slot for the next request {_percent(use.lacks_slots)} of the time: "
            evidence += f"{waiting}, with {_percent(use.mean_pages_used)} of its pages in use"
            yield _Candidate(use.lacks_slots, Limit("decode batch cap", use.instance_id, evidence), _ON_DECODE)
            evidence = (
                f"{use.instance_id} has no page for the head of its queue {_percent(use.lacks_pages)} of the time: "
            )
            yield _Candidate(use.lacks_pages, Limit("decode KV", use.instance_id, evidence + waiting), _ON_DECODE)


def _decode_steps(records: RunRecords, instances: Sequence[InstanceUsage], held: Limit) -> Limit | None:
    """What is missing would make larger batches on decode, which may gain little."""
    for use in instances:
        if use.decoding < _FULL or not {held.where, held.resource} & {use.instance_id, "client concurrency"}:
            continue
        gain = _gain_of_twice_the_batch([s for s in records.steps if s.instance_id == use.instance_id])
        if gain is not None and gain < _LITTLE_GAIN:
            evidence = f"{use.instance_id} decodes {_percent(use.decoding)} of the time, "
            evidence += f"and twice the batch gives only {_percent(max(0.0, gain))} more tokens a second"
            if held.where == use.instance_id:
                evidence += f", though {held.evidence.replace(held.where, 'it', 1)}"
            return Limit("decode steps", use.instance_id, evidence)
    return None


def _gain_of_twice_the_batch(steps: Iterable[StepRecord]) -> float | None:
    """In tokens per second, from smaller batches to the largest ones; None if all were about as large."""
    rows = [step for step in steps if step.kind == "decode"]
    most = max((step.num_requests for step in rows), default=0)
    large = _batch_and_rate(step for step in rows if step.num_requests >= _LARGE * most)
    small = _batch_and_rate(step for step in rows if _SMALL * most <= step.num_requests <= (_SMALL + _LARGE) / 2 * most)
    if large is None or small is None:
        return None
    return float((large[1] / small[1]) ** (log(2) / log(large[0] / small[0]))) - 1


def _batch_and_rate(steps: Iterable[StepRecord]) -> tuple[float, float] | None:
    """Mean batch, and tokens per second."""
    num_steps = num_tokens = duration_ns = 0
    for step in steps:
        num_steps += step.num_steps
        num_tokens += step.num_tokens
        duration_ns += step.duration_ns
    return (num_tokens / num_steps, num_tokens / duration_ns * 1e9) if num_steps else None


# Nothing is missing.


def _client(records: RunRecords, instances: Sequence[InstanceUsage], concurrency: int, window: Window) -> _Candidate:
    ends = [(r.arrival_ns, window.end_ns if r.end_ns is None else r.end_ns) for r in records.requests]
    waiting = sum(window.overlap_ns(*span) for span in ends) / window.length_ns
    clients = "the only client waits" if concurrency == 1 else f"of {concurrency} clients {waiting:,.1f} wait"
    evidence = f"{clients} for an answer, and nothing is full: {_how_full(instances)}"
    return _Candidate(0.0, Limit("client concurrency", "client", evidence), _EVERYWHERE)


def _how_full(instances: Iterable[InstanceUsage]) -> str:
    """The busiest of each role."""
    compute = max(instances, key=lambda use: use.computing)
    decode = max(instances, key=lambda use: use.mean_pages_used * (use.decoding > 0))
    return (
        f"{compute.instance_id} computes {_percent(compute.computing)} of the time, "
        f"{decode.instance_id} uses {_percent(decode.mean_pages_used)} of its pages"
    )


def _load(instances: Sequence[InstanceUsage], stages: Sequence[StageTimes], working: Sequence[_Candidate]) -> Limit:
    """Where requests spend most of their time, and how busy that is."""
    longest = max(stages, key=lambda stage: stage.mean_ms)
    there = f"{_seconds(longest.mean_ms / 1e3)}, {_percent(longest.share)} of their latency"
    busiest = max((one for one in working if longest.stage in one.stages), key=lambda one: one.share, default=None)
    if longest.stage == "prefill_waiting" and busiest is not None:
        where = busiest.limit.where
        evidence = f"{where} computes {_percent(busiest.share)} of the time in bursts; requests wait there for {there}"
    elif busiest is not None:
        where, evidence = busiest.limit.where, f"{busiest.limit.evidence}; requests spend {there}, there"
    elif longest.stage == "decode_bootstrap":
        use = max(instances, key=lambda use: max(use.lacks_pages, use.lacks_slots))
        what = "page" if use.lacks_pages > use.lacks_slots else "slot"
        lacking = _percent(max(use.lacks_pages, use.lacks_slots))
        where = use.instance_id
        evidence = f"{where} lacks a {what} {lacking} of the time; requests wait for it for {there}"
    elif longest.stage == "decode_forward":
        use = max(instances, key=lambda use: use.decoding)
        where = use.instance_id
        evidence = f"{where} decodes {_percent(use.decoding)} of the time, {use.mean_running:,.1f} requests at once; "
        evidence += f"that takes {there}"
    else:
        where, evidence = "", f"requests spend {there}, in {longest.stage}"
    return Limit("load", where, f"nothing is full: {evidence}")


def _mean_s(stages: Iterable[StageTimes], name: str) -> float:
    return sum(stage.mean_ms for stage in stages if stage.stage == name) / 1e3


def _percent(share: float) -> str:
    return f"{share:.0%}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds * 1e3:,.3g} ms"


def _kilobytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e3:,.3g} KB"
