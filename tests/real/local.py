"""A cluster in one process: instances, executors and model runners. Workers take turns at random, and transfers are
copies between two caches.
"""

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from random import Random

from pdreal.control.requests import Sampling
from pdreal.model.draft import DraftHead
from pdreal.rank.drafting import Drafter
from pdreal.rank.executor import Executor
from pdreal.rank.runner import ModelRunner
from pdreal.rank.speculation import Speculation

from pdsim.core import messages as m
from pdsim.core.instance import instance_loop
from pdsim.core.invariants import check, check_idle
from pdsim.core.messages import TransferUnit
from pdsim.core.sequence import TokenIds
from pdsim.scenario.building.cluster import build
from pdsim.sim.bus import Timeline
from tests.real.models import tiny_model
from tests.support import request, small, small_aggregated


class Worker:
    """An instance with a single rank. Computes each step as late as the instance's steps in flight allow. Copies and
    transfer units stay in order with the steps.
    """

    def __init__(self, instance, scenario, end_tokens, carry_out):
        self.instance = instance
        self.inbox = []
        self.executor = Executor(instance, instance.cache.page_size, end_tokens, Speculation.of(scenario))
        drafts = scenario.acceptance
        self.runner = ModelRunner(
            tiny_model(),
            num_pages=instance.cache.pool.num_pages,
            page_size=instance.cache.page_size,
            num_host_pages=0 if instance.cache.host is None else instance.cache.host.pool.num_pages,
            drafter=drafts and Drafter(DraftHead(tiny_model()), drafts.draft_tokens, 64),
        )
        self._carry_out = carry_out
        self._in_flight = deque()
        self._answer = None
        self._loop = instance_loop(
            instance, drain=self._drain, carry_out=lambda commands: carry_out(self, commands), clock=Timeline()
        )

    def turn(self) -> bool:
        """Lets the instance choose once, and computes if the instance waits or has all its steps in flight. True: there
        was something to do.
        """
        asked = self._loop.send(self._answer)
        check(self.instance)
        self._answer = None
        waits = isinstance(asked, m.Wait)
        if not waits:
            self._in_flight.append((asked, self.executor.begin(asked)))
        num_steps = sum(isinstance(work, tuple) for work in self._in_flight)
        if num_steps == self.instance.max_steps_in_flight or waits:
            self._work()
        return not waits or self._answer is not None or bool(self.inbox)

    def later(self, work) -> None:
        """Calls `work` after the steps that are begun now."""
        self._in_flight.append(work)

    def _work(self) -> None:
        """Does the work that is begun, in order, up to the end of a step."""
        while self._in_flight and self._answer is None:
            work = self._in_flight.popleft()
            if isinstance(work, tuple):
                step, batch = work
                computed = self.runner.run(batch)
                self._answer = self.executor.finish(step, computed, seeds=self.runner.seeds).result
            else:
                work()

    def _drain(self):
        inbox, self.inbox = self.inbox, []
        return inbox


@dataclass
class Local:
    """Serves prompts until all have ended. `outputs` and `failed` have the tokens, or the reason of a failure, by
    request.
    """

    scenario: object
    sampling: Sampling
    end_tokens: tuple[int, ...] = ()
    reference: dict = field(default_factory=dict)
    outputs: dict = field(default_factory=dict)
    failed: dict = field(default_factory=dict)
    num_retractions: int = 0
    copies: list = field(default_factory=list)
    num_cached_tokens: int = 0
    seed: int = 0

    def serve(self, prompts):
        instances = build(self.scenario).instances
        self.workers = {i.instance_id: Worker(i, self.scenario, self.end_tokens, self._carry_out) for i in instances}
        names = [*self.workers, *self.workers][:2]  # of an aggregated instance twice its own
        for request_id, prompt in enumerate(prompts):
            for worker in self.workers.values():
                ids = TokenIds(prompt)
                reference = tuple(self.reference.get(request_id, ()))
                worker.executor.add(request_id, ids, self.sampling._replace(reference=reference))
                new = m.NewRequest(request_id, request_id, ids, self.sampling.max_tokens, *names)
                worker.inbox.append(new)
        rng, idle = Random(self.seed), 0
        workers = [*self.workers.values()]
        while idle < 2 or any(worker.inbox for worker in workers):
            order = rng.sample(workers, len(workers))
            idle = 0 if sum(worker.turn() for worker in order) else idle + 1
        assert len(self.outputs) + len(self.failed) == len(prompts), [w.instance.waiting_for() for w in workers]
        for worker in workers:
            check_idle(worker.instance)

    def _carry_out(self, worker, commands):
        for command in commands:
            match command:
                case m.Send():
                    self.workers[command.to].inbox.append(command.message)
                case TransferUnit():
                    worker.later(partial(self._transfer, command))
                case m.WriteBackup() | m.LoadBack():
                    self.copies.append((worker.instance.instance_id, command))
                    worker.later(partial(self._copy, worker, command))
                case m.Retracted():
                    self.num_retractions += 1
                case m.SaveKv():
                    worker.later(partial(worker.runner.run, worker.executor.save(command)))
                case m.LoadKv():
                    worker.later(partial(worker.runner.run, worker.executor.load(command)))
                case m.Finished():
                    self.outputs[command.request_id] = worker.executor.output(command.request_id)
                    worker.executor.forget(command.request_id)
                case m.Failed():
                    self.failed[command.request_id] = command.reason
                    worker.executor.forget(command.request_id)
                case m.PrefillDone():
                    worker.executor.forget(command.request_id)

    def _copy(self, worker, command):
        worker.runner.run(command)
        if isinstance(command, m.LoadBack) and worker.instance.instance_id.startswith("decode"):
            worker.inbox.append(m.LoadedBack(command.request_id))

    def _transfer(self, unit):
        """Carries out a transfer unit at once. Other tests cover what the core does between the planning of a unit and
        its arrival.
        """
        source, target = self.workers[unit.source], self.workers[unit.target]
        page_size = source.runner.kv.page_size
        pages = source.runner.kv.memory.unflatten(1, (-1, page_size))
        into = target.runner.kv.memory.unflatten(1, (-1, page_size))
        into[:, list(unit.target_pages)] = pages[:, list(unit.source_pages)]
        if unit.is_last:
            first = source.executor.output(unit.request_id)[0]
            seed = source.executor.seed(unit.request_id)
            target.executor.add_first_token(unit.request_id, first, 0, None, seed)
            target.inbox.append(m.KvArrived(unit.request_id, unit.first_token_ends))
            source.inbox.append(m.KvSent(unit.request_id))


def pair(**changes):
    return small(request(0, 4, 4), model="tiny-qwen3", decode__retraction_backup=True, **changes)


def aggregated(**changes):
    return small_aggregated(request(0, 4, 4), model="tiny-qwen3", **changes)
