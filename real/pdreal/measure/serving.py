"""Times that real mode adds to forwards and transfers. Requests are served by one prefill and one decode instance, and
the times are read from their logbooks.
"""

import asyncio
from bisect import bisect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import chain, groupby, pairwise
from pathlib import Path
from time import perf_counter_ns

import torch

from pdreal.control.channel import LAUNCHER, Channel, Network
from pdreal.control.logbook import read_records
from pdreal.control.requests import Request, RequestFailed, Sampling
from pdreal.hosts.remote_host import RemoteHost
from pdreal.hosts.scratch_folder import ScratchFolder
from pdreal.launcher import Launcher
from pdreal.measure.forwards import graph_of
from pdreal.measure.plan import Plan
from pdreal.measure.rows import Row, row_of
from pdreal.measure.transfers import engines
from pdreal.settings.host import Hosts, LaunchError
from pdreal.settings.options import Options
from pdreal.settings.scenario import real_scenario
from pdsim.core.messages import Heartbeat
from pdsim.core.sequence import TokenIds
from pdsim.metrics.records import RequestRecord, RunRecords, StepRecord, TransferRecord
from pdsim.scenario.loading import parse_scenario

_ROUND_TRIPS = 500


def message_row(hosts: Hosts | None) -> Row:
    """Measures the one-way time of a message, and returns it as a row for `pdsim calibrate`. The message goes to
    another host if there are several, else within this host. Raises LaunchError if the other host does not answer.
    """
    with ScratchFolder() as folder:
        times_us = _messages_us(folder) if hosts is None else _messages_between_us(folder, hosts)
        return row_of("host", asyncio.run(times_us), what="message")


async def _messages_between_us(folder: Path, hosts: Hosts) -> list[float]:
    """Measures how long a message takes to another host: half the time of round trips to pdreal's helper process there.
    Returns the times in us, sorted.
    """
    network = Network.dealt(hosts.home_address)
    channel = Channel(folder, LAUNCHER, network=network)
    name, entry = hosts.others[0]
    host = RemoteHost(name, entry, network, channel, lambda *_: None)
    loop = asyncio.get_running_loop()
    channel.listen(loop, lambda envelope, payload: host.on_notice(envelope.message, payload))
    try:
        await host.start()
        return sorted(half_ns / 1e3 for half_ns in host.half_trips_ns)
    finally:
        await host.end(None)
        loop.remove_reader(channel.descriptor)
        channel.close()


async def _messages_us(folder: Path) -> list[float]:
    """Measures round trips between two channels of this process. Returns half of each, sorted, in us."""
    loop = asyncio.get_running_loop()
    near, far = Channel(folder, "near"), Channel(folder, "far")
    near.connect("far", far.endpoint)
    far.connect("near", near.endpoint)
    answered = asyncio.Event()
    far.listen(loop, lambda envelope, _: far.send("near", envelope.message))
    near.listen(loop, lambda *_: answered.set())
    times_us = []
    for _ in range(_ROUND_TRIPS):
        answered.clear()
        begin_ns = perf_counter_ns()
        near.send("far", Heartbeat("prefill-0", life=0))
        await answered.wait()
        times_us.append((perf_counter_ns() - begin_ns) / 2e3)
    for channel in (near, far):
        loop.remove_reader(channel.descriptor)
        channel.close()
    return sorted(times_us)


_SINGLE_REQUESTS = 12
"""Number of requests that are sent first, each after the last has ended. The first request is a warm-up."""
_SINGLE_TOKENS = 512
_SINGLE_OUTPUTS = 4
_WAVE_REQUESTS = 8
_WAVE_TOKENS = (128, 1024)
_WAVE_OUTPUTS = 4
"""Output tokens of each request of a wave. A wave is a group of requests that are submitted together. The launcher
takes the requests one after another, one forward computes them, and their transfers follow each other. No prefill
forward runs during the transfers."""
_COMPANION_TOKENS = 16
_COMPANION_OUTPUTS = 3000
"""Output tokens of one long request, which decodes while the waves are measured, as requests do under load. The request
is aborted afterwards.
"""
_LOOK_AGAIN_S = 0.01
_LONGEST_LOADING_S = 600
_LEAST_STEPS = 8
"""Minimum number of consecutive decode steps with one batch that a measured row of kind `loop`, the time between steps,
needs."""
_VOCABULARY = 512
"""Token ids of prompts are below this number. The vocabulary of every model in the catalog is at least as large."""


def serving_rows(
    model: str,
    options: Options,
    page_size: int,
    tp: int,
    ep: int,
    plan: Plan,
    left_out: Callable[[str], None],
    *,
    moe_a2a_backend: str = "none",
    draft_tokens: int = 1,
) -> Iterator[Row]:
    """Yields measured rows with the times that serving adds to forwards and transfers. The first available transfer
    engine gives all rows. Each further engine gives only rows of sending, and of handovers of requests from prefill to
    decode. With several ranks only the first engine is used, because calibration needs only the decode steps of such
    rows.

    model: name in the catalog. left_out: called with a text for each missing engine, and for each batch size whose
    batch stayed unchanged for too few steps. draft_tokens: number of tokens of each request that decode steps verify.
    Steps accept one of these tokens, so that batches stay unchanged. 1: there are no drafts. The other arguments are
    the fields of Measurement.
    """
    has_rows = False
    for transport in engines(options.device, options.hosts):
        if has_rows and tp > 1:
            return
        scenario = _scenario(model, page_size, tp, ep, moe_a2a_backend, transport, plan, draft_tokens)
        try:
            loading_us, records = _serve(scenario, options, plan, () if has_rows else plan.served_batches)
        except LaunchError as missing:
            left_out(f"serving by {transport}: {missing}")
            continue
        alone = [request for request in records.requests if 0 < request.request_id < _SINGLE_REQUESTS]
        companion, *waves = records.requests[_SINGLE_REQUESTS:][: 1 + 2 * len(_WAVE_TOKENS) * _WAVE_REQUESTS]
        if not has_rows:
            yield row_of("host", loading_us, what="loading")
            yield from _stage_rows(alone)
            yield from _submit_rows(waves)
            yield from _end_rows(records)
            waves_end_ns = max(wave.end_ns or 0 for wave in waves)
            of_batches = [step for step in records.steps if step.start_ns > waves_end_ns]
            for row in _loop_rows(of_batches, plan.served_batches, torch.device(options.device), left_out):
                yield row if draft_tokens == 1 else replace(row, verified=draft_tokens)
            has_rows = True
        beside_decode = [row for row in records.transfers if row.end_ns < (companion.end_ns or 0)]
        yield from _sending_rows(waves, beside_decode, transport)
        yield _handover_row(alone, records.transfers, transport)


def _scenario(
    model: str, page_size: int, tp: int, ep: int, moe_a2a_backend: str, transport: str, plan: Plan, draft_tokens: int
) -> dict[str, object]:
    """Returns a scenario that runs on any GPU. The scenario names a GPU of the catalog, but real mode does not use that
    entry. model: name in the catalog. transport: name of the transfer engine. The other arguments are the fields of
    Measurement.
    """
    largest_batch = max(plan.served_batches)
    of_request = plan.served_tokens + plan.served_outputs + 2 * draft_tokens + page_size
    pool_pages = -(-of_request // page_size) * largest_batch
    pool_tokens = max(pool_pages * page_size, 2 * _WAVE_REQUESTS * max(_WAVE_TOKENS))
    server = {"gpu": "h200", "tp": tp, "ep": ep, "pool_tokens": pool_tokens, "radix_cache": False}
    server |= {"max_running_requests": largest_batch, "moe_a2a_backend": moe_a2a_backend}
    drafts = {"algorithm": "EAGLE", "num_steps": draft_tokens - 1, "accept_length": 1} if draft_tokens > 1 else {}
    return {
        "model": model,
        "page_size": page_size,
        "prefill": {**server, "chunked_prefill_tokens": 8192},
        "decode": {
            **server,
            "admission": {"use": "reserve_decode_tokens", "reserved_tokens": page_size},
            **{f"speculative_{name}": value for name, value in drafts.items()},
        },
        "network": {"transport": transport},
        "health": {},
        "workload": {"use": "random_lengths", "num_requests": 1, "input_tokens": 8, "output_tokens": 1},
    }


def _serve(
    scenario: dict[str, object], options: Options, plan: Plan, batch_sizes: Sequence[int]
) -> tuple[list[float], RunRecords]:
    """Serves single requests, waves of requests and batches, as `_run` does, in a new cluster. Returns the time in us
    of each restart of an instance, and the records of the run. batch_sizes: numbers of requests of the batches.
    """
    with ScratchFolder() as folder:
        loading_us = asyncio.run(_run(scenario, options, plan, batch_sizes, folder))
        return loading_us, read_records(folder)


async def _run(
    data: dict[str, object], options: Options, plan: Plan, batch_sizes: Sequence[int], logs: Path
) -> list[float]:
    """Serves the requests to measure, in this order: single requests, whose ids are the lowest; groups of requests
    during a long request; one batch of each size in batch_sizes. If batch_sizes is not empty, then measures how long
    the decode instance takes to restart. Returns this time in us in a list, or an empty list. data: scenario. logs:
    folder for logbooks.
    """
    scenario, _ = real_scenario(parse_scenario(data, base=Path()), options)
    launcher = Launcher(scenario, options, folder=logs)
    await launcher.start()
    try:
        for _ in range(_SINGLE_REQUESTS):
            await _serve_together(launcher, 1, _SINGLE_TOKENS, _SINGLE_OUTPUTS)
        async with _companion(launcher):
            for num_tokens in 2 * _WAVE_TOKENS:
                await _serve_together(launcher, _WAVE_REQUESTS, num_tokens, _WAVE_OUTPUTS)
        for batch_size in batch_sizes:
            await _serve_together(launcher, batch_size, plan.served_tokens, plan.served_outputs)
        return [await _loading_us(launcher)] if batch_sizes else []
    finally:
        await launcher.stop()


async def _loading_us(launcher: Launcher) -> float:
    """Measures how long a decode instance takes to load: kills the instance, and returns the time in us until the
    restarted instance serves. Raises LaunchError if this takes too long.
    """
    begin_ns = perf_counter_ns()
    launcher.kill("decode-0", restart_after_s=0.0)
    try:
        async with asyncio.timeout(_LONGEST_LOADING_S):
            for is_missing in (True, False):
                while ("decode" in launcher.missing_roles) != is_missing:  # noqa: ASYNC110  it is rare
                    await asyncio.sleep(_LOOK_AGAIN_S)
    except TimeoutError:
        raise LaunchError(f"decode-0 did not serve again within {_LONGEST_LOADING_S} s") from None
    return (perf_counter_ns() - begin_ns) / 1e3


@asynccontextmanager
async def _companion(launcher: Launcher) -> AsyncIterator[None]:
    """Context in which one long request decodes while other requests are served. The context begins after the first
    token of the long request, and aborts the request at its end.
    """
    answer = launcher.submit(_prompt(_COMPANION_TOKENS), Sampling(_COMPANION_OUTPUTS, ignore_eos=True))
    await anext(aiter(answer))
    reading = asyncio.create_task(_read(answer))
    yield
    launcher.abort(answer.request_id)
    with suppress(RequestFailed):
        await reading


async def _serve_together(launcher: Launcher, num_requests: int, num_tokens: int, num_outputs: int) -> None:
    prompt, sampling = _prompt(num_tokens), Sampling(num_outputs, ignore_eos=True)
    await asyncio.gather(*[_read(launcher.submit(prompt, sampling)) for _ in range(num_requests)])


def _prompt(num_tokens: int) -> TokenIds:
    return TokenIds([i * 7 % _VOCABULARY for i in range(num_tokens)])


async def _read(answer: Request) -> None:
    async for _ in answer:
        pass


def _stage_rows(alone: Sequence[RequestRecord]) -> Iterator[Row]:
    """Yields measured rows with the times of the stages of requests that were served alone. These stages consist of
    host work and messages.
    """
    for what, begin, end in (
        ("route", "arrival_ns", "routed_ns"),
        ("admit", "routed_ns", "admitted_ns"),
        ("grant", "admitted_ns", "prefill_start_ns"),
        ("result", "prefill_end_ns", "transfer_start_ns"),
        ("answer", "streamed_ns", "first_token_ns"),
    ):
        yield row_of("host", _between_us(alone, begin, end), what=what, new_tokens=_SINGLE_TOKENS)


def _submit_rows(waves: Sequence[RequestRecord]) -> Iterator[Row]:
    """Yields one row per prompt length of the waves: the time from one request's arrival at the router to the next's.
    The requests of a wave are submitted together.
    """
    for num_tokens in _WAVE_TOKENS:
        arrivals = [request.arrival_ns for request in waves if request.num_prompt_tokens == num_tokens]
        chunks = [arrivals[i : i + _WAVE_REQUESTS] for i in range(0, len(arrivals), _WAVE_REQUESTS)]
        yield row_of("host", _spacings_us(chunks), what="submit", new_tokens=num_tokens)


def _end_rows(records: RunRecords) -> Iterator[Row]:
    """Yields a measured row with the time between neighbouring ends of requests whose last tokens come from the same
    decode step. No row if every request ended with another step.
    """
    step_ends = [step.start_ns + step.duration_ns for step in records.steps if step.kind == "decode"]
    ends = sorted(request.end_ns for request in records.requests if request.end_ns is not None)
    together = [list(group) for _, group in groupby(ends, key=lambda end_ns: bisect(step_ends, end_ns))]
    if spacings := _spacings_us(together):
        yield row_of("host", spacings, what="end")


def _spacings_us(groups: Sequence[Sequence[int]]) -> list[float]:
    """Returns the differences of neighbouring times within each group, sorted, in us."""
    return sorted((later - earlier) / 1e3 for group in groups for earlier, later in pairwise(group))


def _sending_rows(waves: Sequence[RequestRecord], transfers: Sequence[TransferRecord], transport: str) -> Iterator[Row]:
    """Yields one row for each size of transfers: the time between the starts of two transfers of a worker, if the
    second was queued while the first ran. waves: requests that were sent in waves, many at once; other transfers do not
    count. transport: name of the transfer engine.
    """
    of_waves = {request.request_id for request in waves}
    by_worker: dict[int, list[TransferRecord]] = {}
    for row in sorted(transfers, key=lambda row: row.start_ns):
        if row.request_id in of_waves:
            by_worker.setdefault(row.worker, []).append(row)
    times_us: dict[tuple[int, int], list[float]] = {}
    for row, following in chain.from_iterable(map(pairwise, by_worker.values())):
        if following.queued_ns < row.end_ns:
            shape = row.num_bytes, row.num_descriptors
            times_us.setdefault(shape, []).append((following.start_ns - row.start_ns) / 1e3)
    for (num_bytes, num_descriptors), found in times_us.items():
        yield row_of(
            "sending", sorted(found), transport=transport, payload_bytes=num_bytes, num_descriptors=num_descriptors
        )


def _handover_row(alone: Sequence[RequestRecord], transfers: Sequence[TransferRecord], transport: str) -> Row:
    """Returns a measured row with the time of a handover, from the start of a request's transfer until decode streams
    its first token. In an empty pool pages are contiguous, so all requests have the same number of descriptors. alone:
    requests that were served one at a time. transport: name of the transfer engine.
    """
    return row_of(
        "handover",
        _between_us(alone, "transfer_start_ns", "streamed_ns"),
        transport=transport,
        payload_bytes=alone[0].transfer_bytes,
        num_descriptors=sum(row.num_descriptors for row in transfers if row.request_id == alone[0].request_id),
    )


def _between_us(requests: Sequence[RequestRecord], begin: str, end: str) -> list[float]:
    """Returns the times between two events of each request, sorted, in us. begin, end: fields of RequestRecord."""
    return sorted((getattr(request, end) - getattr(request, begin)) / 1e3 for request in requests)


def _loop_rows(
    steps: Sequence[StepRecord], batch_sizes: Sequence[int], device: torch.device, left_out: Callable[[str], None]
) -> Iterator[Row]:
    """Yields one row per batch size: the time between starts of consecutive decode steps, from the longest sequence of
    steps with an unchanged batch. left_out: called with a text about each batch size for which this sequence is too
    short.
    """
    decode = [step for step in steps if step.kind == "decode"]
    unchanged = groupby(enumerate(decode), key=lambda at: (at[1].num_requests, _context_before(*at)))
    runs = [[step for _, step in run] for _, run in unchanged]
    for batch_size in batch_sizes:
        found = [run for run in runs if run[0].num_requests == batch_size]
        run = max(found, key=len, default=[])
        if len(run) < _LEAST_STEPS:
            together = f"the batch stayed unchanged for {len(run)} steps in a row, and {_LEAST_STEPS} are needed"
            left_out(f"decode loop, batch of {batch_size}: {together}; measure again on a quieter machine")
            continue
        num_periods = len(run) - 1
        periods_ns = run[-1].start_ns - run[0].start_ns
        yield Row(
            kind="loop",
            time_us=periods_ns / num_periods / 1e3,
            rest_us=(periods_ns - sum(step.duration_ns for step in run[:-1])) / num_periods / 1e3,
            repeats=num_periods,
            batch=batch_size,
            graph=graph_of(batch_size, device),
            context_tokens=sum(step.num_context_tokens for step in run[:-1]) // num_periods,
        )


def _context_before(index: int, step: StepRecord) -> int:
    """Returns the number of context tokens that the step's batch would have had at step 0, because each request gains
    one token per step. All steps of an unchanged batch give the same number. index: index of the step among all decode
    steps.
    """
    return step.num_context_tokens - index * step.num_requests
