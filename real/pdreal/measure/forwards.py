"""Times of prefill and decode forwards. Weights and cached KV are random, and pages are scattered.

Every prompt and every step has different tokens: if all tokens chose the same experts, only those experts would be
read. Ranks after the first are processes, which compute their parts of the first rank's forwards.
"""

import gc
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, count, pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from random import Random
from time import sleep
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from pdreal.control.tasks import DecodeBatch, DraftRows, PrefillBatch, PrefillInput, StateUse, Work, whole_tables
from pdreal.hosts.scratch_folder import ScratchFolder
from pdreal.measure.rows import Call, Row, once_us, repeat_each_us, row_of
from pdreal.memory.states import StatePool
from pdreal.model.draft import DraftHead
from pdreal.model.parallel import TensorParallel
from pdreal.model.transformer import Transformer
from pdreal.model.weights import RandomWeights
from pdreal.rank.drafting import Drafter
from pdreal.rank.graphs import batch_sizes
from pdreal.rank.runner import ModelRunner
from pdreal.settings.model import ModelConfig

_PATIENCE_S = 10
"""Maximum time in s that a process has to exit after it was told to."""
Instruction = Work | dict[str, Any] | None
"""Instruction to a rank: a forward to compute, or, as a dict, the sizes of a new ModelRunner. None: exit."""


@dataclass(frozen=True, kw_only=True)
class RankedModel:
    """A model on several ranks. On GPUs each rank has its own GPU. has_whole_experts: each rank holds whole experts
    instead of a part of every expert. sends_to_experts: ranks send tokens to the ranks of their experts.
    """

    config: ModelConfig
    dtype: torch.dtype
    device_type: str
    """cuda or cpu."""
    tp: int
    """Number of ranks."""
    has_whole_experts: bool
    sends_to_experts: bool

    def load(self, rank: int, rendezvous: str) -> Transformer:
        """Loads this rank's part of the model. Returns when all ranks are connected. rendezvous: address at which the
        ranks meet, such as file:///tmp/ranks.
        """
        device = torch.device("cuda", rank) if self.device_type == "cuda" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        experts = {"has_whole_experts": self.has_whole_experts, "sends_to_experts": self.sends_to_experts}
        ranks = TensorParallel.join(rank, self.tp, rendezvous, device, **experts)
        return Transformer.load(self.config, RandomWeights(0, device), dtype=self.dtype, device=device, tp=ranks)


class Followers:
    """The ranks of a model whose forwards are measured. This process computes the first rank's part of each forward,
    and tells the processes of the other ranks (the followers) to compute theirs.
    """

    def __init__(self, ranked: RankedModel) -> None:
        self._folder = ScratchFolder()
        rendezvous = f"file://{self._folder.path / 'ranks'}"
        self._processes, self._pipes = [], []
        context = get_context("spawn")
        for rank in range(1, ranked.tp):
            ours, theirs = context.Pipe()
            arguments = ranked, rank, rendezvous, torch.get_num_threads(), theirs
            process = context.Process(target=_follow, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self.model = ranked.load(0, rendezvous)
        """The first rank's part of the model."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._tell(None)
        if kind is None:
            gc.collect()  # graphs hold what ranks meet by
            self.model.tp.leave()
        for process in self._processes:
            process.join(_PATIENCE_S if kind is None else 0)
            process.kill()
        self._folder.cleanup()

    def runner(self, sizes: Mapping[str, Any]) -> ModelRunner:
        """Returns the first rank's runner. Its forwards run on all ranks. sizes: arguments of ModelRunner, but with
        `num_verified` (tokens of a request) in place of the drafter, and `num_states` (slots) in place of the states.
        """
        self._tell(dict(sizes))
        return _LedRunner(self.model, sizes, self._tell)

    def _tell(self, what: Instruction) -> None:
        for pipe in self._pipes:
            with suppress(BrokenPipeError):
                pipe.send(what)


class _LedRunner(ModelRunner):
    def __init__(self, model: Transformer, sizes: Mapping[str, Any], tell: Callable[[Instruction], None]) -> None:
        """sizes: sizes of cache and batches, as for `_arguments`. tell: sends an instruction to the other ranks."""
        super().__init__(model, **_arguments(model, sizes))
        self._tell = tell

    def prefill(self, batch: PrefillBatch, on_layers: Callable[[int], None] | None = None) -> list[int]:
        self._tell(batch)
        return super().prefill(batch, on_layers)

    def decode(self, batch: DecodeBatch) -> list[int]:
        self._tell(batch)
        return super().decode(batch)


def _arguments(model: Transformer, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of ModelRunner. `sizes` has these arguments, except for two objects of which it has only sizes,
    and which this function makes. num_verified: number of tokens of each request that a step verifies; makes the
    drafter (1: none). num_states: number of slots; makes the states, if the model has linear attention.
    """
    arguments = dict(sizes)
    num_verified = arguments.pop("num_verified", 1)
    if num_verified > 1:
        arguments["drafter"] = Drafter(DraftHead(model), num_verified, arguments["max_running_requests"])
    num_slots = arguments.pop("num_states", 0)
    if model.config.llama.delta is not None:
        shape = {"num_slots": num_slots, "dtype": model.dtype, "state_dtype": torch.float32, "device": model.device}
        arguments["states"] = StatePool(model.config, model.tp.size, **shape)
    return arguments


def _follow(ranked: RankedModel, rank: int, rendezvous: str, num_threads: int, pipe: Connection) -> None:
    """Computes this rank's part of the forwards that the first rank sends, until the first rank sends None or is gone.
    rendezvous: address at which the ranks meet. num_threads: number of torch's CPU threads. pipe: brings the first
    rank's Instructions.
    """
    torch.set_num_threads(num_threads)
    model = ranked.load(rank, rendezvous)
    runner: ModelRunner | None = None
    with suppress(EOFError, KeyboardInterrupt):
        while (message := pipe.recv()) is not None:
            if isinstance(message, dict):
                runner = ModelRunner(model, **_arguments(model, message))
                with torch.inference_mode():
                    runner.kv.memory.normal_()
            elif runner is not None:
                runner.run(message)
    del runner  # its graphs hold what ranks meet by
    model.tp.leave()


_WARM_UPS = 2
_PAUSE_SECONDS = 0.12
"""Pause in s in which a GPU's clock recovers. The clock depends on the mean load over about the last 0.1 s (GpuClock in
pdsim/cost/affine.py).
"""
_AROUND = [num_more for distance in range(32) for num_more in (-distance, distance + 1)]
"""Differences in tokens between the length of a repeat and the length of its case, so that repeats have different
lengths. The list has an entry for every warm-up and every repeat that may be made."""
_BURSTS = 3
_BURST_SECONDS = 2.0
_SHARE_OF_MEMORY = 0.75
"""Fraction of the free memory, after weights are loaded, that KV may take. The rest is for activations and CUDA
graphs."""


class PrefillCase(NamedTuple):
    """A forward of equally long prompts. num_tokens: number of tokens of each prompt that the forward computes.
    num_context_tokens: number of earlier tokens of each prompt, whose KV is cached.
    """

    num_prompts: int
    """Number of prompts of the forward."""
    num_tokens: int
    num_context_tokens: int = 0

    def __str__(self) -> str:
        context = f" behind {self.num_context_tokens:,} cached" if self.num_context_tokens else ""
        return f"prefill, {self.num_prompts} prompts of {self.num_tokens:,} tokens{context}"

    @property
    def num_kv_tokens(self) -> int:
        """Number of tokens of one prompt with its context, in the longest forward of this case. Forwards differ in
        length by the numbers in _AROUND.
        """
        return self.num_context_tokens + self.num_tokens + max(_AROUND)


class DecodeCase(NamedTuple):
    """A decode step of equally long sequences. The last sequence may have another length."""

    batch_size: int
    """Number of sequences in the step."""
    num_context_tokens: int
    """Number of tokens of each sequence that have KV before the step. The last may have num_longest_tokens instead."""
    num_longest_tokens: int | None = None
    """Number of context tokens of the last sequence, if it is longer than all other sequences. None: all sequences are
    equally long."""

    def __str__(self) -> str:
        longest = "" if self.num_longest_tokens is None else f", the last of {self.num_longest_tokens:,}"
        return f"decode, {self.batch_size} contexts of {self.num_context_tokens:,} tokens{longest}"

    @property
    def contexts(self) -> tuple[int, ...]:
        """Number of tokens of each sequence before the step."""
        last = self.num_context_tokens if self.num_longest_tokens is None else self.num_longest_tokens
        return (*(self.num_context_tokens,) * (self.batch_size - 1), last)

    @property
    def num_kv_tokens(self) -> int:
        """Number of tokens with KV of the longest sequence after a step without drafts."""
        return max(self.contexts) + 1


class SustainedCase(PrefillCase):
    """A prefill forward that is repeated for _BURST_SECONDS s without a pause, to measure how the GPU's clock falls."""


Case = PrefillCase | DecodeCase


class ForwardBench:
    def __init__(self, runner: ModelRunner, seconds: float, num_verified: int = 1) -> None:
        """seconds: time in s for each row, except of a SustainedCase. At least three repeats are made.

        num_verified: number of tokens of each request that a decode step verifies. 1: the runner has no drafter.
        """
        self._runner = runner
        self._num_verified = num_verified
        self._seconds = seconds
        self._num_tokens = 0
        """Number of input tokens that were made for prompts and steps so far."""
        self._pages = Random(0).sample(range(1, runner.kv.num_pages + 1), runner.kv.num_pages)
        with torch.inference_mode():
            runner.kv.memory.normal_()

    def measure(self, case: Case) -> Iterator[Row]:
        match case:
            case SustainedCase():
                yield from self.sustained(case)
            case PrefillCase():
                yield self.prefill(case)
            case DecodeCase():
                yield self.decode(case)

    def prefill(self, case: PrefillCase) -> Row:
        """Measures a prefill forward, and returns its row. On a GPU, the bench waits _PAUSE_SECONDS s before each
        repeat, so that the clock recovers.

        Repeats have slightly different lengths, because libraries spend time on the first use of each length.
        """
        pause_seconds = _PAUSE_SECONDS if self._runner.model.device.type == "cuda" else 0.0
        forwards = (self.prefilling(case, num_more) for num_more in _AROUND)
        graphs = " ".join(map(str, self._runner.prefill_graph_sizes)) or None
        return row_of("prefill", self._times_us(forwards, pause_seconds), prefill_graphs=graphs, **_sizes(case))

    def sustained(self, case: PrefillCase) -> Iterator[Row]:
        """Measures bursts of forwards. Yields one row per forward of a burst: the median time over several bursts. Each
        burst begins on a rested GPU.
        """
        forward = self.prefilling(case)
        forward()
        bursts = [self._burst_us(forward) for _ in range(_BURSTS)]
        busy_us = 0.0
        for times_us in zip(*bursts, strict=False):
            row = row_of("clock", sorted(times_us), busy_us=busy_us, **_sizes(case))
            yield row
            busy_us += row.time_us

    def _burst_us(self, forward: Callable[[], Sequence[int]]) -> list[float]:
        sleep(_PAUSE_SECONDS)
        times_us: list[float] = []
        while sum(times_us) < 1e6 * _BURST_SECONDS:
            times_us.append(once_us(forward))
        return times_us

    def prefilling(self, case: PrefillCase, num_more: int = 0) -> Callable[[], Sequence[int]]:
        num_prompts, num_tokens, num_context_tokens = case
        tables = self._page_tables([case.num_kv_tokens] * num_prompts)
        inputs = [
            PrefillInput(
                i, self._tokens(max(1, num_tokens + num_more)), num_context_tokens, table, state=self._state_use(i)
            )
            for i, table in enumerate(tables)
        ]
        return partial(self._runner.prefill, PrefillBatch(tuple(inputs)))

    def _state_use(self, prompt: int) -> StateUse | None:
        """Returns the state slots of a prompt, which continues from a state of zeros even if it has a context. prompt:
        its index in the batch. None: the model has no states.
        """
        return None if self._runner.states is None else StateUse(0, prompt + 1)

    def decode(self, case: DecodeCase) -> Row:
        graph = graph_of(case.batch_size, self._runner.model.device)
        steps = (self._decoding(case, is_first=i == 0) for i in count())
        verified = self._num_verified if self._num_verified > 1 else None
        return row_of("decode", self._times_us(steps), graph=graph, verified=verified, **_sizes(case))

    def _decoding(self, case: DecodeCase, *, is_first: bool) -> Callable[[], Sequence[int]]:
        """Returns a function that computes one decode step of the case and returns its tokens. is_first: the step is
        the first one of a batch, and sets the page tables. Later steps keep the page tables, as in a run.
        """
        num_new, size = self._num_verified, case.batch_size
        tables = self._page_tables([context + num_new for context in case.contexts]) if is_first else []
        states = () if self._runner.states is None else tuple((row + 1, 0) for row in range(size))
        batch = DecodeBatch(tuple(self._tokens(size)), case.contexts, whole_tables(tables), states=states)
        if num_new > 1:
            batch = batch._replace(drafts=DraftRows(tuple(range(1, size + 1)), (1,) * size, ((),) * size, ()))
        return partial(self._runner.decode, batch)

    def _times_us(self, forwards: Iterator[Call], pause_seconds: float = 0) -> list[float]:
        return repeat_each_us(forwards, self._seconds, warm_ups=_WARM_UPS, pause_seconds=pause_seconds)

    def _tokens(self, num_tokens: int) -> Sequence[int]:
        vocab_size = self._runner.model.config.vocab_size
        first = self._num_tokens
        self._num_tokens += num_tokens
        return array("i", (i * 7919 % vocab_size for i in range(first, first + num_tokens)))

    def _page_tables(self, lengths: Sequence[int]) -> list[Sequence[int]]:
        """Returns a page table for each length, in tokens. Pages are scattered, and no page is in two tables."""
        ends = accumulate((-(-length // self._runner.kv.page_size) for length in lengths), initial=0)
        return [array("i", self._pages[first:end]) for first, end in pairwise(ends)]


def forward_rows(
    model: Transformer,
    page_size: int,
    cases: Sequence[Case],
    seconds: float,
    left_out: Callable[[str], None],
    followers: Followers | None = None,
    num_verified: int = 1,
) -> Iterator[Row]:
    """Yields rows of all cases that fit the model and this machine's memory. left_out: called with a text for each case
    that does not fit.

    Decode steps come first, while the cached KV is random. Prefill forwards overwrite cached KV with that of their
    prompts, and such KV makes most tokens choose the same experts (experiments/moe-h200).

    page_size: number of tokens of a page. seconds: time for each row. followers: the other ranks. None: there is one
    rank.

    num_verified: number of tokens of each request that decode steps verify, with an EAGLE head that also computes
    prompts. 1: there are no drafts.
    """
    cases = sorted(cases, key=lambda case: not isinstance(case, DecodeCase))
    if possible := _possible(model, page_size, cases, left_out, num_verified):
        bench = _bench(model, page_size, possible, seconds, followers, num_verified)
        for case in possible:
            yield from bench.measure(case)


def _possible(
    model: Transformer, page_size: int, cases: Sequence[Case], left_out: Callable[[str], None], num_verified: int
) -> list[Case]:
    num_layers = model.config.num_layers + (num_verified > 1)
    of_rank = replace(model.config, num_layers=num_layers, num_kv_heads=model.num_kv_heads)
    num_sharing = 1 if model.device.type == "cuda" else model.tp.size  # ranks on a CPU share the host's memory
    page_bytes = num_sharing * kv_page_bytes(of_rank, model.dtype, page_size)
    most_pages = int(_SHARE_OF_MEMORY * free_bytes(model.device)) // page_bytes
    possible = []
    for case in cases:
        if reason := _reason_against(case, model.config, _num_pages(case, page_size, num_verified), most_pages):
            left_out(f"{case}: {reason}")
        else:
            possible.append(case)
    return possible


def _bench(
    model: Transformer,
    page_size: int,
    cases: Sequence[Case],
    seconds: float,
    followers: Followers | None = None,
    num_verified: int = 1,
) -> ForwardBench:
    """Returns a bench whose runner has room for the largest case. seconds: time for each row. followers: the other
    ranks; None: there is one rank. num_verified: number of tokens of each request that decode steps verify; 1: there
    are no drafts.
    """
    sizes: dict[str, Any] = {
        "num_pages": max(_num_pages(case, page_size, num_verified) for case in cases),
        "page_size": page_size,
        "max_running_requests": max((case.batch_size for case in cases if isinstance(case, DecodeCase)), default=0),
        "prefills": not all(isinstance(case, DecodeCase) for case in cases),
        "num_verified": num_verified,
        "num_states": max(case.batch_size if isinstance(case, DecodeCase) else case.num_prompts for case in cases),
    }
    runner = ModelRunner(model, **_arguments(model, sizes)) if followers is None else followers.runner(sizes)
    return ForwardBench(runner, seconds, num_verified)


def _num_pages(case: Case, page_size: int, num_verified: int) -> int:
    if isinstance(case, DecodeCase):
        return sum(-(-(context + num_verified) // page_size) for context in case.contexts)
    return case.num_prompts * -(-case.num_kv_tokens // page_size)


def _sizes(case: PrefillCase | DecodeCase) -> dict[str, float]:
    """Returns fields of the row of a case: prompts or batch, new_tokens (only for prefill), and context_tokens."""
    if isinstance(case, DecodeCase):
        return {"batch": case.batch_size, "context_tokens": sum(case.contexts)}
    return {
        "prompts": case.num_prompts,
        "new_tokens": case.num_prompts * case.num_tokens,
        "context_tokens": case.num_prompts * case.num_context_tokens,
    }


def graph_of(batch_size: int, device: torch.device) -> int | None:
    """Returns the size of the CUDA graph that runs a decode batch, in requests. None: the device has no graphs."""
    return batch_sizes(batch_size)[-1] if device.type == "cuda" else None


def _reason_against(case: Case, config: ModelConfig, num_pages: int, most_pages: int) -> str | None:
    if case.num_kv_tokens > config.max_context_tokens:
        return f"{config.name} has room for {config.max_context_tokens} tokens"
    return f"{num_pages} pages, and memory has room for {most_pages}" if num_pages > most_pages else None


def kv_page_bytes(config: ModelConfig, dtype: torch.dtype, page_size: int) -> int:
    """Returns the bytes of a page over all layers and heads."""
    num_planes = config.planes_per_layer * config.num_kv_layers
    return num_planes * page_size * config.num_kv_heads * config.head_dim * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
