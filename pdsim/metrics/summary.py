"""The summary of a run: the fields of SGLang's bench_serving by its definitions, and pdsim's own fields under "pdsim".

Formulas: `pdsim fields summary`. Times are those of the client: TTFT includes the hand-over from prefill to decode.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import sqrt
from typing import Any, Final, Literal

from pdsim.metrics.distribution import Run, RunSamples, Samples
from pdsim.metrics.records import HostCopyRecord, RequestRecord, RunRecords, ServerRecord, StepRecord

TailMetric = Literal["ttft", "tpot", "e2e"]
"""Metrics by which `pdsim explain` can choose the slowest requests."""
_MS: Final = 1e6
_S: Final = 1e9


def summarize(
    records: RunRecords, *, speculative: bool = False, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The summary of a run's records. speculative: True: steps verify drafted tokens. extra: further fields for the
    object "pdsim".
    """
    done = [r for r in records.requests if r.outcome == "finished"]
    start_ns = min((r.arrival_ns for r in records.requests), default=0)
    end_ns = max((_end_ns(r) for r in done), default=start_ns)
    duration_s = (end_ns - start_ns) / _S
    input_tokens = sum(r.num_prompt_tokens for r in done)
    image_tokens = sum(r.num_image_tokens for r in done)
    audio_tokens = sum(r.num_audio_tokens for r in done)
    output_tokens = sum(r.num_output_tokens for r in done)
    e2e = Samples(e2e_ms(r) for r in done)
    ttft = Samples(ttft_ms(r) for r in done)
    tpot = Samples(tpot_ms(r) for r in done if r.num_output_tokens > 1)
    itl = itl_samples(records)

    def rate(amount: float) -> float:
        return amount / duration_s if duration_s else 0.0

    return {
        "duration": duration_s,
        "completed": len(done),
        "total_input_tokens": input_tokens,
        "total_input_text_tokens": input_tokens - image_tokens - audio_tokens,
        "total_input_vision_tokens": image_tokens,
        "total_output_tokens": output_tokens,
        "total_output_tokens_retokenized": output_tokens,
        "request_throughput": rate(len(done)),
        "input_throughput": rate(input_tokens),
        "output_throughput": rate(output_tokens),
        "total_throughput": rate(input_tokens + output_tokens),
        **statistics("e2e_latency", e2e),
        **statistics("ttft", ttft),
        **statistics("tpot", tpot),
        **statistics("itl", itl),
        "max_itl_ms": itl.max() if itl.count else None,
        "concurrency": rate(e2e.mean() * e2e.count / 1e3),
        "accept_length": _accept_length(records) if speculative else None,
        "max_output_tokens_per_s": _peak_tokens(records, start_ns),
        "max_concurrent_requests": _peak_requests(done, start_ns),
        "pdsim": {
            **_own_fields(records, duration_s),
            **_chunk_fields(records.token_groups),
            **_classes(records.requests),
            **(extra or {}),
        },
    }


def _classes(requests: Sequence[RequestRecord]) -> dict[str, Any]:
    """The summary field `classes`: for each class of requests, the numbers of finished and failed requests, and
    statistics of TTFT and TPOT. An empty dict: requests have no classes.
    """
    names = sorted({r.request_class for r in requests} - {""})
    return (
        {"classes": {name: _of_class([r for r in requests if r.request_class == name]) for name in names}}
        if names
        else {}
    )


def _of_class(requests: Sequence[RequestRecord]) -> dict[str, Any]:
    done = [r for r in requests if r.outcome == "finished"]
    ttft, tpot = Samples(ttft_ms(r) for r in done), Samples(tpot_ms(r) for r in done if r.num_output_tokens > 1)
    failed = sum(r.outcome == "failed" for r in requests)
    return {"completed": len(done), "failed": failed, **statistics("ttft", ttft), **statistics("tpot", tpot)}


def e2e_ms(request: RequestRecord) -> float:
    return (_end_ns(request) - request.arrival_ns) / _MS


def ttft_ms(request: RequestRecord) -> float:
    assert request.first_token_ns is not None
    return (request.first_token_ns - request.arrival_ns) / _MS


def tpot_ms(request: RequestRecord) -> float:
    """Mean time in ms per output token after the first. The request must have at least two output tokens."""
    return (e2e_ms(request) - ttft_ms(request)) / (request.num_output_tokens - 1)


def itl_samples(records: RunRecords) -> RunSamples:
    """Gaps between tokens in ms. Each decode step is a gap of every request in its batch, except of the step's
    num_resumed requests, whose gaps come from RunRecords.token_gaps. Tokens that come together share the gap equally.

    With a stream interval above 1 (number of tokens that the server sends to the client together), only gaps of
    finished requests count. The tokens that reach the client together share the time since the tokens before them.
    """
    return RunSamples(_gaps(records) if records.token_groups is None else _gaps_in_groups(records.token_groups))


def _gaps_in_groups(groups: Iterable[Run]) -> Iterator[Run]:
    for first, growth, length, num_tokens in groups:
        scale = _MS * num_tokens
        yield first / scale, growth / scale, length, num_tokens


def _chunk_fields(groups: Iterable[Run] | None) -> dict[str, float | None]:
    """Summary fields of the times between groups of tokens that reach the client together (stream interval). groups:
    RunRecords.token_groups; None: each token reaches the client alone, so there are no such fields.
    """
    if groups is None:
        return {}
    samples = RunSamples((first / _MS, growth / _MS, length, 1) for first, growth, length, _ in groups)
    return statistics("inter_chunk_latency", samples)


def _gaps(records: RunRecords) -> Iterator[Run]:
    for gap in records.token_gaps:
        yield gap.duration_ns / _MS / gap.num_tokens, 0.0, 1, gap.num_requests * gap.num_tokens
    for step in records.steps:
        if step.kind == "decode":
            first, growth = step.first_ns / _MS, step.growth_ns / _MS
            yield first, growth, step.num_steps, step.num_requests - step.num_resumed
            if step.num_resumed and step.num_steps > 1:
                yield first + growth, growth, step.num_steps - 1, step.num_resumed


def _end_ns(request: RequestRecord) -> int:
    assert request.end_ns is not None
    return request.end_ns


def statistics(name: str, samples: Samples | RunSamples) -> dict[str, float | None]:
    """The summary fields of one latency: mean, median, standard deviation and percentiles in ms. name: middle part of
    the fields' names, such as ttft in mean_ttft_ms. A field is None if there are no samples.
    """
    if not samples.count:
        return {f"{statistic}_{name}_ms": None for statistic in STATISTICS}
    percentiles = {f"p{p}_{name}_ms": samples.percentile(p) for p in (90, 95, 99)}
    return {
        f"mean_{name}_ms": samples.mean(),
        f"median_{name}_ms": samples.percentile(50),
        f"std_{name}_ms": samples.std(),
        **percentiles,
    }


def _own_fields(records: RunRecords, duration_s: float) -> dict[str, Any]:
    requests, transfers = records.requests, records.transfers
    prompt_tokens = sum(r.num_prompt_tokens for r in requests) or 1
    decode_steps = [s for s in records.steps if s.kind == "decode"]
    request_ns = sum(s.num_requests * s.duration_ns for s in decode_steps)
    return {
        "failed": sum(r.outcome == "failed" for r in requests),
        "unfinished": sum(r.outcome == "unfinished" for r in requests),
        "retractions": sum(r.num_retractions for r in requests),
        "retraction_copies_s": sum(s.copying_ns for s in decode_steps) / _S,
        "retries": sum(r.num_retries for r in requests),
        "prefill_steps": sum(s.kind == "prefill" for s in records.steps),
        "decode_steps": sum(s.num_steps for s in decode_steps),
        "mean_running_requests": request_ns / _S / duration_s if duration_s else 0.0,
        "mean_running_requests_per_step": _per_step(decode_steps),
        "prefill_cache_hit_rate": sum(r.num_prefill_cached_tokens for r in requests) / prompt_tokens,
        "decode_cache_hit_rate": sum(r.num_decode_cached_tokens for r in requests) / prompt_tokens,
        "transfer_bytes": sum(t.num_bytes for t in transfers),
        "transfers": len(transfers),
    }


def host_cache_fields(copies: Iterable[HostCopyRecord], page_size: int) -> dict[str, int]:
    """Summary fields on the copies between GPU pages and host caches."""
    loads, writes = ([copy for copy in copies if copy.kind == kind] for kind in ("load", "write"))
    return {
        "host_hit_tokens": page_size * sum(load.num_pages for load in loads),
        "host_loaded_bytes": sum(load.num_bytes for load in loads),
        "host_written_bytes": sum(write.num_bytes for write in writes),
    }


def storage_fields(copies: Iterable[HostCopyRecord], page_size: int) -> dict[str, int | float]:
    """Summary fields on the copies between host caches and storage."""
    reads, stores = ([copy for copy in copies if copy.kind == kind] for kind in ("read", "store"))
    return {
        "storage_read_tokens": page_size * sum(read.num_pages for read in reads),
        "storage_read_bytes": sum(read.num_bytes for read in reads),
        "storage_written_bytes": sum(store.num_bytes for store in stores),
        "storage_reads_s": sum(read.end_ns - read.start_ns for read in reads) / 1e9,
        "storage_writes_s": sum(store.end_ns - store.start_ns for store in stores) / 1e9,
    }


def elastic_fields(servers: Sequence[ServerRecord], num_gpus: int, end_ns: int) -> dict[str, Any]:
    """Summary fields of an elastic cluster. num_gpus: GPUs per server. end_ns: end of the run."""
    by_server: dict[int, list[ServerRecord]] = {}
    for row in servers:
        by_server.setdefault(row.server, []).append(row)
    on_ns = switches = starts = stops = 0
    for rows in by_server.values():
        for row, after in pairwise(rows):
            on_ns += (min(after.time_ns, end_ns) - min(row.time_ns, end_ns)) if row.role else 0
            starts += not row.role
            stops += not after.role
            switches += "" != row.role != after.role != ""
        on_ns += max(0, end_ns - rows[-1].time_ns) if rows[-1].role else 0
    return {
        "gpu_hours": num_gpus * on_ns / _S / 3600,
        "role_switches": switches,
        "servers_started": starts,
        "servers_stopped": stops,
    }


def _accept_length(records: RunRecords) -> float:
    """Mean number of tokens per request that a decode step yields."""
    steps = [step for step in records.steps if step.kind == "decode"]
    num_verified = sum(step.num_requests for step in steps)
    return sum(step.num_tokens for step in steps) / num_verified if num_verified else 0.0


def _per_step(steps: Iterable[StepRecord]) -> float:
    """Mean number of running requests, over all decode steps. Times without steps do not count."""
    num_steps = num_requests = 0
    for step in steps:
        num_steps += step.num_steps
        num_requests += step.num_steps * step.num_requests
    return num_requests / num_steps if num_steps else 0.0


def _peak_tokens(records: RunRecords, start_ns: int) -> int:
    """Largest number of output tokens in one second of the run. The run is divided into seconds from start_ns on."""
    seconds: dict[int, int] = {}
    for request in records.requests:
        if request.first_token_ns is not None:
            second = (request.first_token_ns - start_ns) // 10**9
            seconds[second] = seconds.get(second, 0) + 1
    for step in records.steps:
        if step.kind != "decode":
            continue
        begin = step.start_ns - start_ns
        second, last = begin // 10**9, (begin + step.duration_ns) // 10**9
        done = 0
        while second < last:  # the steps of a run are almost equally long
            second += 1
            before = (second * 10**9 - begin) * step.num_steps // step.duration_ns
            tokens = (before - done) * step.num_tokens // step.num_steps
            seconds[second - 1] = seconds.get(second - 1, 0) + tokens
            done = before
        seconds[last] = seconds.get(last, 0) + (step.num_steps - done) * step.num_tokens // step.num_steps
    return max(seconds.values(), default=0)


def _peak_requests(done: Iterable[RequestRecord], start_ns: int) -> int:
    """Largest number of requests that are in the cluster at some time of one second. The run is divided into seconds
    that begin at start_ns. done: requests that have ended.
    """
    changes: dict[int, int] = {}
    for request in done:
        first, last = (request.arrival_ns - start_ns) // 10**9, (_end_ns(request) - start_ns) // 10**9
        changes[first] = changes.get(first, 0) + 1
        changes[last + 1] = changes.get(last + 1, 0) - 1
    peak = level = 0
    for second in sorted(changes):
        level += changes[second]
        peak = max(peak, level)
    return peak


Client = Literal["sglang", "aiperf"]

STATISTICS = ("mean", "median", "std", "p90", "p95", "p99")


def by_client(summary: Mapping[str, Any], client: Client) -> dict[str, Any]:
    """The summary with the numbers that a client would print under the same names. For client `aiperf`, the fields of
    ITL have the values of TPOT, because AIPerf's ITL is the mean per request.
    """
    fields = dict(summary)
    if client == "aiperf":
        for statistic in STATISTICS:
            fields[f"{statistic}_itl_ms"] = fields[f"{statistic}_tpot_ms"]
    return fields


_SHARE = 0.05
"""The queue counts as growing only if the number of requests that ended in the second half of the arrival time is lower
than the number due by more than this share of the number due. A smaller lack may come from a burst at the end.
"""
_DEVIATIONS = 3
"""Number of standard deviations of the number of arrivals. If the requests that ended in the second half of the arrival
time are too few by at most this number of deviations, the lack counts as chance.
"""
_NUM_WINDOWS = 8
"""Number of windows into which the time of the arrivals is divided, to see how much the number of arrivals varies."""


def is_saturated(requests: Sequence[RequestRecord]) -> bool:
    """True if the queue of an open loop grows (see queue_grows)."""
    return queue_grows([r.arrival_ns for r in requests], [r.end_ns or 0 for r in requests])


def queue_grows(arrivals_ns: Sequence[int], ends_ns: Sequence[int]) -> bool:
    """True if the queue of an open loop grows: in the second half of the time from the first to the last arrival,
    clearly fewer requests ended than were due. Latencies then depend on the length of the run. False if all requests
    arrived at once, or there are none.

    A request is due a lag after its arrival, so a rising rate does not count as a growing queue. The lag is the median
    latency of requests that arrived in the first half and ended, but at most a quarter of the arrival time. Because of
    this limit, a run whose requests take about as long as the arrivals last counts as saturated: it is too short to
    tell. A burst at the end does not count as a growing queue if it is within the variation of arrivals.

    ends_ns: end of each request in the order of arrivals_ns; 0 or less: it did not end.
    """
    first_ns, last_ns = min(arrivals_ns, default=0), max(arrivals_ns, default=0)
    if first_ns == last_ns:
        return False
    middle_ns = (first_ns + last_ns) // 2
    pairs = zip(arrivals_ns, ends_ns, strict=True)
    latencies_ns = sorted([end - arrival for arrival, end in pairs if arrival <= middle_ns and end > 0])
    typical_ns = latencies_ns[len(latencies_ns) // 2] if latencies_ns else 0
    lag_ns = min(typical_ns, (last_ns - first_ns) // 4)
    num_due = sum([middle_ns < arrival_ns + lag_ns <= last_ns for arrival_ns in arrivals_ns])
    num_ended = sum([middle_ns < end_ns <= last_ns for end_ns in ends_ns])
    chance = _DEVIATIONS * max(sqrt(num_due), _deviation(arrivals_ns, first_ns, last_ns))
    return num_due - num_ended > max(_SHARE * num_due, chance)


def _deviation(arrivals_ns: Iterable[int], first_ns: int, last_ns: int) -> float:
    """Standard deviation of the number of arrivals in a period half as long as that from first_ns to last_ns. It is
    estimated from the numbers of arrivals in _NUM_WINDOWS shorter windows of equal length.

    Each window is compared with the next, so that a slowly rising rate does not count as variation.
    """
    counts = [0] * _NUM_WINDOWS
    for arrival_ns in arrivals_ns:
        counts[min(_NUM_WINDOWS - 1, (arrival_ns - first_ns) * _NUM_WINDOWS // (last_ns - first_ns))] += 1
    variance = sum((b - a) ** 2 for a, b in pairwise(counts)) / (2 * (_NUM_WINDOWS - 1))
    return sqrt(variance * _NUM_WINDOWS / 2)
