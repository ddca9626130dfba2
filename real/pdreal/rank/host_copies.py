"""Copies between an instance's pages and host memory: KV of retracted requests, and the host cache with its storage.

Ranks make copies between pages and host memory between steps, in the order of the instance's commands. Transfers,
however, read and write pages at any time. So commands that may start a transfer wait: on decode while pages are copied
to host memory, on prefill while pages are loaded from host memory. Threads of their own copy between host memory and
storage.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pdreal.control.clock import Timeline
from pdreal.control.logbook import InstanceLog
from pdreal.control.tasks import Compute
from pdreal.rank.executor import Executor
from pdreal.rank.group import ComputedTokens, RankGroup
from pdreal.rank.storage import Storage
from pdreal.settings.rank import RankSpec
from pdsim.core import messages as m
from pdsim.core.messages import TransferUnit
from pdsim.metrics.records import HostCopyRecord
from pdsim.scenario.building.sizing import layout_of


class HostCopies:
    def __init__(
        self,
        spec: RankSpec,
        group: RankGroup,
        executor: Executor,
        timeline: Timeline,
        log: InstanceLog,
        carry_out: Callable[[Sequence[m.Command]], None],
        tell: Callable[[m.Message], None],
    ) -> None:
        """spec: scenario and role of the instance. group: all ranks of the instance, which do the copies. executor:
        knows the sequences. carry_out: function that carries out commands of the instance; commands that must wait for
        a copy are held back, and given to this function after the copy. tell: function that gives a message to the
        instance.
        """
        self._instance_id = spec.instance_id
        self._group = group
        self._executor = executor
        self._timeline = timeline
        self._log = log
        self._carry_out = carry_out
        self._tell = tell
        layout = layout_of(spec.scenario, spec.role)
        self._page_bytes = layout.kv_token_bytes * spec.scenario.page_size * layout.tp
        """Bytes of the KV of one page, all ranks together."""
        self._storage = None if spec.store is None else Storage(spec, group, timeline, log, tell)
        self._is_decode = spec.role == "decode"
        self._num_awaited = 0
        """Number of running copies for which commands are held back: copies out of pages that decode may then grant,
        and copies into pages that prefill may then send."""
        self._held_back: list[m.Command] = []

    def hold_back(self, command: m.Send | TransferUnit) -> bool:
        """Holds back a command while copies of pages run for which transfers must wait: on decode every message to
        another process, because the message may grant pages; on prefill transfer units. Returns True if the command is
        held back.
        """
        if not self._num_awaited or (isinstance(command, m.Send) and not self._is_decode):
            return False
        self._held_back.append(command)
        return True

    def save(self, command: m.SaveKv) -> None:
        self._await(Compute(self._executor.save(command)), "saving KV to host memory", lambda _: None)

    def load(self, command: m.LoadKv) -> None:
        self._group.compute(Compute(self._executor.load(command)))

    def forget(self, request_id: int) -> None:
        if (work := self._executor.forget(request_id)) is not None:
            self._group.compute(Compute(work))

    def write_back(self, command: m.WriteBackup) -> None:
        if self._storage is not None:
            self._storage.on_copy(command.host_pages)
        done = partial(self._on_written, len(command.pages))
        if self._is_decode:
            self._await(Compute(command), "writing KV to host memory", done)
        else:
            self._group.begin_or_fail(Compute(command), "writing KV to host memory", done)

    def _on_written(self, num_pages: int, results: list[Any]) -> None:
        self._record("write", num_pages, results)
        if self._storage is not None:
            self._storage.on_copied()

    def on_storage(self, command: m.StorageCopy) -> None:
        assert self._storage is not None
        self._storage.begin(command)

    def load_back(self, command: m.LoadBack) -> None:
        done = partial(self._record, "load", len(command.pages))
        if not self._is_decode:
            self._await(Compute(command), "loading KV from host memory", done)
            return

        def on_loaded(computed: list[Any]) -> None:
            done(computed)
            self._tell(m.LoadedBack(command.request_id))

        self._group.begin_or_fail(Compute(command), "loading KV from host memory", on_loaded)

    def _await(self, task: Compute, what: str, on_done: Callable[[list[Any]], None]) -> None:
        """Begins a task on all ranks that copies from or into pages. Until all ranks have done the task, `hold_back`
        holds back commands that may let a transfer use such pages: messages of decode, transfer units of prefill. what:
        the work, for the message if a rank fails. on_done: called with the results of all ranks.
        """
        self._num_awaited += 1

        def release(computed: list[Any]) -> None:
            on_done(computed)
            self._num_awaited -= 1
            if not self._num_awaited:
                held, self._held_back = self._held_back, []
                self._carry_out(held)

        self._group.begin_or_fail(task, what, release)

    def _record(self, kind: str, num_pages: int, results: list[Any]) -> None:
        """Records a copy, from the first rank's start to the last rank's end. kind: load (from the host cache) or
        write (to it). results: one ComputedTokens per rank; those of followers are plain lists.
        """
        ranks = [ComputedTokens(*result) for result in results]
        start_ns = min(rank.start_ns for rank in ranks) - self._timeline.epoch_ns
        end_ns = max(rank.end_ns for rank in ranks) - self._timeline.epoch_ns
        copy = HostCopyRecord(self._instance_id, kind, start_ns, end_ns, num_pages, num_pages * self._page_bytes)
        self._log.note("on_host_copy", copy)
