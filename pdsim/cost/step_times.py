"""Durations of one instance's steps, on its GPU and on its host: times of cost models, with additions such as host
work. With speculative decoding, a decode step first drafts tokens. Then the target model computes all tokens of the
batch, if possible in the smallest CUDA graph that holds the batch. Host work follows.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import field
from math import ceil
from typing import NamedTuple

from pdsim.core.messages import DecodeStep, HiSparseStep, MixedStep, PrefillStep
from pdsim.cost.cold_server import ColdServer
from pdsim.cost.copies import end_behind_load
from pdsim.cost.drafts import NO_DRAFTING, Drafting
from pdsim.cost.model import FRACTION_BITS, CostModel, DecodeLine, Terms
from pdsim.cost.roofline import RooflineModel
from pdsim.cost.swaps import SwapCosts
from pdsim.dataclass import dataclass
from pdsim.system.memory import Layout
from pdsim.system.pipeline_stages import stage_layers


class Graphs(NamedTuple):
    """CUDA graphs for captured batch sizes. Batches larger than all graphs launch their kernels one by one."""

    sizes: Sequence[int]
    """Captured batch sizes, ascending."""
    launch_ns: float
    """Minimum time in ns of a step that has no graph: the time of launching all its kernels."""
    empty_row_kv: float = 0
    """A graph computes a fixed number of requests, its rows. Rows beyond the batch are empty. This is the time of one
    empty row, divided by the time in which the row of a request reads its KV."""
    has_free_rows: bool = False
    """True: a graph's empty rows (rows without a request) take no time besides that of their KV. This holds if all
    empty rows choose the same experts, or if experts do not compute empty rows."""

    def size(self, num_requests: int) -> int | None:
        """Returns the smallest captured batch size that holds num_requests requests. None: no graph is large enough."""
        index = bisect_left(self.sizes, num_requests)
        return self.sizes[index] if index < len(self.sizes) else None

    def num_computed(self, num_requests: int) -> int:
        """Returns the number of requests that a step with num_requests requests computes. If the step runs in a graph,
        this includes the graph's empty rows (rows without a request), unless has_free_rows.
        """
        return num_requests if self.has_free_rows else self.size(num_requests) or num_requests


_FOREVER = 1 << 30


def captured_batches(max_batch: int, max_running: int, *, speculative: bool = False) -> list[int]:
    """Returns the batch sizes that SGLang captures, up to the smaller of max_batch and max_running (0.5.23,
    generate_decode_cuda_graph_batch_sizes). This largest size is always captured. speculative: True: the sizes for
    decode steps with drafts.
    """
    ranges = (
        [range(1, 9), range(10, 33, 2), range(40, 65, 4), range(72, 257, 8), range(272, _FOREVER, 16)]
        if speculative
        else [(1, 2, 4, 8, 12), range(16, 257, 8), range(272, 512, 16), range(512, _FOREVER, 32)]
    )
    largest = min(max_batch, max_running)
    sizes = {size for sizes in ranges for size in sizes[: bisect_left(sizes, largest + 1)]}
    return sorted(sizes | {largest})


def captured_by_vllm(max_running: int, *, blackwell: bool = False) -> list[int]:
    """Returns the batch sizes that vLLM captures, without drafts: at most twice max_running, and at most 512, on
    Blackwell 1,024 (0.33.0, config/vllm.py:2463-2467). max_running itself is captured within these limits (:2550).
    """
    largest = min(2 * max_running, 1024 if blackwell else 512)
    sizes = {size for size in (1, 2, 4, *range(8, 256, 8), *range(256, 1025, 16)) if size <= largest}
    return sorted(sizes | {max_running}) if max_running <= largest else sorted(sizes)


class DecodeHostOverhead(NamedTuple):
    """Host time between two decode steps, for processing the results of one step and preparing the next."""

    step_ns: float = 0
    """Fixed part of the host time in ns, independent of the batch."""
    request_ns: float = 0
    """Additional time in ns for each request of the batch."""
    prefill_ns: float = 0
    """Additional host time in ns of each prefill forward, in an instance whose scheduler loop runs both prefill and
    decode."""
    launch_ns: float = 0
    """Time in ns of launching a prefill forward, in an instance whose scheduler loop runs both prefill and decode. A
    forward ends no earlier than its launch."""
    launches_ahead: bool = False
    """True: the launch of a forward directly behind another forward begins while that forward runs."""

    def ns(self, num_requests: int) -> float:
        return self.step_ns + self.request_ns * num_requests


NO_HOST_OVERHEAD = DecodeHostOverhead()


SM_BANDWIDTH = 62e9
"""KV bytes per second that one SM of an H200 processes (experiments/sglang-h200). SMs of other GPUs are assumed to be
as fast."""
_BLOCKS_PER_SM = 1.1
"""FlashAttention-3 splits contexts if its number of thread blocks times this factor is below the number of SMs
(num_splits_heuristic)."""


class AttentionWaves(NamedTuple):
    """Times decode attention as waves of thread blocks over the SMs of one GPU.

    FlashAttention-3 gives each KV head of each request a thread block. If SMs would be idle, it splits the context over
    several blocks. A wave is the blocks that run at the same time, one per SM. A wave takes the time of its memory
    reads, but at least the time that one SM needs for one block. A partly filled wave can therefore take as long as a
    full wave. Measured on an H200 (experiments/sglang-h200).
    """

    num_sms: int
    num_heads: int
    """Number of KV heads on one GPU."""
    token_ns: float
    """Time in ns that one SM needs for one token of one KV head, over all layers."""
    merge_ns: float = 0
    """Additional time in ns of a step whose contexts are split, for merging the results."""

    @property
    def num_requests(self) -> float:
        """Number of requests whose blocks fill one wave."""
        return self.num_sms / self.num_heads

    def num_splits(self, num_requests: int) -> int:
        """Number of blocks over which each request's context is split."""
        return max(1, ceil(self.num_sms / (_BLOCKS_PER_SM * num_requests * self.num_heads)))

    def merging_ns(self, num_requests: int) -> float:
        return self.merge_ns if self.num_splits(num_requests) > 1 else 0.0

    def line(self, num_requests: int, smooth: DecodeLine) -> DecodeLine:
        """Returns the duration of a step in waves, as a line over the KV tokens that the batch reads. smooth: duration
        of the same step if only memory reads limited attention.

        All contexts are assumed to be equally long. Requests of one wave that share KV read it from memory once, but
        the SMs compute attention over it once for each request.
        """
        one_ns = 1 << FRACTION_BITS
        read = (smooth.per_context_token + smooth.per_distinct_token) / self.num_heads
        computed = self.token_ns * one_ns
        num_splits = self.num_splits(num_requests)
        full, rest = divmod(num_requests * self.num_heads * num_splits, self.num_sms)
        sizes = full * [self.num_sms] + ([rest] if rest else [])
        tokens = num_requests * num_splits
        per_token = round(sum(max(size * read, computed) for size in sizes) / tokens)
        per_context_token = round(len(sizes) * computed / tokens)
        base = smooth.base + round(self.merging_ns(num_requests) * one_ns)
        return DecodeLine(base, per_context_token, per_token - per_context_token)


class KvReads:
    """Prolongs forwards during which KV transfers read the GPU's memory (experiments/transfer-micro).

    The reads during one forward prolong the next forward, because later reads are unknown when a forward begins.
    Simultaneous reads count once if they end in the order in which they began.
    """

    def __init__(self, slows_prefill: float) -> None:
        """slows_prefill: time that a transfer adds to forwards, divided by the transfer's time during forwards."""
        self._share = slows_prefill
        self._busy_since_ns = self._busy_until_ns = 0
        self._counted_ns = 0
        """Time in ns until which transfers have been counted."""
        self._owed_ns = 0.0

    def prolonged_ns(self, start_ns: int, duration_ns: int) -> int:
        """Returns the duration in ns of a forward that begins at start_ns. Transfers that `ended` has counted since the
        last forward add to its duration. duration_ns: duration without such transfers. The caller makes one call per
        forward, in order.
        """
        owed_ns = int(self._owed_ns)
        self._owed_ns -= owed_ns
        if start_ns > self._busy_until_ns:
            self._busy_since_ns = start_ns
        self._busy_until_ns = start_ns + duration_ns + owed_ns
        return duration_ns + owed_ns

    def ended(self, since_ns: int, now_ns: int) -> None:
        """Adds a transfer from since_ns to now_ns to the time by which reads prolong the next forward. Only the
        transfer's time during forwards counts.
        """
        beside_since_ns = max(since_ns, self._counted_ns, self._busy_since_ns)
        self._counted_ns = now_ns
        self._owed_ns += self._share * max(0, min(now_ns, self._busy_until_ns) - beside_since_ns)


@dataclass(kw_only=True)
class StepTimes:
    """Durations of one instance's steps. A duration may depend on earlier steps and KV transfers of the same GPU."""

    prefill: CostModel
    """Cost model of prefill forwards."""
    decode: CostModel
    """Cost model of decode steps."""
    drafting: Drafting = NO_DRAFTING
    graphs: Graphs | None = None
    """CUDA graphs of decode steps. None: steps run without graphs, and compute only their own requests."""
    waves: AttentionWaves | None = None
    """Waves of decode attention. None: the time per KV token is the same for all batch sizes."""
    host_overhead: DecodeHostOverhead = NO_HOST_OVERHEAD
    speedup: tuple[float, float] = (1, 1)
    """Hypothetical speedup factors of the GPU: (in prefill, in decode)."""
    kv_reads: KvReads | None = None
    """Reads by KV transfers, which prolong forwards. None: transfers do not prolong forwards."""
    swaps: SwapCosts | None = None
    """Copies of KV that decode steps with HiSparse wait for. None: all KV is on the GPU."""
    cold: ColdServer | None = None
    """Stalls after a cold start. None: the instance is warm."""
    lines: dict[int, DecodeLine] = field(init=False, default_factory=dict)
    """Durations that `decode_line` has computed, by number of requests."""
    _launched_ns: int = field(init=False, default_factory=int)  # compiled, a plain default would not be there
    """Time in ns at which the launch of the latest forward ended."""
    _forward_start_ns: int = field(init=False, default_factory=int)
    _forward_end_ns: int = field(init=False, default_factory=int)
    """Times in ns at which the latest forward began and ended."""

    @property
    def forward_ns(self) -> Callable[[PrefillStep, int], int]:
        """Function from a forward and its start in ns to its duration in ns: `prefill_ns`, or the cost model's own
        function if nothing is added to the model's time.
        """
        is_plain = self.drafting.model is None and self.kv_reads is None and self.speedup[0] == 1
        has_host_work = self.host_overhead.prefill_ns or self.host_overhead.launch_ns
        return self.prefill.prefill_ns if is_plain and not has_host_work else self.prefill_ns

    def prefill_ns(
        self, step: PrefillStep, start_ns: int, expert_tokens: float | None = None, other_ns: int = 0
    ) -> int:
        """Duration in ns of a forward that begins at start_ns, at least 1. The caller makes one call per forward, in
        order.

        expert_tokens: number of tokens that experts compute; None: the step's own tokens. Only rooflines use this
        number. other_ns: time in ns of the forward's other work, such as reading the KV of running requests.
        """
        if expert_tokens is None or not isinstance(self.prefill, RooflineModel):
            duration_ns = self.prefill.prefill_ns(step, start_ns)
        else:
            duration_ns = self.prefill.prefill_ns(step, start_ns, expert_tokens)
        if self.drafting.model is not None:
            duration_ns += self.drafting.model.prefill_ns(step, start_ns)
        duration_ns += round(self.host_overhead.prefill_ns)
        if self.speedup[0] != 1:
            duration_ns = max(1, round(duration_ns / self.speedup[0]))
        if self.kv_reads is not None:
            duration_ns = self.kv_reads.prolonged_ns(start_ns, duration_ns)
        duration_ns += other_ns
        return self._launched(duration_ns, start_ns) if self.host_overhead.launch_ns else duration_ns

    def _launched(self, duration_ns: int, start_ns: int) -> int:
        """Duration in ns of a forward, which ends no earlier than its launch. duration_ns: duration without the launch.

        The launch begins with the forward. With launches_ahead and directly behind another forward, the launch begins
        with that other forward, but not before the other launch has ended: the loop launches a step while the step
        before runs, and then waits for the end of the step before (SGLang 0.5.12, managers/scheduler.py:1564).
        """
        is_ahead = self.host_overhead.launches_ahead and start_ns == self._forward_end_ns
        begin_ns = max(self._forward_start_ns, self._launched_ns) if is_ahead else start_ns
        self._launched_ns = begin_ns + round(self.host_overhead.launch_ns)
        self._forward_start_ns, self._forward_end_ns = start_ns, max(start_ns + duration_ns, self._launched_ns)
        return self._forward_end_ns - start_ns

    def mixed_ns(self, step: MixedStep, start_ns: int, expert_tokens: float | None = None) -> int:
        """Duration in ns of a forward over prompts and running requests, including reading the KV of running requests.
        start_ns: time in ns at which the forward begins. The caller makes one call per forward, in order.
        expert_tokens: number of tokens that experts compute; None: the step's own tokens.
        """
        decode = step.decode
        line = self.decode_line(decode.num_requests)
        kv = line.per_context_token * decode.num_context_tokens + line.per_distinct_token * decode.num_distinct_tokens
        return self.prefill_ns(step.prefill, start_ns, expert_tokens, kv >> FRACTION_BITS)

    def decode_line(self, num_requests: int) -> DecodeLine:
        """Duration of a decode step with num_requests requests, including drafting and host work, as a line over the KV
        tokens that the batch reads.
        """
        line = self.lines.get(num_requests)
        if line is None:
            line = self._around(num_requests, self.decode.decode_line(self.num_computed(num_requests)))
            self.lines[num_requests] = line
        return line

    def with_swaps(self, line: DecodeLine, step: DecodeStep) -> DecodeLine:
        """Returns the duration of a decode step, including its copies between host memory and GPU. line: the step's
        duration without these copies.
        """
        if self.swaps is None or not isinstance(step, HiSparseStep):
            return line
        return line.later(self.swaps.step_ns(step, line.base >> FRACTION_BITS))

    def num_computed(self, num_requests: int) -> int:
        """Number of tokens that a decode step computes, including draft tokens. Empty rows of the CUDA graph (rows
        without a request) count, too, unless graphs.has_free_rows.
        """
        num_rows = num_requests if self.graphs is None else self.graphs.num_computed(num_requests)
        return num_rows * self.drafting.tokens

    def pads(self, num_requests: int) -> bool:
        """True if the batch runs in a CUDA graph whose empty rows (rows without a request) take as much time as
        requests.
        """
        graphs = self.graphs
        return graphs is not None and not graphs.has_free_rows and graphs.size(num_requests) is not None

    def shared_line(self, num_requests: int, expert_tokens: float) -> DecodeLine:
        """The line of decode_line for data-parallel instances that share their experts: expert_tokens is the number of
        tokens that experts compute per instance. Has an effect with rooflines only.
        """
        if not isinstance(self.decode, RooflineModel):
            return self.decode_line(num_requests)
        computed = self.num_computed(num_requests)
        line = self.decode.decode_line(computed, expert_tokens)
        return self._around(num_requests, line, expert_tokens / computed)

    def restart(self) -> None:
        """Makes the instance cold again after a restart, if the scenario models cold servers."""
        if self.cold is not None:
            self.cold.restart()

    def _around(self, num_requests: int, line: DecodeLine, expert_share: float | None = None) -> DecodeLine:
        """Returns the duration of a whole decode step, as a line over the KV tokens that the batch reads.

        line: duration of the target model's forward. The result adds drafting, host work, launches without a graph,
        attention of graph rows without a request, and waves of attention, and divides by the GPU's speedup.
        expert_share: number of tokens that experts compute, divided by the instance's own tokens; None: 1.
        """
        size = None if self.graphs is None else self.graphs.size(num_requests)
        base = line.base + _units(self.drafting.step_ns)
        per_context = line.per_context_token
        if self.graphs is not None:
            if size is None:
                base = max(base, _units(self.graphs.launch_ns))
            else:
                empty_rows = self.graphs.empty_row_kv * (size / num_requests - 1)
                per_context += round(empty_rows * (per_context + line.per_distinct_token))
        base += _units(self.host_overhead.ns(num_requests))
        line = DecodeLine(base, per_context, line.per_distinct_token)
        if self.waves is not None:
            line = self.waves.line(num_requests, line)
        if self.drafting.model is not None:
            line = line.plus(self.drafting.model.decode_line(size or num_requests, expert_share))
        return line if self.speedup[1] == 1 else line.stretched(1 / self.speedup[1])

    def _drafting_ns(self, num_requests: int) -> float:
        """Time in ns that drafting takes in one step, without reading the draft's KV."""
        if self.drafting.model is None:
            return self.drafting.step_ns
        size = (self.graphs and self.graphs.size(num_requests)) or num_requests
        return self.drafting.model.decode_line(size).base / (1 << FRACTION_BITS)

    # What the times are made of.

    def prefill_terms(self, step: PrefillStep) -> Terms:
        """Returns the terms of a forward's duration in ns on an idle GPU, by name. Their sum is the duration."""
        terms = dict(self.prefill.prefill_terms(step))
        if self.drafting.model is not None:
            terms["draft"] = self.drafting.model.prefill_ns(step, 0)
        if self.host_overhead.prefill_ns:
            terms["host between steps"] = self.host_overhead.prefill_ns
        terms = {name: term_ns / self.speedup[0] for name, term_ns in terms.items()}
        if self.host_overhead.launch_ns:
            terms["rest of the launch"] = max(0.0, self.host_overhead.launch_ns - sum(terms.values()))
        return terms

    def decode_terms(self, num_requests: int, num_context_tokens: int, num_distinct_tokens: int) -> Terms:
        """Returns the terms of a decode step's duration in ns, by name. Their sum is the duration if speedup is 1.
        num_context_tokens: KV tokens that the batch reads. num_distinct_tokens: the same, but a token that several
        requests share counts once (once per wave of attention).
        """
        line = self.decode_line(num_requests)
        terms = self.decode.decode_terms(self.num_computed(num_requests))
        terms["drafting"] = self._drafting_ns(num_requests)
        if self.waves is not None:
            terms["merging split contexts"] = self.waves.merging_ns(num_requests)
        terms["host between steps"] = self.host_overhead.ns(num_requests)
        terms["launches without a graph"] = max(0.0, line.base / (1 << FRACTION_BITS) - sum(terms.values()))
        if self.swaps is not None:
            usual = (num_requests, num_context_tokens / num_requests, line.base >> FRACTION_BITS)
            terms["copies from host memory"] = self.swaps.usual_ns(*usual)
        kv = line.per_context_token * num_context_tokens + line.per_distinct_token * num_distinct_tokens
        return {**terms, "reading KV": kv / (1 << FRACTION_BITS)}


def _units(duration_ns: float) -> int:
    return round(duration_ns * (1 << FRACTION_BITS))


LINK_EFFICIENCY = 0.8
"""Share of link bandwidth that sending activations reaches (assumed, as for all-reduces in a roofline)."""


@dataclass(frozen=True)
class PipelineTimes:
    """Times of an instance's pipeline stages. The cost model gives the time of the stage with most layers."""

    layers: tuple[int, ...]
    """Number of layers of each stage."""
    hop_token_ns: float
    """Time in ns of sending one token's activations to the next stage."""

    def pass_on(
        self,
        start_ns: int,
        largest_ns: int,
        num_tokens: int,
        free_ns: list[int],
        loads: Sequence[tuple[int, int]] = (),
    ) -> int:
        """Passes a forward through all stages. Returns the time in ns at which the forward leaves the last stage.

        start_ns: time in ns at which the forward may begin. largest_ns: duration of the forward in the stage with most
        layers. free_ns: times in ns at which each stage becomes free. The call updates them. loads: start and end in ns
        of loads of cached KV. During a load, each stage loads KV of its own layers, and each layer waits for its KV.
        """
        hop_ns, end_ns = round(self.hop_token_ns * num_tokens), start_ns
        for stage, num_layers in enumerate(self.layers):
            begin_ns = max(end_ns + (hop_ns if stage else 0), free_ns[stage])
            own_ns = max(1, round(num_layers / max(self.layers) * largest_ns))
            end_ns = begin_ns + own_ns
            for load in loads:
                end_ns = max(end_ns, end_behind_load(begin_ns, own_ns, load, num_layers))
            free_ns[stage] = end_ns
        return end_ns


def pipeline_times(layout: Layout, num_layers: int) -> PipelineTimes:
    """Returns the times of a layout's pipeline stages. num_layers: number of layers of the whole model.

    A stage sends hidden states and residuals to the next stage in bf16. Each rank of the stage sends an equal share of
    these bytes.
    """
    layers, gpu = stage_layers(num_layers, layout.pp), layout.gpu
    bandwidth = gpu.nvlink_bandwidth if layout.num_gpus <= gpu.gpus_per_server else gpu.nic_bandwidth
    return PipelineTimes(
        layers=tuple(layers),
        hop_token_ns=1e9 * 4 * layout.model.hidden_size / (layout.tp * bandwidth * LINK_EFFICIENCY),
    )
