"""Ranks of a server with data-parallel attention. All ranks begin each step together, and the slowest rank determines
the step's duration.

Experts compute the tokens of all ranks, so no rank can proceed alone. A rank without work takes part with no tokens. As
with SGLang, whose ranks agree before each forward, a round begins when the hosts of all ranks are free and at least one
rank has a step (prepare_mlp_sync_batch_raw).
"""

from collections import deque
from collections.abc import Sequence
from functools import partial

from simpy.events import EventPriority

from pdsim.core.invariants import AnyInstance
from pdsim.core.messages import DecodeStep, LayersComputed, MixedStep, PrefillStep, Step
from pdsim.sim.bus import Bus, Timeline
from pdsim.sim.instances.actor import Actor, BegunForward, Parts
from pdsim.sim.instances.executor import DecodeClock
from pdsim.sim.links.host_exchange import ServerNics


class Rank(Actor):
    """A rank of a server. Its steps begin together with the steps of the other ranks."""

    def __init__(self, bus: Bus, instance: AnyInstance, parts: Parts, lockstep: "Lockstep") -> None:
        super().__init__(bus, instance, parts)
        self._lockstep = lockstep
        self._begun: BegunForward | None = None
        """Prefill forward that exchanges bytes between hosts. Its end is not known yet. None: there is none."""
        lockstep.join(self)

    @property
    def is_busy(self) -> bool:
        """True while the rank lives and its host works: processes a result, sends KV, launches or compiles kernels."""
        return not self._is_dead and self._host.is_busy

    @property
    def free_ns(self) -> int:
        """Time in ns, on the host's clock, at which the rank's host becomes free."""
        return self._host.free_ns

    def kill(self) -> None:
        super().kill()
        self._lockstep.leave(self)

    def go_at(self, pace: float) -> None:
        """Ignores a new speed of the host's loop (`pace`). Posting of descriptors slows the loop, but this was measured
        without data-parallel attention only.
        """

    def _begin_decode(self, step: DecodeStep) -> None:
        self._lockstep.ask(self, step)

    def _begin_prefill(self, step: PrefillStep) -> None:
        self._lockstep.ask(self, step)

    def _begin_mixed(self, step: MixedStep) -> None:
        self._lockstep.ask(self, step)

    # What a round asks of it.

    def ready_ns(self, step: Step) -> int:
        """Earliest time in ns at which the rank's step can begin."""
        if isinstance(step, PrefillStep):
            return self._prefill_start_ns(step)
        return self._decode_start_ns()

    def num_tokens(self, step: Step) -> int:
        """Number of tokens that the rank's step gives to the experts."""
        if isinstance(step, PrefillStep):
            return step.num_tokens
        if isinstance(step, MixedStep):
            return step.prefill.num_tokens
        return self._cost.num_computed(step.num_requests)

    def pads(self, step: Step) -> bool:
        """True if the step runs in a CUDA graph whose empty rows (rows without a request) take as much time as
        requests.
        """
        return isinstance(step, DecodeStep) and self._cost.pads(step.num_requests)

    def end_ns(self, step: Step, start_ns: int, expert_tokens: float) -> int:
        """Time in ns at which the rank's step would end if no other rank took longer. expert_tokens: mean number of
        tokens that a rank gives to the experts. To be called once per step, in the order of the steps.
        """
        duration_ns = self.duration_ns(step, start_ns, expert_tokens)
        is_decode = isinstance(step, DecodeStep)
        return start_ns + duration_ns if is_decode else self._forward_end_ns(start_ns, duration_ns)

    def duration_ns(self, step: Step, start_ns: int, expert_tokens: float) -> int:
        """Time in ns that the step takes without copies of cached KV. expert_tokens: number of tokens that each rank
        sends to experts, as the mean over all ranks. The caller makes one call per step, in order.
        """
        if isinstance(step, PrefillStep):
            return self._cost.prefill_ns(step, start_ns, expert_tokens)
        if isinstance(step, MixedStep):
            return self._cost.mixed_ns(step, start_ns, expert_tokens)
        clock = DecodeClock()
        line = self._cost.with_swaps(self._cost.shared_line(step.num_requests, expert_tokens), step)
        if (cold := self._cost.cold) is not None:
            num_before, stall_ns = cold.next_stall(step.num_requests)
            cold.count_steps(step.num_requests, 1)
            line = line if num_before else line.later(stall_ns)
        clock.begin(line, step)
        return max(1, clock.first_ns)

    def run(self, step: Step, start_ns: int, end_ns: int) -> None:
        if isinstance(step, PrefillStep):
            self._run_prefill(step, start_ns, end_ns)
        elif isinstance(step, MixedStep):
            self._decode.begin_one(step.decode, start_ns, end_ns - start_ns, step.prefill)
        else:
            self._decode.begin_one(step, start_ns, end_ns - start_ns)

    # The same for a step whose end is not known when it begins.

    def launch(self, step: Step, start_ns: int) -> None:
        if isinstance(step, PrefillStep):
            self._begun = self._launched(step, start_ns, None)

    def pass_layers(self, step: Step, num_done: int, num_parts: int) -> None:
        """Reports the layer groups of a prefill step that become computed when part num_done of the num_parts equal
        parts of the step ends.
        """
        if isinstance(step, PrefillStep):
            before, after = (self._layer_groups * done // num_parts for done in (num_done - 1, num_done))
            for group in range(before + 1, after + 1):
                self._on_computed(LayersComputed(step.step_id, group))

    def end(self, step: Step, start_ns: int) -> None:
        if self._is_dead:
            return
        now_ns = self._timeline.now_ns
        if isinstance(step, PrefillStep):
            self._gpu_free_ns = now_ns
            self._timeline.after(0, self._end_launched, order=self._order)
        else:
            self.run(step, start_ns, now_ns)

    def _end_launched(self, _: None) -> None:
        assert self._begun is not None
        self._end_prefill(self._begun)


class Lockstep:
    """The ranks of one server. All ranks begin each step together."""

    def __init__(
        self, timeline: Timeline, num_ranks: int, order: EventPriority, nics: ServerNics | None = None
    ) -> None:
        """order: priority of this server's events, after the choices of all instances. nics: NICs between the server's
        hosts; None: the server has one host.
        """
        self._timeline = timeline
        self._num_ranks = num_ranks
        self._order = order
        self._nics = nics
        self._ranks: dict[str, Rank] = {}
        self._asked: dict[str, deque[Step]] = {}
        """Steps of each rank that wait for the next round, by instance id."""
        self._end_ns = 0
        self._looks = False
        self._exchanges = False
        """True during a round that exchanges bytes between hosts. The end of such a round is not known in advance."""

    def join(self, rank: Rank) -> None:
        """Adds a rank. The rank of a restarted instance replaces the earlier rank."""
        self._ranks[rank.instance.instance_id] = rank

    def leave(self, rank: Rank) -> None:
        self._asked.pop(rank.instance.instance_id, None)

    def ask(self, rank: Rank, step: Step) -> None:
        """Queues a step that a rank has chosen. The ranks begin steps together, in rounds: each round takes the first
        queued step of every rank that has one.
        """
        self._asked.setdefault(rank.instance.instance_id, deque()).append(step)
        if not self._looks and not self._exchanges:
            self._look_at(self._timeline.now_ns)

    def _look_at(self, time_ns: int) -> None:
        self._looks = True
        self._timeline.after(time_ns - self._timeline.now_ns, self._look, order=self._order)

    def _look(self, _: None) -> None:
        """Begins the next round, in which the ranks run their next steps together, if the last round has ended and the
        ranks' hosts are free. Otherwise tries again as soon as both conditions hold. No effect if no rank has a step.
        """
        self._looks = False
        if not self._asked:
            return
        busy_until_ns = max(self._end_ns, *(rank.free_ns for rank in self._ranks.values() if rank.is_busy), 0)
        if busy_until_ns > self._timeline.now_ns:
            self._look_at(busy_until_ns)
        else:
            self._begin_round()

    def _begin_round(self) -> None:
        steps = [(self._ranks[name], self._asked[name].popleft()) for name in self._ranks if name in self._asked]
        self._asked = {name: steps for name, steps in self._asked.items() if steps}
        start_ns = max([rank.ready_ns(step) for rank, step in steps])
        expert_tokens = mean_expert_tokens(steps, self._num_ranks)
        ends_ns = [rank.end_ns(step, start_ns, expert_tokens) for rank, step in steps]
        if self._nics is not None:
            self._begin_exchange(self._nics, steps, start_ns, expert_tokens, ends_ns)
            return
        self._end_ns = max(ends_ns)
        for rank, step in steps:
            rank.run(step, start_ns, self._end_ns)
        if self._asked:
            self._look_at(self._end_ns)

    def _begin_exchange(
        self,
        nics: ServerNics,
        steps: Sequence[tuple[Rank, Step]],
        start_ns: int,
        expert_tokens: float,
        ends_ns: Sequence[int],
    ) -> None:
        """Begins a round that ends when all ranks have exchanged their bytes between hosts. expert_tokens: number of
        tokens that each rank sends to experts, as the mean over all ranks. ends_ns: times in ns at which the ranks'
        steps would end on idle links.
        """
        num_tokens = dict.fromkeys(self._ranks, 0)
        computing_ns = 0
        for (rank, step), end_ns in zip(steps, ends_ns, strict=True):
            name, num = rank.instance.instance_id, rank.num_tokens(step)
            num_tokens[name], decodes = num, isinstance(step, DecodeStep)
            alone_ns = nics.computing_ns(name, end_ns - start_ns, num, expert_tokens, decodes=decodes)
            computing_ns = max(computing_ns, alone_ns)
            rank.launch(step, start_ns)
        self._exchanges = True
        nics.exchange(
            num_tokens,
            expert_tokens,
            computing_ns,
            decodes=all(isinstance(step, DecodeStep) for _, step in steps),
            on_part=partial(self._on_part, steps),
            on_end=partial(self._end_exchange, steps, start_ns),
        ).begin_after(start_ns - self._timeline.now_ns)

    def _on_part(self, steps: Sequence[tuple[Rank, Step]], num_done: int, num_parts: int) -> None:
        for rank, step in steps:
            rank.pass_layers(step, num_done, num_parts)

    def _end_exchange(self, steps: Sequence[tuple[Rank, Step]], start_ns: int) -> None:
        self._exchanges, self._end_ns = False, self._timeline.now_ns
        for rank, step in steps:
            rank.end(step, start_ns)
        if self._asked:
            self._look_at(self._end_ns)


def mean_expert_tokens(steps: Sequence[tuple[Rank, Step]], num_ranks: int) -> float:
    """Mean number of tokens that a rank gives to the experts in a round. steps: the ranks that have a step, with their
    steps. num_ranks: number of all ranks of the server.

    If all ranks with a step decode in CUDA graphs, each rank runs the graph of the largest batch, also a rank without
    requests (SGLang 0.5.12, model_executor/cuda_graph_runner.py:1245).
    """
    tokens = [rank.num_tokens(step) for rank, step in steps]
    return max(tokens) if all(rank.pads(step) for rank, step in steps) else sum(tokens) / num_ranks
