"""The model work of one rank: computes batches with the model and the rank's KV cache."""

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from pdreal.control.expert_counts import ExpertCounts, count
from pdreal.control.requests import Draw, Logprobs
from pdreal.control.tasks import (
    DecodeBatch,
    ForgetKv,
    PrefillBatch,
    PrefillInput,
    RestoreKv,
    SaveKv,
    Seed,
    StateUse,
    Work,
)
from pdreal.memory.paged_kv import HostKv, PagedKv, SavedKv
from pdreal.memory.states import StatePool
from pdreal.model.attention import GatheredDecode, PagedPrefill
from pdreal.model.delta import DeltaDecode
from pdreal.model.transformer import Transformer
from pdreal.rank.drafting import Drafter, columns_of, followers_of, rows_of, seeds_of, verified_chunks
from pdreal.rank.graphs import SIZES, DecodeGraphs, LaunchedStep, PrefillGraphs, has_prefill_graphs
from pdreal.rank.verify_graphs import VerifyGraphs
from pdreal.transports.streams import to_host, wait_for_engines
from pdsim.core.messages import LoadBack, WriteBackup


class LayerProgress:
    """Reports which layers of one forward are computed. The model calls `on_kv` for each layer, and the runner calls
    `report` after the forward's launch. On a CPU `on_kv` reports at once. On a GPU `report` reports each layer group
    when the stream has computed it.
    """

    def __init__(
        self, num_layers: int, num_groups: int, on_layers: Callable[[int], None] | None, device: torch.device
    ) -> None:
        """on_layers: called with the number of layer groups that are done. num_groups: number of groups, as equal as
        whole layers allow; 0: on_layers is never called.
        """
        self._num_layers = num_layers
        self._num_groups = num_groups
        self._on_layers = on_layers
        self._is_cuda = device.type == "cuda"
        self._num_done = 0
        self._events: list[tuple[int, torch.cuda.Event]] = []

    def on_kv(self, layer: int) -> None:
        """Called when a layer's keys and values are written or, on a GPU, when the stream has been given the work of
        writing them. If this completes layer groups, a CPU reports them at once; a GPU records an event, for which
        `report` waits.
        """
        num_done = self._num_groups_within(layer + 1)
        if self._on_layers is None or num_done == self._num_done:
            return
        self._num_done = num_done
        if self._is_cuda:
            event = torch.cuda.Event()
            event.record()
            self._events.append((num_done, event))
        else:
            self._on_layers(num_done)

    def report(self) -> None:
        """Waits until the GPU has computed each layer group, and calls on_layers after each. Called when the whole
        forward has been launched.
        """
        for num_done, event in self._events:
            event.synchronize()
            if self._on_layers is not None:
                self._on_layers(num_done)

    def _num_groups_within(self, num_layers: int) -> int:
        """Returns how many whole groups the first num_layers layers contain. Of a model with L layers, the first g
        groups contain the first L * g // num_groups layers.
        """
        num_groups = self._num_groups
        return min(num_groups, ((num_layers + 1) * num_groups - 1) // self._num_layers) if num_groups else 0


_WARM_UP_TOKENS = 8192
"""Number of tokens of the largest warm-up forward of an instance that computes prompts: the size of a chunk on GPUs
with as much memory as an H200."""
_FEW_TOKENS = 2048
"""Number of tokens up to which the prompt lengths of warm-up forwards are at most 128 tokens apart. Longer lengths are
at most 512 tokens apart.
"""


class ModelRunner:
    """Computes batches with the model. All ranks of an instance get the same work in the same order, and compute the
    same tokens. Only one thread at a time may use a runner.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        num_pages: int,
        page_size: int,
        allocate: Callable[[int], Tensor] | None = None,
        layer_groups: int = 0,
        max_running_requests: int = 0,
        num_host_pages: int = 0,
        prefills: bool = False,
        kv_dtype: torch.dtype | None = None,
        records_experts: bool = False,
        drafter: Drafter | None = None,
        states: StatePool | None = None,
    ) -> None:
        """On a GPU, captures CUDA graphs, which takes seconds: of decode steps if the instance decodes, and of short
        prefill forwards if it computes prompts without layer groups and the model allows graphs (has_prefill_graphs).

        num_pages: number of pages of the KV pool. page_size: number of tokens of a page. allocate: makes the cache's
        memory, of the given number of bytes; None: torch allocates the memory. layer_groups: number of groups of layers
        whose KV a prefill forward reports before it ends; 0: none. max_running_requests: maximum number of requests of
        a decode batch; 0: the instance does not decode. num_host_pages: number of pages of host memory behind the
        cache; 0: there is none. prefills: True: the instance computes prompts. kv_dtype: data type of the KV; None: the
        model's. records_experts: True: each forward sets expert_counts. drafter: makes and verifies drafts in decode
        steps; the cache then also has the layer of the draft head. None: no drafts. states: linear-attention states;
        None: the model has none.
        """
        self.model = model
        self.kv = PagedKv(
            num_pages=num_pages,
            page_size=page_size,
            num_layers=model.config.num_kv_layers + (0 if drafter is None else drafter.head.layer.config.num_layers),
            num_kv_heads=model.num_kv_heads,
            head_dim=model.config.head_dim,
            planes_per_layer=model.config.planes_per_layer,
            dtype=kv_dtype or model.dtype,
            computed_dtype=model.dtype,
            device=model.device,
            allocate=allocate,
        )
        self.states = states
        self._saved = SavedKv(self.kv)
        self.host = HostKv(self.kv, num_host_pages) if num_host_pages else None
        self._layer_groups = layer_groups
        self._warm_up_tokens = _WARM_UP_TOKENS if prefills else max(1, max_running_requests)
        self.expert_counts: ExpertCounts | None = None
        """Number of tokens of the last forward that chose each expert, [layers, experts]. None: not recorded."""
        self.logprobs: list[Logprobs | None] = []
        """Log probabilities of each token of the last batch; None, or an empty list, if not requested."""
        self.seeds: list[Seed] = []
        """Start of drafting after each chunk of the last batch. Empty: a decode batch, or there is no drafter."""
        self._drafter = drafter
        self._records_experts = records_experts
        self._page_tables: dict[int, array[int]] = {}
        """Page table of each sequence of the decode batch, by index in the batch. Empty if steps run as CUDA graphs."""
        self._graphs: DecodeGraphs | None = None
        if model.device.type == "cuda" and max_running_requests:
            self._graphs = (
                DecodeGraphs(model, self.kv, max_running_requests, records_experts=records_experts, states=states)
                if drafter is None
                else VerifyGraphs(drafter, self.kv, max_running_requests)
            )
        self._prefill_graphs: PrefillGraphs | None = None
        if model.device.type == "cuda" and prefills and not layer_groups and has_prefill_graphs(model):
            self._prefill_graphs = PrefillGraphs(
                model, self.kv, records_experts=records_experts, drafter=drafter, states=states
            )

    @property
    def prefill_graph_sizes(self) -> Sequence[int]:
        """Sizes of captured forwards, in tokens."""
        return SIZES if self._prefill_graphs else ()

    def warm_up(self) -> None:
        """Computes forwards of many lengths before the first request, while all pages are free. On an H200 a process's
        first forward takes 0.7 s, and the whole warm-up 6 s. An instance that only decodes computes few short forwards,
        for the thread that draws tokens by requests' sampling rules. Capturing its CUDA graphs has warmed up the rest.

        Libraries are set up per thread, and load kernels at the first use of each shape. So the thread that will
        compute the batches of the run calls this method, which begins with the longest forward.
        """
        longest = min(self._warm_up_tokens, self.model.config.max_context_tokens, self.kv.num_pages * self.kv.page_size)
        for num_tokens in _warm_up_lengths(longest):
            self.prefill(PrefillBatch((self._warm_up_chunk(num_tokens, 0),)))
            if num_tokens.bit_count() == 1:  # contexts matter to attention alone, whose kernels are few
                behind_context = self._warm_up_chunk(num_tokens, num_tokens // 2)
                self.prefill(PrefillBatch((behind_context,)))
                self.prefill(PrefillBatch((behind_context, behind_context)))

    def _warm_up_chunk(self, num_tokens: int, num_context_tokens: int) -> PrefillInput:
        pages = range(1, -(-num_tokens // self.kv.page_size) + 1)
        state = None if self.states is None else StateUse(0, 0)
        return PrefillInput(0, [0] * (num_tokens - num_context_tokens), num_context_tokens, pages, state=state)

    def run(self, work: Work, on_layers: Callable[[int], None] | None = None) -> list[int]:
        """Carries out one task: a prefill or decode batch, a copy of KV between GPU and host memory, or the removal of
        saved KV. Returns the tokens of `prefill` or `decode` for a batch, and no tokens for other tasks. on_layers:
        called after each layer group of a prefill batch, with the number of groups whose KV is in memory.
        """
        self.expert_counts, self.logprobs, self.seeds = None, [], []
        match work:
            case PrefillBatch():
                return self.prefill(work, on_layers)
            case DecodeBatch():
                return self.decode(work)
            case SaveKv():
                self._saved.save(work.request_id, work.num_kv_tokens, work.page_table)
                if self.states is not None:
                    self.states.save(work.request_id, work.state_slot)
            case RestoreKv():
                self._saved.restore(work.request_id, work.page_table)
                if self.states is not None:
                    self.states.restore(work.request_id, work.state_slot)
            case ForgetKv():
                self._saved.forget(work.request_id)
                if self.states is not None:
                    self.states.forget(work.request_id)
            case WriteBackup() | LoadBack():
                assert self.host is not None
                self.host.copy(work)
        return []

    @torch.inference_mode()
    def prefill(self, batch: PrefillBatch, on_layers: Callable[[int], None] | None = None) -> list[int]:
        """Returns the next token after each chunk. The token is meaningful only if the chunk ends its prompt.

        on_layers: called after each layer group, with the number of groups whose KV is in memory.
        """
        draws = [chunk.draw for chunk in batch.chunks]
        if (graphs := self._prefill_graphs) is not None and graphs.hold(batch):
            chosen = self._choose(graphs.hidden(batch), draws)
            if self._drafter is not None:
                self.seeds = seeds_of(*map(to_host, graphs.draft(batch, chosen)))
            self._end_recording(graphs.choices)
            return chosen
        progress = LayerProgress(self.kv.num_layers, self._layer_groups, on_layers, self.model.device)
        tokens = torch.from_numpy(np.concatenate([np.asarray(chunk.tokens) for chunk in batch.chunks]))
        positions = torch.cat([torch.arange(c.num_context_tokens, c.num_kv_tokens) for c in batch.chunks])
        last = torch.tensor([end - 1 for end in accumulate(len(chunk.tokens) for chunk in batch.chunks)])
        device = self.model.device
        attend = PagedPrefill(self.kv, batch, device, progress.on_kv, self.states)
        self._begin_recording()
        tokens, positions, last = tokens.to(device), positions.to(device), last.to(device)
        if self._drafter is None:
            chosen = self._choose(self.model.hidden(tokens, positions, attend, last), draws)
        else:
            hidden = self.model.hidden(tokens, positions, attend)
            chosen = self._choose(hidden[last], draws)
            followers = torch.tensor(followers_of(batch, chosen)).to(device)
            made = self._drafter.prefill(followers, hidden, positions, attend, last)
            self.seeds = seeds_of(*map(to_host, made))
        progress.report()
        self._end_recording(self.model.choices)
        return chosen

    def _choose(self, hidden: Tensor, draws: Sequence[Draw | None]) -> list[int]:
        if not any(draws):
            return to_host(self.model.best_tokens(self.model.logits_of(hidden))).tolist()
        chosen, self.logprobs = self.model.choose(hidden, draws)
        return chosen

    @torch.inference_mode()
    def decode(self, batch: DecodeBatch) -> list[int]:
        """Returns the next token of each sequence of a batch. If the batch verifies drafts, returns three lists for
        each sequence, all joined into one: the drafts; the target model's choices; and for each draft 1 if the target
        scores the draft at most one step of bf16 below the target's choice, else 0.
        """
        wait_for_engines(self.model.device)
        if self._graphs is not None:
            chosen = self._graphs.decode(batch)
            self._end_recording(self._graphs.choices)
            return self._choose(self._graphs.hidden, batch.draws) if any(batch.draws) else chosen
        self._begin_recording()
        if batch.drafts is not None:
            return self._verify(batch, batch.drafts.seeds)
        tokens, positions = torch.tensor(batch.tokens), torch.tensor(batch.num_kv_tokens)
        slots = torch.tensor(batch.states, dtype=torch.int32)
        delta = None if self.states is None else DeltaDecode(self.states, *slots.unbind(1))
        attend = GatheredDecode(self.kv, batch.num_kv_tokens, self._updated_tables(batch), delta)
        chosen = self._choose(self.model.hidden(tokens, positions, attend), batch.draws)
        self._end_recording(self.model.choices)
        return chosen

    def _verify(self, batch: DecodeBatch, seeds: Sequence[tuple[int, Seed | None]]) -> list[int]:
        """Returns for each sequence of the batch, one after another: its drafts, the target's choices, and for each
        draft 1 if the target scores the draft at most one step of bf16 below the target's choice, else 0. seeds: pairs
        (slot, seed) of sequences that join the batch.
        """
        assert self._drafter is not None
        num_verified, tables = self._drafter.num_verified, self._updated_tables(batch)
        self._drafter.plant(seeds)
        chunks = verified_chunks(batch.num_kv_tokens, tables, num_verified)
        attend_all = PagedPrefill(self.kv, chunks, self.model.device, lambda _: None)
        rows = rows_of(torch.tensor(columns_of(batch, num_verified)))
        made = self._drafter.step(rows, lambda at: GatheredDecode(self.kv, at.tolist(), tables), attend_all)
        return made.flatten().tolist()

    @torch.inference_mode()
    def launch(self, batch: DecodeBatch) -> LaunchedStep | None:
        """Begins a decode step on the GPU without waiting for its end. Returns None, and begins nothing, if the host
        must work during the step (to draw tokens or to record experts), or if decode steps do not run as CUDA graphs.
        """
        if self._graphs is None or self._records_experts or any(batch.draws):
            return None
        wait_for_engines(self.model.device)
        return self._graphs.launch(batch)

    def _updated_tables(self, batch: DecodeBatch) -> list["array[int]"]:
        """Applies the batch's changes to the page tables, and returns the tables of all sequences of the batch. For
        steps without CUDA graphs only, because graphs keep page tables of their own.
        """
        for row, start, pages in batch.changes:
            self._page_tables[row] = self._page_tables.get(row, array("i"))[:start] + array("i", pages)
        return [self._page_tables[row] for row in range(len(batch.tokens))]

    def _begin_recording(self) -> None:
        if self._records_experts:
            self.model.choices = []

    def _end_recording(self, choices: Sequence[Tensor] | None) -> None:
        if self._records_experts and choices:
            config = self.model.config
            assert config.experts is not None
            self.expert_counts = count(to_host(torch.stack(tuple(choices))).numpy(), config.experts.num_experts)


def _warm_up_lengths(longest: int) -> list[int]:
    """Returns lengths in tokens, the longest first: `longest`, powers of two, and between them multiples of 128 up to
    _FEW_TOKENS and then of 512, because libraries have kernels for ranges of lengths.
    """
    powers = (2**power for power in range(longest.bit_length()))
    between = *range(128, min(longest, _FEW_TOKENS), 128), *range(_FEW_TOKENS, longest, 512)
    return sorted({longest, *powers, *between}, reverse=True)
