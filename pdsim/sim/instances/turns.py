"""Ranks of a server with data-parallel attention and pipeline stages, whose micro-batches take turns together.

In each turn every rank chooses a step of the same micro-batch, because SGLang's ranks agree before each forward
(0.5.23, managers/scheduler.py:4008, managers/scheduler_pp_mixin.py:121). A turn begins when the micro-batch's last step
has ended and the hosts of all ranks are free. Turns in which no rank has a step take no time. While no step is under
way, all ranks rest until one of them gets a message.
"""

from collections import deque
from collections.abc import Sequence

from simpy.events import EventPriority

from pdsim.core import messages as m
from pdsim.core.invariants import AnyInstance
from pdsim.cost.step_times import PipelineTimes
from pdsim.sim.bus import Bus, Timeline
from pdsim.sim.instances.actor import Parts
from pdsim.sim.instances.lockstep import Lockstep, Rank, mean_expert_tokens


class StagedRank(Rank):
    """A rank of a server with pipeline stages. In each turn of the server, all its ranks choose a step of the same
    micro-batch.
    """

    def __init__(self, bus: Bus, instance: AnyInstance, parts: Parts, turns: "Turns") -> None:
        super().__init__(bus, instance, parts, turns)
        self._turns = turns

    def choose(self) -> None:
        """Chooses the rank's step for the server's next turn, as soon as the rank's host is free. In a turn, each rank
        chooses a step of the same micro-batch, or a wait.
        """
        if self._host.is_busy:
            self._host.when_free(self._choose, None, self._order)
        else:
            self._choose(None)

    def end_rest(self) -> None:
        """Ends the rank's wait, because a rank of the server got a message or has waited long enough, and all ranks
        then choose a step.
        """
        self._waits = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def rest(self, wait: m.Wait) -> None:
        self._begin_wait(wait)

    def _advance(self, answer: m.Result | None) -> None:
        if self._is_pausing:
            self._is_pausing = False
            for result in self._held:
                self._timeline.after(0, self._see_result, result, self._order)
            self._held = []
            self._choose(None)
        elif answer is None:
            self._turns.wake()
        else:
            self._choose(answer)

    def _choose(self, answer: m.Result | None) -> None:
        asked = self._loop.send(answer)
        if isinstance(asked, m.Pause):
            self._is_pausing = True
            self._advance_later()
            return
        if self._on_choice is not None:
            self._on_choice(self.instance)
        self._num_in_flight += not isinstance(asked, m.Wait)
        self._turns.answer(self, asked)

    def pass_through(self, step: m.Step, start_ns: int, first_ns: int, end_ns: int) -> None:
        """Runs a step from start_ns to end_ns. The step leaves the first stage at first_ns."""
        if isinstance(step, m.PrefillStep):
            self._run_prefill(step, start_ns, end_ns, first_ns - start_ns)
            self._gpu_free_ns = first_ns
        else:
            assert self._staged is not None
            copying_ns, self._decode.copying_ns = self._decode.copying_ns, 0
            self._staged.run(step, start_ns, first_ns, end_ns, copying_ns)


class Turns(Lockstep):
    """Lets the ranks of one server with pipeline stages choose their steps in turns. There are as many slots as stages;
    a slot has one step under way at a time, and each turn chooses the next step of one slot. Ranks of a server with
    pipeline stages never die.
    """

    def __init__(self, timeline: Timeline, num_ranks: int, order: EventPriority, pipeline: PipelineTimes) -> None:
        super().__init__(timeline, num_ranks, order)
        num_slots = len(pipeline.layers)
        self._pipeline = pipeline
        self._stage_free_ns = [0] * num_slots
        self._staged: dict[str, StagedRank] = {}
        self._slot = self._num_idle = 0
        """Slot of the next turn, and number of turns without a step since the last step."""
        self._with_step: list[set[str]] = [set() for _ in range(num_slots)]
        """Ids of the ranks that had a step in the last turn of each slot. These ranks choose again when they have the
        step's result; the server asks all other ranks in the slot's next turn."""
        self._under_way: deque[int] = deque()
        """Slots whose steps have not ended, oldest first."""
        self._chosen: dict[str, deque[m.Step | m.Wait]] = {}
        """Choices of each rank for the next turns."""
        self._rests = True

    def join(self, rank: Rank) -> None:
        super().join(rank)
        assert isinstance(rank, StagedRank)
        self._staged[rank.instance.instance_id] = rank
        self._chosen[rank.instance.instance_id] = deque()

    def wake(self) -> None:
        """Begins a turn, in which each rank chooses a step, if all ranks of the server wait for a message. Otherwise
        does nothing. The turn begins after the other events of this instant.
        """
        if self._rests:
            self._rests = False
            self._timeline.after(0, self._wake, order=self._order)

    def answer(self, rank: StagedRank, chosen: m.Step | m.Wait) -> None:
        """Notes the step, or the wait, that a rank chose for this turn. The chosen steps begin when all ranks have
        chosen, the slot's last step has ended, and the hosts of all ranks are free.
        """
        self._chosen[rank.instance.instance_id].append(chosen)
        self._look_soon()

    def _wake(self, _: None) -> None:
        self._num_idle = 0
        for rank in self._staged.values():
            rank.end_rest()
        self._ask()

    def _ask(self) -> None:
        for name, rank in self._staged.items():
            if name not in self._with_step[self._slot]:
                rank.choose()

    def _look_soon(self) -> None:
        if not self._looks and self._slot not in self._under_way and all(self._chosen.values()):
            self._look_at(self._timeline.now_ns)

    def _look(self, _: None) -> None:
        self._looks = False
        busy_until_ns = max([rank.free_ns for rank in self._ranks.values() if rank.is_busy], default=0)
        if busy_until_ns > self._timeline.now_ns:
            self._look_at(busy_until_ns)
        else:
            self._begin_turn()

    def _begin_turn(self) -> None:
        chosen = [(rank, self._chosen[name].popleft()) for name, rank in self._staged.items()]
        steps = [(rank, step) for rank, step in chosen if not isinstance(step, m.Wait)]
        self._num_idle = 0 if steps else self._num_idle + 1
        self._with_step[self._slot] = {rank.instance.instance_id for rank, _ in steps}
        if steps:
            self._begin(steps)
        self._slot = (self._slot + 1) % len(self._with_step)
        if self._num_idle == len(self._with_step):
            self._rests = True
            for rank, wait in chosen:
                assert isinstance(wait, m.Wait)
                rank.rest(wait)
        elif self._slot not in self._under_way:
            self._ask()
            self._look_soon()

    def _begin(self, steps: Sequence[tuple[StagedRank, m.Step]]) -> None:
        start_ns = max(self._stage_free_ns[0], *(rank.ready_ns(step) for rank, step in steps))
        expert_tokens = mean_expert_tokens(steps, self._num_ranks)
        most_tokens = max([rank.num_tokens(step) for rank, step in steps])
        largest_ns = max([rank.duration_ns(step, start_ns, expert_tokens) for rank, step in steps])
        loads = [load for rank, _ in steps if (load := rank.take_load()) is not None]
        end_ns = self._pipeline.pass_on(start_ns, largest_ns, most_tokens, self._stage_free_ns, loads)
        self._under_way.append(self._slot)
        self._timeline.after(end_ns - self._timeline.now_ns, self._end_turn, order=self._order)
        for rank, step in steps:
            rank.pass_through(step, start_ns, self._stage_free_ns[0], end_ns)

    def _end_turn(self, _: None) -> None:
        if self._under_way.popleft() == self._slot:
            self._ask()
            self._look_soon()
