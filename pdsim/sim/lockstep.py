"""Ranks of a server with data-parallel attention. All ranks begin a step together, and it lasts as long as the slowest
rank's.

Experts compute the tokens of all ranks, so no rank can proceed alone; a rank without work takes part with no tokens. A
round begins when every rank's host is ready and at least one rank has a step, as SGLang's ranks agree before each
forward (prepare_mlp_sync_batch_raw).
"""

from collections import deque
from typing import TYPE_CHECKING

from simpy.events import EventPriority

from pdsim.core.invariants import AnyInstance
from pdsim.core.messages import DecodeStep, MixedStep, PrefillStep, Step
from pdsim.sim.actor import Actor
from pdsim.sim.executor import DecodeClock
from pdsim.sim.timeline import Timeline

if TYPE_CHECKING:
    from pdsim.sim.simulation import Simulation


class Rank(Actor):
    """A rank, whose steps begin with those of the other ranks."""

    def __init__(self, simulation: "Simulation", instance: AnyInstance, lockstep: "Lockstep") -> None:
        super().__init__(simulation, instance)
        self._lockstep = lockstep
        lockstep.join(self)

    @property
    def is_busy(self) -> bool:
        """True while its host processes a result or sends KV."""
        return not self._is_dead and self._host.is_busy

    @property
    def free_ns(self) -> int:
        """Time when its host becomes free."""
        return self._host.free_ns

    def kill(self) -> None:
        super().kill()
        self._lockstep.leave(self)

    def go_at(self, pace: float) -> None:
        """Posting does not slow a rank: the slowdown was measured only without data-parallel attention."""

    def _begin_decode(self, step: DecodeStep) -> None:
        self._lockstep.ask(self, step)

    def _begin_prefill(self, step: PrefillStep) -> None:
        self._lockstep.ask(self, step)

    def _begin_mixed(self, step: MixedStep) -> None:
        self._lockstep.ask(self, step)

    # What a round asks of it.

    def ready_ns(self, step: Step) -> int:
        """Earliest time at which its step can begin."""
        if isinstance(step, PrefillStep):
            return self._prefill_start_ns()
        return self._timeline.now_ns + self._decode.copying_ns

    def num_tokens(self, step: Step) -> int:
        """Number of tokens that it sends to experts."""
        if isinstance(step, PrefillStep):
            return step.num_tokens
        if isinstance(step, MixedStep):
            return step.prefill.num_tokens
        return self._cost.num_computed(step.num_requests)

    def end_ns(self, step: Step, start_ns: int, expert_tokens: float) -> int:
        """Time when its step would end if no other rank were slower. Called once for each step, in order."""
        if isinstance(step, PrefillStep):
            return self._prefill_end_ns(start_ns, self._cost.prefill_ns(step, start_ns, expert_tokens))
        if isinstance(step, MixedStep):
            return start_ns + self._cost.mixed_ns(step, start_ns, expert_tokens)
        clock = DecodeClock()
        line = self._cost.shared_line(step.num_requests, expert_tokens)
        num_before, stall_ns = self._cost.next_stall(step.num_requests)
        self._cost.count_steps(step.num_requests, 1)
        clock.begin(line if num_before else line.later(stall_ns), step)
        return start_ns + max(1, clock.first_ns)

    def run(self, step: Step, start_ns: int, end_ns: int) -> None:
        if isinstance(step, PrefillStep):
            self._run_prefill(step, start_ns, end_ns)
        elif isinstance(step, MixedStep):
            self._decode.begin_one(step.decode, start_ns, end_ns - start_ns, step.prefill)
        else:
            self._decode.begin_one(step, start_ns, end_ns - start_ns)


class Lockstep:
    """The ranks of one server."""

    def __init__(self, timeline: Timeline, num_ranks: int, order: EventPriority) -> None:
        """order: rank of its events among the choices of all instances."""
        self._timeline = timeline
        self._num_ranks = num_ranks
        self._order = order
        self._ranks: dict[str, Rank] = {}
        self._asked: dict[str, deque[Step]] = {}
        """Steps that wait to begin, by rank."""
        self._end_ns = 0
        self._looks = False

    def join(self, rank: Rank) -> None:
        """Adds a rank, or its restarted instance."""
        self._ranks[rank.instance.instance_id] = rank

    def leave(self, rank: Rank) -> None:
        self._asked.pop(rank.instance.instance_id, None)

    def ask(self, rank: Rank, step: Step) -> None:
        """Begins this step in the next round that has no earlier step of the rank."""
        self._asked.setdefault(rank.instance.instance_id, deque()).append(step)
        if not self._looks:
            self._look_at(self._timeline.now_ns)

    def _look_at(self, time_ns: int) -> None:
        self._looks = True
        self._timeline.after(time_ns - self._timeline.now_ns, self._look, order=self._order)

    def _look(self, _: None) -> None:
        """Begins a round, or schedules the next attempt."""
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
        expert_tokens = sum([rank.num_tokens(step) for rank, step in steps]) / self._num_ranks
        self._end_ns = max([rank.end_ns(step, start_ns, expert_tokens) for rank, step in steps])
        for rank, step in steps:
            rank.run(step, start_ns, self._end_ns)
        if self._asked:
            self._look_at(self._end_ns)
