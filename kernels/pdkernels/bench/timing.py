"""Four ways to time a call: on the device, inside a CUDA graph, on the host until the call is submitted, and on the
host until the work is done.

Every measurement takes a list of calls in turn. If they touch different memory, no call finds its data in L2.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

_HEAD_START_CYCLES = 10_000_000  # about five milliseconds in which the host runs ahead of the device


def event_us(calls: Sequence[Call], repeats: int) -> float:
    """Returns the median time of a call in us, between CUDA events before and after it. Launch latency is included."""
    for call in calls:
        call()
    spans = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda.synchronize()
    torch.cuda._sleep(_HEAD_START_CYCLES)
    for i, (start, end) in enumerate(spans):
        start.record()
        calls[i % len(calls)]()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in spans) * 1e3


def graph_us(calls: Sequence[Call], repeats: int) -> float:
    """Returns the median device time per call in us, when all calls are replayed as one graph. Gaps between kernels are
    included.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):  # torch.cuda.graph would collect garbage first: a second per ten rows
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
    return event_us([graph.replay], repeats) / len(calls)


def submit_us(calls: Sequence[Call], repeats: int, burst: int = 16) -> float:
    """Returns the host time of a call in us: the mean over a burst of `burst` calls that do not wait for the device,
    and of these the median over `repeats` bursts. Before each burst the device is idle.
    """
    taken = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        for i in range(burst):
            calls[i % len(calls)]()
        taken.append((time.perf_counter_ns() - begin) / burst)
    torch.cuda.synchronize()
    return statistics.median(taken) / 1e3


def whole_us(calls: Sequence[Call], repeats: int) -> float:
    """Returns the median host time in us from a call until its work on the device is done, over `repeats` calls. The
    items of `calls` are called in turn.
    """

    def call_and_wait(call: Call) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        call()
        torch.cuda.current_stream().synchronize()
        return (time.perf_counter_ns() - begin) / 1e3

    for call in calls:
        call()
    return statistics.median(call_and_wait(calls[i % len(calls)]) for i in range(repeats))


def repeats_for(payload_bytes: int) -> int:
    """Returns a number of repeats: enough for a steady median of short calls, few enough for long ones."""
    return max(7, min(40, (8 << 30) // max(payload_bytes, 1)))
