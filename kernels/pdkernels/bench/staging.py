"""Measures gather and scatter: with pdkernels, with plain Triton, torch and CUDA copies, and with SGLang's kernels."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import torch

from pdkernels.bench import baselines, sglang
from pdkernels.bench.cases import MODELS, Arena, Case, Memory
from pdkernels.bench.rows import Row
from pdkernels.bench.timing import Call, event_us, graph_us, repeats_for, submit_us, whole_us
from pdkernels.copies.gather import gather, gather_batch
from pdkernels.copies.push import push
from pdkernels.copies.scatter import scatter, scatter_batch
from pdkernels.copies.tiling import Tiling
from pdkernels.layout import Pool
from pdkernels.unused.captured import CapturedCopy
from pdkernels.unused.fp8_wire import gather_fp8, scatter_fp8

SIDES = ("gather", "scatter")
_BASELINE_TOKENS = 1000
_LARGEST_GRID = 65535  # of SGLang's second grid dimension


@dataclass(frozen=True, slots=True)
class Bench:
    """Memory and results that all measurements share. arena: memory for pages and staging. sglang: SGLang's module;
    None: SGLang is not measured. peak_bytes_per_us: copy bandwidth, bytes read plus bytes written per us, measured with
    copies of 1 GiB. copies: times in us of the copies measured so far, by their bytes.
    """

    arena: Arena
    sglang: ModuleType | None
    peak_bytes_per_us: float  # largest measured copy bandwidth, read plus written
    copies: dict[int, float] = field(default_factory=dict)  # payload in bytes to microseconds

    def copy_us(self, payload: int) -> float:
        """Returns the time in us of a device-to-device copy of `payload` bytes. The first call for a size measures it.
        That call takes back all memory that `arena` lent before, and overwrites it.
        """
        if payload not in self.copies:
            self.copies[payload] = copy_us(self.arena, payload)
        return self.copies[payload]

    def row(self, kernel: str, variant: str, case: Case, payload: int, copy_us: float, **times: Any) -> Row:
        """Makes a row from measured times (`times`, by field of Row), with the fields that are computed from them.
        payload: bytes of KV that are moved. copy_us: time in us of a copy of the payload.
        """
        row = Row(
            kernel,
            variant,
            case.model.name,
            case.tokens,
            case.page_size,
            case.src_tp,
            case.dst_tp,
            payload,
            copy_us=copy_us,
            floor_us=2 * payload / self.peak_bytes_per_us,
        )
        row = replace(row, **times)
        if row.time_us is None:
            return row
        return replace(row, copy_fraction=copy_us / row.time_us, gbytes_per_s=2 * payload / row.time_us / 1e3)


def copy_us(arena: Arena, payload: int) -> float:
    """Returns the median time in us of a device-to-device copy of `payload` bytes. Calls take turns over several places
    in memory, so that the L2 cache does not help. Takes back all memory that the arena lent before.
    """
    arena.reset()
    count = 1 if payload > 2 << 30 else max(2, min(64, -(-(256 << 20) // payload)))
    pairs = [(arena.take(payload), arena.take(payload)) for _ in range(count)]
    return event_us([partial(b.copy_, a) for a, b in pairs], repeats_for(payload))


def cases(lengths: Sequence[int], page_sizes: Sequence[int]) -> Iterator[tuple[str, Case]]:
    """Yields (side, case) for all combinations of model of MODELS, page size and length: a gather of a prefill rank of
    TP 4, then the scatters of decode ranks of TP 1 and of TP 2. lengths: numbers of tokens of a request.
    """
    for model, page_size, tokens in product(MODELS, page_sizes, lengths):
        yield "gather", Case(model, tokens, page_size, 4, 1)
        for dst_tp in (1, 2):
            yield "scatter", Case(model, tokens, page_size, 4, dst_tp)


def measure(bench: Bench, side: str, case: Case) -> Iterator[Row]:
    """Measures our kernel and SGLang's in one case, and yields a row for each. Requests of 1,000 tokens are also
    measured with the other ways (baselines), and with calls that do the whole work from a page list to moved data
    (_whole_calls). side: gather or scatter.
    """
    heads = case.source_heads if side == "gather" else case.target_heads
    payload = case.payload_bytes(heads)
    copied = bench.copy_us(payload)
    memory = Memory.of(bench.arena, case, heads)
    repeats = repeats_for(payload)
    for variant, times in _best_of_two(case, _kernel_calls(bench, side, case, memory), repeats).items():
        yield bench.row(side, variant, case, payload, copied, **times)
    if case.tokens == _BASELINE_TOKENS:
        for variant, calls in _baseline_calls(side, case, memory):
            times = {"time_us": event_us(calls[:2], 7), "submit_us": submit_us(calls[:2], 7, burst=1)}
            yield bench.row(side, variant, case, payload, copied, **times)
    if case.tokens == _BASELINE_TOKENS:
        for variant, calls in _whole_calls(bench, side, case, memory):
            yield bench.row(side, variant, case, payload, copied, whole_us=whole_us(calls, 30))


def _best_of_two(case: Case, variants: dict[str, list[Call]], repeats: int) -> dict[str, dict[str, float]]:
    """Measures all variants in two rounds, because the first variant of the first round runs on an idle device, which
    is slow. Returns, for each variant, the smaller median of the two rounds for each of its times, by field of Row.
    """
    best: dict[str, dict[str, float]] = {variant: {} for variant in variants}
    for _ in range(2):
        for variant, calls in variants.items():
            times = {"time_us": event_us(calls, repeats), "graph_us": graph_us(calls, 9)}
            if case.tokens == _BASELINE_TOKENS:
                times["submit_us"] = submit_us(calls, 20)
            best[variant] = {name: min(time, best[variant].get(name, time)) for name, time in times.items()}
    return best


def _kernel_calls(bench: Bench, side: str, case: Case, memory: Memory) -> dict[str, list[Call]]:
    variants = {"fused": our_calls(side, case, memory)}
    if bench.sglang is not None and case.tokens < _LARGEST_GRID:
        kernel_calls = sglang.gather_kernel_calls if side == "gather" else sglang.scatter_kernel_calls
        variants["sglang"] = kernel_calls(bench.sglang, case, memory)
    return variants


def _baseline_calls(side: str, case: Case, memory: Memory) -> Iterator[tuple[str, list[Call]]]:
    yield "per_plane", baselines.plain_triton(case, memory, side)
    yield "torch_index", baselines.torch_index(case, memory, side)
    if case.page_size == 16 and case.model in MODELS[:2]:
        yield "memcpy2d", baselines.copy_engine(case, memory, side)
        if baselines.has_copy_batch():
            yield "memcpy_batch", baselines.copy_batch(case, memory, side)


def our_calls(
    side: str, case: Case, memory: Memory, programs: int | None = None, tiling: Tiling | None = None
) -> list[Call]:
    """Returns calls of our kernel, one for each page list of `memory`. side: gather or scatter. programs: maximum
    number of programs at a time; None: no limit. tiling: None: the kernel's default.
    """
    move: Any = gather if side == "gather" else partial(scatter, writers=case.writers)
    how = {"programs": programs, "tiling": tiling}
    return [
        partial(move, memory.pool, pages, case.tokens, memory.staging, offset_bytes=offset, **how)
        for pages, offset in memory.rotation()
    ]


def _whole_calls(bench: Bench, side: str, case: Case, memory: Memory) -> Iterator[tuple[str, list[Call]]]:
    """Yields (name of a variant, its calls). side: gather or scatter. A call does the whole work from a page list to
    moved data. As in PD systems, a gather's page list is on the host, and a scatter's on the device.
    """
    if side == "scatter":
        yield "fused_call", our_calls(side, case, memory)
        if bench.sglang is not None:
            yield "sglang_call", sglang.whole_scatter_calls(bench.sglang, case, memory)
        return
    captured = CapturedCopy("gather", memory.pool, memory.staging, most_tokens=case.tokens)
    lists = [(pages.cpu().numpy(), offset) for pages, offset in memory.rotation()]
    yield "fused_call", [_captured_call(captured, pages, case.tokens, offset) for pages, offset in lists]
    if bench.sglang is not None:
        yield "sglang_call", sglang.whole_gather_calls(bench.sglang, case, memory, use_torch=False)
        yield "sglang_torch_call", sglang.whole_gather_calls(bench.sglang, case, memory, use_torch=True)


def _captured_call(captured: CapturedCopy, pages: Any, tokens: int, offset: int) -> Call:
    return lambda: captured(pages, tokens, offset)


def few_programs(bench: Bench) -> Iterator[Row]:
    """Measures gather and scatter with different limits of the number of programs, and yields a row for each limit.
    Each program has a multiprocessor of its own, unless there are more programs than multiprocessors.
    """
    case = Case(MODELS[1], 16384, 16, 4, 1)
    for side in SIDES:
        heads = case.source_heads if side == "gather" else case.target_heads
        payload = case.payload_bytes(heads)
        copied = bench.copy_us(payload)
        memory = Memory.of(bench.arena, case, heads)
        for programs in (1, 2, 4, 8, 16, 32, 64, 132, 264, 528, 1056):
            time = event_us(our_calls(side, case, memory, programs), 5)
            yield bench.row(side, "few_programs", case, payload, copied, time_us=time, programs=programs)


def other_forms(bench: Bench) -> Iterator[Row]:
    """Measures forms that the main table leaves out, and yields a row for each measurement: a gather for four targets,
    HND pages, fp8 on the wire, and a push within one GPU.
    """
    case = Case(MODELS[1], 16384, 16, 1, 4)
    payload = case.payload_bytes(case.source_heads)
    copied = bench.copy_us(payload)
    memory = Memory.of(bench.arena, case, case.source_heads)
    pool, pages, staging = memory.pool, memory.pages[0], memory.staging
    paged = [plane.view(-1, 8, 16, 128) for plane in pool.planes]
    by_head = Pool(paged[: case.model.layers], paged[case.model.layers :])
    scales = torch.ones(len(paged), device="cuda")
    forms: dict[tuple[str, str], Call] = {
        ("gather", "fan_out_4"): lambda: gather(pool, pages, case.tokens, staging, slices=4),
        ("gather", "hnd"): lambda: gather(by_head, pages, case.tokens, staging),
        ("scatter", "hnd"): lambda: scatter(by_head, pages, case.tokens, staging),
        ("gather", "fp8_wire"): lambda: gather_fp8(pool, pages, case.tokens, staging, scales),
        ("scatter", "fp8_wire"): lambda: scatter_fp8(pool, pages, case.tokens, staging, scales),
        ("push", "same_gpu"): lambda: push(pool, pages, by_head, memory.pages[-1], case.tokens),
    }
    for (side, variant), call in forms.items():
        yield bench.row(side, variant, case, payload, copied, time_us=event_us([call], 9))


def batches(bench: Bench) -> Iterator[Row]:
    """Measures gather and scatter of several requests, first in one launch for all requests, then in one launch per
    request. Yields a row for each measurement.
    """
    for requests, tokens in ((16, 1000), (64, 256)):
        case = Case(MODELS[1], requests * tokens, 16, 4, 1)
        each = -(-tokens // 16)
        for side in SIDES:
            heads = case.source_heads if side == "gather" else case.target_heads
            payload = case.payload_bytes(heads)
            copied = bench.copy_us(payload)
            memory = Memory.of(bench.arena, replace(case, tokens=requests * each * 16), heads)
            span = payload // requests
            spans = torch.tensor([[i * each, tokens, i * span] for i in range(requests)], device="cuda")
            for variant, move in (("one_launch", _one_launch), ("launch_each", _launch_each)):
                calls = [move(side, case, memory, spans, tokens)]
                times = {"time_us": event_us(calls, 15), "submit_us": submit_us(calls, 15)}
                yield bench.row(side, f"{variant}_{requests}", case, payload, copied, **times)


def _one_launch(side: str, case: Case, memory: Memory, spans: torch.Tensor, tokens: int) -> Call:
    pool, pages, staging, writers = memory.pool, memory.pages[0], memory.staging, case.writers
    if side == "gather":
        return lambda: gather_batch(pool, pages, spans, staging, longest_tokens=tokens)
    return lambda: scatter_batch(pool, pages, spans, staging, longest_tokens=tokens, writers=writers)


def _launch_each(side: str, case: Case, memory: Memory, spans: torch.Tensor, tokens: int) -> Call:
    pool, staging, writers = memory.pool, memory.staging, case.writers
    requests = [(memory.pages[0][first:], offset) for first, _, offset in spans.tolist()]

    def all_requests() -> None:
        for pages, offset in requests:
            if side == "gather":
                gather(pool, pages, tokens, staging, offset_bytes=offset)
            else:
                scatter(pool, pages, tokens, staging, writers=writers, offset_bytes=offset)

    return all_requests
