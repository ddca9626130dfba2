"""Decode steps as CUDA graphs: one per batch size, all over the same inputs, of which a step uploads what is new.

A batch runs in the smallest graph that holds it. Rows that it leaves over decode a token of nobody, whose KV goes to
the scratch page.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pdreal.model.attention import KernelDecode
from pdreal.model.transformer import Transformer
from pdreal.paged_kv import SCRATCH_PAGE, PagedKv
from pdreal.streams import begin_to_host, to_host
from pdreal.tasks import DecodeBatch


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, ... up to 64 and then in steps of 64, until `largest` fits."""
    sizes = [1]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] + min(sizes[-1], 64))
    return sizes


class _Inputs(NamedTuple):
    """Views of one array of int32, on the host and on the device."""

    tokens: Tensor
    """[largest batch]"""
    positions: Tensor
    """[largest batch]: KV tokens before each of them."""
    page_tables: Tensor
    """[largest batch, most pages of a sequence]"""

    @classmethod
    def of(cls, array: Tensor, largest: int) -> "_Inputs":
        return cls(array[:largest], array[largest : 2 * largest], array[2 * largest :].view(largest, -1))


class LaunchedStep(NamedTuple):
    """A step on its way: its tokens are there when it is done."""

    tokens: Tensor
    done: torch.cuda.Event


class DecodeGraphs:
    """Graphs over one cache. On a CPU steps are not captured but run: so Triton's interpreter can test them."""

    def __init__(
        self, model: Transformer, kv: PagedKv, max_running_requests: int, *, records_experts: bool = False
    ) -> None:
        self.choices: list[Tensor] = []
        """Experts of each layer that the last step's tokens chose, if they are recorded."""
        self._records_experts = records_experts
        self.hidden = torch.empty(0)
        """Hidden states of the last step's tokens, which logits are made of."""
        self._hidden: dict[int, Tensor] = {}
        """Hidden states, where each graph leaves them."""
        self._choices: dict[int, list[Tensor]] = {}
        """Choices of experts, where each graph leaves them."""
        self._model = model
        self._kv = kv
        self._sizes = batch_sizes(max_running_requests)
        self._largest = self._sizes[-1]
        num_pages = min(kv.num_pages, -(-model.config.max_context_tokens // kv.page_size))
        is_cuda = model.device.type == "cuda"
        self._host = torch.zeros(self._largest * (2 + num_pages), dtype=torch.int32, pin_memory=is_cuda)
        self._device = torch.zeros_like(self._host, device=model.device)
        self._host_inputs, self._device_inputs = (_Inputs.of(a, self._largest) for a in (self._host, self._device))
        self._on_host = tuple(part.numpy() for part in self._host_inputs)
        self._num_used = 0
        """Rows from here on begin with the scratch page."""
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._best: dict[int, Tensor] = {}
        """Tokens that each graph makes, on the device."""
        if is_cuda:
            self._capture()

    def decode(self, batch: DecodeBatch) -> list[int]:
        """Next tokens, in the order of the batch."""
        return to_host(self._launch(batch)).tolist()

    def launch(self, batch: DecodeBatch) -> LaunchedStep:
        """The same on a GPU, which is not waited for."""
        return LaunchedStep(*begin_to_host(self._launch(batch)))

    def _launch(self, batch: DecodeBatch) -> Tensor:
        num_requests = len(batch.tokens)
        size = next(size for size in self._sizes if size >= num_requests)
        self._upload(batch, size)
        if graph := self._graphs.get(size):
            graph.replay()
        else:
            self._best[size] = self._forward(size)
        self.hidden = self._hidden[size][:num_requests]
        self.choices = [chosen[:num_requests] for chosen in self._choices.get(size, ())]
        return self._best[size][:num_requests]

    def _upload(self, batch: DecodeBatch, size: int) -> None:
        """The step before has ended: its tokens were read. Of page tables what lies between rows that changed."""
        tokens, positions, _ = self._on_host
        num_requests = len(batch.tokens)
        tokens[:num_requests] = batch.tokens
        positions[:num_requests] = batch.num_kv_tokens
        tokens[num_requests:size] = 0
        positions[num_requests:size] = 0
        num_small = 2 * self._largest
        self._device[:num_small].copy_(self._host[:num_small], non_blocking=True)
        if rows := self._change_tables(batch):
            changed = slice(min(rows), max(rows) + 1)
            self._device_inputs.page_tables[changed].copy_(self._host_inputs.page_tables[changed], non_blocking=True)

    def _change_tables(self, batch: DecodeBatch) -> list[int]:
        """Rows that change."""
        *_, page_tables = self._on_host
        for row, start, pages in batch.changes:
            page_tables[row, start : start + len(pages)] = pages
        num_requests = len(batch.tokens)
        left = range(num_requests, self._num_used)
        page_tables[left.start : left.stop, 0] = SCRATCH_PAGE
        self._num_used = num_requests
        return [*left, *(change.row for change in batch.changes)]

    def _forward(self, size: int) -> Tensor:
        tokens, positions, page_tables = (part[:size] for part in self._device_inputs)
        attend = KernelDecode(self._kv, self._model, positions, page_tables)
        self._model.choices = [] if self._records_experts else None
        hidden = self._hidden[size] = self._model.hidden(tokens, positions, attend)
        best = self._model.best_tokens(self._model.logits_of(hidden))
        if self._model.choices is not None:
            self._choices[size] = self._model.choices
            self._model.choices = None  # what others compute is theirs
        return best

    def _capture(self) -> None:
        """Largest first: the others find its memory in the pool."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        for size in reversed(self._sizes):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._forward(size)  # compiles kernels, and lets libraries set themselves up
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._best[size] = self._forward(size)
            graph.replay()  # the first time it is uploaded; its inputs are zeros: tokens of nobody, on the scratch page
            self._graphs[size] = graph
