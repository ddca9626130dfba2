"""CUDA graphs for decode steps and short prefill forwards. A graph launches all kernels of a forward at once. Without a
graph, the host takes longer to launch the kernels of a short forward than the GPU takes to run them.

Graphs of decode steps differ in the number of sequences, graphs of prefill forwards in the number of tokens. A batch
runs in the smallest graph that holds it. The graph's other rows and tokens belong to no request, and their KV goes to
the scratch page. All graphs of decode steps read the same input tensors, and so do all graphs of prefill forwards.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pdreal.control.tasks import DecodeBatch, PrefillBatch
from pdreal.memory.paged_kv import SCRATCH_PAGE, PagedKv
from pdreal.memory.states import StatePool
from pdreal.model.attention import KernelDecode
from pdreal.model.delta import DeltaDecode, KernelPrefill, Recurrence, chunks_of, no_states
from pdreal.model.transformer import Attend, Transformer
from pdreal.model.weights import LatentHeads
from pdreal.rank.drafting import Drafter, followers_of
from pdreal.transports.streams import begin_to_host, to_host

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pdkernels.delta import Chunks


class _Graphs:
    """Forwards over one KV cache, as CUDA graphs. On a CPU the forwards run without capture, so that Triton's
    interpreter can test them.
    """

    def __init__(self, model: Transformer, kv: PagedKv, num_inputs: int, *, records_experts: bool) -> None:
        """num_inputs: largest number of integers (int32) of a forward's inputs together: token ids, positions, page
        tables. This is the size of the buffers through which inputs reach the GPU. records_experts: True: `choices`
        gets the experts that tokens choose.
        """
        self.choices: list[Tensor] = []
        """Experts that the last forward's tokens chose: [tokens, active] for each layer with experts."""
        self._records_experts = records_experts
        self._model = model
        self._kv = kv
        self._host = torch.zeros(num_inputs, dtype=torch.int32, pin_memory=model.device.type == "cuda")
        self._device = torch.zeros_like(self._host, device=model.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._hidden: dict[int, Tensor] = {}
        """Hidden states where each graph leaves them, by the graph's size in tokens or sequences."""
        self._choices: dict[int, list[Tensor]] = {}
        """Chosen experts of each layer where each graph leaves them, by the graph's size."""

    def _run(self, size: int, num_tokens: int) -> None:
        if graph := self._graphs.get(size):
            graph.replay()
        else:
            self._forward(size)
        self.choices = [chosen[:num_tokens] for chosen in self._choices.get(size, ())]

    def _forward(self, size: int) -> None:
        raise NotImplementedError

    def _compute(
        self, size: int, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> None:
        self._model.choices = [] if self._records_experts else None
        self._hidden[size] = self._model.hidden(tokens, positions, attend, rows)
        if self._model.choices is not None:
            self._choices[size] = self._model.choices
            self._model.choices = None  # what others compute is theirs

    def _capture(self, sizes: Sequence[int]) -> None:
        """Captures a CUDA graph for each size, the largest first, so that smaller graphs share its memory. sizes:
        numbers of tokens or rows, in ascending order.
        """
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        for size in reversed(sizes):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._forward(size)  # compiles kernels, and lets libraries set themselves up
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._forward(size)
            graph.replay()  # the first time it is uploaded; its inputs are zeros: tokens of nobody, on the scratch page
            self._graphs[size] = graph


def batch_sizes(largest: int) -> list[int]:
    """Returns sizes 1, 2, 4, ... up to 64, then multiples of 64, until a size is at least `largest`."""
    sizes = [1]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] + min(sizes[-1], 64))
    return sizes


class _StepInputs(NamedTuple):
    """Inputs of a decode step, as views of one array of int32 on the host or on the device."""

    columns: Tensor
    """Inputs of each sequence, [kinds of input, largest batch]: its last token, the number of KV tokens before that
    token, the two slots of linear-attention states if the model has any, and further inputs of steps that verify
    drafts."""
    page_tables: Tensor
    """Page ids of each sequence: [largest batch, most pages of a sequence]."""

    @classmethod
    def of(cls, array: Tensor, num_columns: int, largest: int) -> "_StepInputs":
        num_small = num_columns * largest
        return cls(array[:num_small].view(num_columns, largest), array[num_small:].view(largest, -1))


class LaunchedStep(NamedTuple):
    """A step that runs on the GPU. Its tokens can be read when `done` has happened."""

    tokens: Tensor
    """The next tokens on the host, one per sequence of the batch; if the step verifies drafts: the integers of
    Drafter.step."""
    done: torch.cuda.Event


class DecodeGraphs(_Graphs):
    """CUDA graphs of decode steps. A step uploads the inputs of all sequences, but page tables only if some changed."""

    def __init__(
        self,
        model: Transformer,
        kv: PagedKv,
        max_running_requests: int,
        *,
        records_experts: bool = False,
        num_columns: int = 2,
        num_ahead_tokens: int = 1,
        states: StatePool | None = None,
    ) -> None:
        """num_columns: number of integers that a step uploads for each sequence. The sequence's page table and the
        slots of its linear-attention state are not counted.

        num_ahead_tokens: number of tokens, after those with KV, for which a sequence may have pages.
        max_running_requests: largest number of sequences of a batch. records_experts: True: `choices` gets the experts
        that tokens choose. states: linear-attention states; None: the model has none.
        """
        self._states = states
        num_columns += 0 if states is None else 2
        self.hidden = torch.empty(0)
        """Hidden states of the last step's tokens, [sequences, hidden], from which logits are made. If the step
        verified drafts: integers of Drafter.step."""
        self._sizes = batch_sizes(max_running_requests)
        self._largest = self._sizes[-1]
        num_pages = min(kv.num_pages, -(-(model.config.max_context_tokens + num_ahead_tokens) // kv.page_size))
        super().__init__(model, kv, self._largest * (num_columns + num_pages), records_experts=records_experts)
        self._host_inputs, self._device_inputs = (
            _StepInputs.of(array, num_columns, self._largest) for array in (self._host, self._device)
        )
        self._on_host = tuple(part.numpy() for part in self._host_inputs)
        self._num_scratch = -(-num_ahead_tokens // kv.page_size)
        """Number of first entries of a page table that must be the scratch page if no sequence uses the table."""
        self._num_used = 0
        """Number of sequences in the last batch. Page tables behind theirs begin with the scratch page."""
        self._best: dict[int, Tensor] = {}
        """Likeliest next tokens where each graph leaves them on the device, by the graph's size. If graphs verify
        drafts: integers of Drafter.step."""
        if model.device.type == "cuda":
            self._capture(self._sizes)

    def decode(self, batch: DecodeBatch) -> list[int]:
        """Computes a step. Returns the likeliest next token of each sequence, in the order of the batch. If the step
        verifies drafts: integers of Drafter.step.
        """
        return to_host(self._launch(batch)).tolist()

    def launch(self, batch: DecodeBatch) -> LaunchedStep:
        """Begins a decode step on a GPU, and returns at once."""
        return LaunchedStep(*begin_to_host(self._launch(batch)))

    def _launch(self, batch: DecodeBatch) -> Tensor:
        num_requests = len(batch.tokens)
        size = next(size for size in self._sizes if size >= num_requests)
        self._upload(batch, size)
        self._run(size, num_requests)
        self.hidden = self._hidden[size][:num_requests]
        return self._best[size][:num_requests]

    def _upload(self, batch: DecodeBatch, size: int) -> None:
        """Copies a step's inputs to the device: what `_columns` returns, and the page tables from the first changed one
        to the last. The inputs may be overwritten because the step before has ended.
        """
        columns, _ = self._on_host
        num_requests = len(batch.tokens)
        for column, values in zip(columns, self._columns(batch), strict=True):
            column[:num_requests] = values
            column[num_requests:size] = 0
        num_small = columns.size
        self._device[:num_small].copy_(self._host[:num_small], non_blocking=True)
        if rows := self._change_tables(batch):
            changed = slice(min(rows), max(rows) + 1)
            self._device_inputs.page_tables[changed].copy_(self._host_inputs.page_tables[changed], non_blocking=True)

    def _columns(self, batch: DecodeBatch) -> Sequence[Sequence[int]]:
        """Returns what _StepInputs.columns gets for this batch: a list for each kind of input (last tokens, numbers of
        KV tokens, and slots of linear-attention states if the model has any). Each list has one integer per sequence of
        the batch.
        """
        return batch.tokens, batch.num_kv_tokens, *zip(*batch.states, strict=True)

    def _change_tables(self, batch: DecodeBatch) -> list[int]:
        """Writes the batch's changes into the page tables in host memory. Rows that no request uses any more get
        scratch pages. Returns the indices of the changed page tables.
        """
        *_, page_tables = self._on_host
        for row, start, pages in batch.changes:
            page_tables[row, start : start + len(pages)] = pages
        num_requests = len(batch.tokens)
        left = range(num_requests, self._num_used)
        page_tables[left.start : left.stop, : self._num_scratch] = SCRATCH_PAGE
        self._num_used = num_requests
        return [*left, *(change.row for change in batch.changes)]

    def _forward(self, size: int) -> None:
        tokens, positions, *slots = self._device_inputs.columns[:, :size].unbind()
        page_tables = self._device_inputs.page_tables[:size]
        delta = None if self._states is None else DeltaDecode(self._states, *slots)
        attend = KernelDecode(self._kv, self._model, positions, page_tables, delta=delta)
        self._compute(size, tokens, positions, attend)
        self._best[size] = self._model.best_tokens(self._model.logits_of(self._hidden[size]))


SIZES = *range(32, 512, 32), *range(512, 1024, 64), *range(1024, 2049, 128)
"""Sizes in tokens of the CUDA graphs for prefill forwards. Longer forwards need no graph, because the GPU computes
longer than the host needs for their launches.
"""
_MOST_SEQUENCES = 64
_MOST_WITH_STATES = 16
"""Maximum number of sequences in a graph's forward if the model has linear-attention states. The maximum is low because
a graph has programs for the chunks of this many sequences, even if a forward has fewer.
"""


class _ForwardInputs(NamedTuple):
    """Inputs of a prefill forward, as views of one array of int32 on the host or on the device."""

    tokens: Tensor
    """[most tokens]: input tokens."""
    positions: Tensor
    """[most tokens]: position of each token in its sequence."""
    slots: Tensor
    """[most tokens]: slot in the KV cache that gets the KV of each token (page * page_size + offset)."""
    last: Tensor
    """[most sequences]: index, in `tokens`, of the last token of each sequence."""
    num_tiles: Tensor
    """[1]: number of attention tiles."""
    tiles: Tensor
    """[most tiles, 4]: attention tiles; the columns are the fields of pdkernels.attention.paged_prefill.Tile."""
    pages: Tensor
    """Pages of all sequences: the first sequence's pages, then the second sequence's pages, and so on."""

    @classmethod
    def of(cls, array: Tensor, sizes: list[int]) -> "_ForwardInputs":
        tokens, positions, slots, last, num_tiles, tiles, pages = array.split(sizes)
        return cls(tokens, positions, slots, last, num_tiles, tiles.view(-1, 4), pages)


class _ChunkInputs:
    """Inputs of linear attention on the device. Their shapes depend only on the size of a CUDA graph, so that each
    replay of the graph can use them.
    """

    def __init__(self, device: torch.device) -> None:
        from pdkernels.delta import CHUNK_TOKENS  # noqa: PLC0415  Triton is needed on GPUs only

        self._chunk_tokens = CHUNK_TOKENS
        most = _MOST_WITH_STATES + 1  # with padding
        largest = SIZES[-1]
        self._lengths = [largest, most + 1, most, most + 1, 3 * self._num_chunks(largest), 3 * 2 * most]
        self._host = torch.zeros(sum(self._lengths), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros_like(self._host, device=device)

    def _num_chunks(self, size: int) -> int:
        """Maximum number of linear-attention chunks in a graph of `size` tokens. Two chunks of a sequence may be not
        full: the last one, and the one that ends at the tracked state (StateUse.tracked).
        """
        return size // self._chunk_tokens + 2 * (_MOST_WITH_STATES + 1)

    def upload(self, batch: PrefillBatch, num_padding: int) -> None:
        chunks = chunks_of(batch, self._host.device, num_padding=num_padding)
        self._host.zero_()
        for place, part in zip(self._host.split(self._lengths), chunks, strict=True):
            place[: part.numel()] = part.flatten()
        self._device.copy_(self._host, non_blocking=True)

    def of(self, size: int) -> "Chunks":
        """Returns the inputs of the graph for `size` tokens. Sequences and chunks that the last upload did not fill
        have no tokens.
        """
        from pdkernels.delta import Chunks  # noqa: PLC0415

        sequences, begins, sources, firsts, ranges, writes = self._device.split(self._lengths)
        ranges = ranges.view(-1, 3)[: self._num_chunks(size)]
        return Chunks(sequences[:size], begins, sources, firsts, ranges, writes.view(-1, 3))


class PrefillGraphs(_Graphs):
    """CUDA graphs of short prefill forwards, one for each size in tokens."""

    def __init__(
        self,
        model: Transformer,
        kv: PagedKv,
        *,
        records_experts: bool = False,
        drafter: Drafter | None = None,
        states: StatePool | None = None,
    ) -> None:
        """model, kv: the model and its paged KV, for which graphs are captured. records_experts: True: `choices` gets
        the experts that tokens choose. drafter: runs the draft head on each forward's tokens, after the graph and
        outside any graph; None: no drafts. states: linear-attention states; None: the model has none.
        """
        from pdkernels.attention.paged_prefill import TILE_TOKENS  # noqa: PLC0415  Triton is needed on GPUs only

        self._states = states
        self._chunks = None if states is None else _ChunkInputs(model.device)
        self._most_pages = kv.num_pages + _MOST_SEQUENCES
        largest = SIZES[-1]
        most_tiles = 1 + largest // TILE_TOKENS + _MOST_SEQUENCES
        sizes = [largest, largest, largest, _MOST_SEQUENCES, 1, 4 * most_tiles, self._most_pages]
        self._num_small = sum(sizes[:-1])
        self._drafter = drafter
        super().__init__(model, kv, sum(sizes), records_experts=records_experts)
        self._on_device = _ForwardInputs.of(self._device, sizes)
        self._on_host = [part.numpy() for part in _ForwardInputs.of(self._host, sizes)]
        if model.device.type == "cuda":
            self._capture(SIZES)

    def hold(self, batch: PrefillBatch) -> bool:
        chunks = batch.chunks
        return (
            sum(len(chunk.tokens) for chunk in chunks) <= SIZES[-1]
            and len(chunks) <= (_MOST_SEQUENCES if self._states is None else _MOST_WITH_STATES)
            and sum(map(self._num_pages, (chunk.num_kv_tokens for chunk in chunks))) <= self._most_pages
        )

    def hidden(self, batch: PrefillBatch) -> Tensor:
        """Computes a forward. Returns hidden states of each chunk's last token. A later forward may overwrite them."""
        num_tokens = sum(len(chunk.tokens) for chunk in batch.chunks)
        size = next(size for size in SIZES if size >= num_tokens)
        self._upload(batch, size)
        self._run(size, num_tokens)
        if self._drafter is None:
            return self._hidden[size][: len(batch.chunks)]
        return self._hidden[size].index_select(0, self._on_device.last[: len(batch.chunks)])

    def draft(self, batch: PrefillBatch, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Computes the draft head's KV for the batch that `hidden` has just computed. Returns the head's first
        proposals, and the hidden states from which they are made. chosen: the token that the target chose after each
        chunk.
        """
        assert self._drafter is not None
        followers = followers_of(batch, chosen)
        size = next(size for size in SIZES if size >= len(followers))
        tokens = torch.tensor([*followers, *[0] * (size - len(followers))], device=self._device.device)
        given = self._on_device
        attend = PagedAttention(self._kv, given.slots[:size], given.tiles, given.num_tiles, given.pages)
        last = given.last[: len(batch.chunks)]
        return self._drafter.prefill(tokens, self._hidden[size], given.positions[:size], attend, last)

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._kv.page_size)

    def _upload(self, batch: PrefillBatch, size: int) -> None:
        """Uploads the inputs of a forward over the inputs of the forward before, which has ended."""
        from pdkernels.attention.paged_prefill import prefill_tiles  # noqa: PLC0415

        tokens, positions, slots, last, num_tiles, tiles, pages = self._on_host
        row = page = 0
        for chunk in batch.chunks:
            end, num_pages = row + len(chunk.tokens), self._num_pages(chunk.num_kv_tokens)
            table = pages[page : page + num_pages]
            table[:] = chunk.page_table[:num_pages]
            tokens[row:end] = chunk.tokens
            positions[row:end] = np.arange(chunk.num_context_tokens, chunk.num_kv_tokens, dtype=np.int32)
            slots[row:end] = self._slots(table, positions[row:end])
            row, page = end, page + num_pages
        for part in (tokens, positions, slots):
            part[row:size] = 0  # slot 0 is on the scratch page
        num_new = [len(chunk.tokens) for chunk in batch.chunks]
        last[: len(num_new)] = [end - 1 for end in accumulate(num_new)]
        last[len(num_new) :] = 0
        lengths = [chunk.num_kv_tokens for chunk in batch.chunks]
        contexts = [chunk.num_context_tokens for chunk in batch.chunks]
        cut = prefill_tiles(num_new, contexts, map(self._num_pages, lengths), size)
        num_tiles[0] = len(cut)
        tiles[: len(cut)] = cut
        used = self._num_small + page
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        if self._chunks is not None:
            self._chunks.upload(batch, size - row)

    def _slots(self, table: "NDArray[np.int32]", positions: "NDArray[np.int32]") -> "NDArray[np.int32]":
        slots: NDArray[np.int32] = table[positions // self._kv.page_size] * self._kv.page_size
        return slots + positions % self._kv.page_size

    def _forward(self, size: int) -> None:
        given = self._on_device
        attend = PagedAttention(self._kv, given.slots[:size], given.tiles, given.num_tiles, given.pages)
        if self._states is not None and self._chunks is not None:
            attend.delta = KernelPrefill(self._states, self._chunks.of(size))
        rows = given.last if self._drafter is None else None
        self._compute(size, given.tokens[:size], given.positions[:size], attend, rows)


class PagedAttention:
    """Attention of chunks of several sequences over their pages. The number and lengths of chunks are read on the
    device.
    """

    def __init__(self, kv: PagedKv, slots: Tensor, tiles: Tensor, num_tiles: Tensor, pages: Tensor) -> None:
        """slots: where the KV of each new token goes, [tokens]. tiles, num_tiles, pages: as for pdkernels'
        paged_prefill.
        """
        self.delta: Recurrence = no_states
        self._kv = kv
        self._slots = slots
        self._lists = tiles, num_tiles, pages

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int = 0) -> Tensor:
        from pdkernels.attention.paged_prefill import paged_prefill  # noqa: PLC0415

        self._kv.append(layer, self._slots, key, value)
        keys, values = self._kv.layer(layer)
        tiles, num_tiles, pages = self._lists
        sight = {"page_size": self._kv.page_size, "window": window}
        attended: Tensor = paged_prefill(query, keys, values, tiles, num_tiles, pages, **sight)
        return attended

    def latent(self, layer: int, query: Tensor, latent: Tensor, heads: LatentHeads) -> Tensor:
        raise NotImplementedError(
            "keys and values of contexts are expanded from latents, whose number graphs do not know"
        )


def has_prefill_graphs(model: Transformer) -> bool:
    """True if the model's prefill forwards can be captured as CUDA graphs. Models with latent KV cannot, nor models for
    whose head_dim there is no kernel.
    """
    from pdkernels.attention.paged_prefill import can_page  # noqa: PLC0415

    return model.config.latent is None and can_page(model.config.head_dim)
