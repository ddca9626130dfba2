"""Short prefill forwards as CUDA graphs: one per number of tokens, all over the same inputs, which a forward uploads.

Launched one by one, the kernels of a short forward take the host longer than the GPU. A batch runs in the smallest
graph that holds it. Tokens that it leaves over are of nobody, and their KV goes to the scratch page.
"""

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pdreal.model.latent import LatentHeads
from pdreal.model.transformer import Transformer
from pdreal.paged_kv import PagedKv
from pdreal.tasks import PrefillBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

SIZES = *range(32, 512, 32), *range(512, 1024, 64), *range(1024, 2049, 128)
"""Tokens of each graph. Beyond the last, the GPU takes longer than any host to launch."""
_MOST_SEQUENCES = 64


class _Inputs(NamedTuple):
    """Views of one array of int32, on the host or on the device."""

    tokens: Tensor
    """[most tokens]"""
    positions: Tensor
    """[most tokens], each in its sequence."""
    slots: Tensor
    """[most tokens]: where their KV goes."""
    last: Tensor
    """[most sequences]: the last token of each."""
    num_tiles: Tensor
    """[1]"""
    tiles: Tensor
    """[most tiles, 4], of attention."""
    pages: Tensor
    """Pages of all sequences, one list behind another."""

    @classmethod
    def of(cls, array: Tensor, sizes: list[int]) -> "_Inputs":
        tokens, positions, slots, last, num_tiles, tiles, pages = array.split(sizes)
        return cls(tokens, positions, slots, last, num_tiles, tiles.view(-1, 4), pages)


class PrefillGraphs:
    """Graphs over one cache. On a CPU forwards are not captured but run: so Triton's interpreter can test them."""

    def __init__(self, model: Transformer, kv: PagedKv, *, records_experts: bool = False) -> None:
        from pdkernels.paged_prefill import TILE_TOKENS  # noqa: PLC0415  Triton is needed on GPUs only

        self.choices: list[Tensor] = []
        """Experts of each layer that the last forward's tokens chose, if they are recorded."""
        self._records_experts = records_experts
        self._model = model
        self._kv = kv
        self._most_pages = kv.num_pages + _MOST_SEQUENCES
        largest = SIZES[-1]
        most_tiles = 1 + largest // TILE_TOKENS + _MOST_SEQUENCES
        sizes = [largest, largest, largest, _MOST_SEQUENCES, 1, 4 * most_tiles, self._most_pages]
        self._num_small = sum(sizes[:-1])
        is_cuda = model.device.type == "cuda"
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=is_cuda)
        self._device = torch.zeros_like(self._host, device=model.device)
        self._on_device = _Inputs.of(self._device, sizes)
        self._on_host = [part.numpy() for part in _Inputs.of(self._host, sizes)]
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._hidden: dict[int, Tensor] = {}
        """Hidden states, where each graph leaves them."""
        self._choices: dict[int, list[Tensor]] = {}
        if is_cuda:
            self._capture()

    def hold(self, batch: PrefillBatch) -> bool:
        chunks = batch.chunks
        return (
            sum(len(chunk.tokens) for chunk in chunks) <= SIZES[-1]
            and len(chunks) <= _MOST_SEQUENCES
            and sum(map(self._num_pages, (chunk.num_kv_tokens for chunk in chunks))) <= self._most_pages
        )

    def hidden(self, batch: PrefillBatch) -> Tensor:
        """Hidden states of each sequence's last token. They overwrite those of the forward before."""
        num_tokens = sum(len(chunk.tokens) for chunk in batch.chunks)
        size = next(size for size in SIZES if size >= num_tokens)
        self._upload(batch, size)
        if graph := self._graphs.get(size):
            graph.replay()
        else:
            self._forward(size)
        self.choices = [chosen[:num_tokens] for chosen in self._choices.get(size, ())]
        return self._hidden[size][: len(batch.chunks)]

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._kv.page_size)

    def _upload(self, batch: PrefillBatch, size: int) -> None:
        """The forward before has ended: its tokens were read."""
        from pdkernels.paged_prefill import prefill_tiles  # noqa: PLC0415

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

    def _slots(self, table: "NDArray[np.int32]", positions: "NDArray[np.int32]") -> "NDArray[np.int32]":
        slots: NDArray[np.int32] = table[positions // self._kv.page_size] * self._kv.page_size
        return slots + positions % self._kv.page_size

    def _forward(self, size: int) -> None:
        given = self._on_device
        positions = given.positions[:size]
        attend = _PagedAttention(self._kv, given, size)
        self._model.choices = [] if self._records_experts else None
        self._hidden[size] = self._model.hidden(given.tokens[:size], positions, attend, given.last)
        if self._model.choices is not None:
            self._choices[size] = self._model.choices
            self._model.choices = None  # what others compute is theirs

    def _capture(self) -> None:
        """Largest first: the others find its memory in the pool."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        for size in reversed(SIZES):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._forward(size)  # compiles kernels, and lets libraries set themselves up
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._forward(size)
            graph.replay()  # the first time it is uploaded; its inputs are zeros: tokens of nobody, on the scratch page
            self._graphs[size] = graph


class _PagedAttention:
    """Chunks of several sequences over their pages. What there is of them is read on the device."""

    def __init__(self, kv: PagedKv, given: _Inputs, size: int) -> None:
        self._kv = kv
        self._slots = given.slots[:size]
        self._lists = given.tiles, given.num_tiles, given.pages

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        from pdkernels.paged_prefill import paged_prefill  # noqa: PLC0415

        self._kv.append(layer, self._slots, key, value)
        keys, values = self._kv.layer(layer)
        tiles, num_tiles, pages = self._lists
        attended: Tensor = paged_prefill(query, keys, values, tiles, num_tiles, pages, page_size=self._kv.page_size)
        return attended

    def latent(self, layer: int, query: Tensor, latent: Tensor, heads: LatentHeads) -> Tensor:
        raise NotImplementedError(
            "keys and values of contexts are expanded from latents, whose number graphs do not know"
        )


def has_prefill_graphs(model: Transformer) -> bool:
    """True if forwards of the model fit in graphs."""
    from pdkernels.paged_prefill import can_page  # noqa: PLC0415

    return model.config.latent is None and can_page(model.config.head_dim)
