"""Engines that compute tasks: in this process, in a pool of processes, or on a Ray cluster."""

import os
import pickle
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.points.result import PointResult, Replication, replication
from pdsim.study.points.store import DAMAGED, Store
from pdsim.study.points.tasks import Done, Point, Task
from pdsim.study.points.worker import compute, crashed
from pdsim.study.verdict.slo import Slo

_ATTEMPTS = 2
_COMPUTED_AGAIN = ("crashed", DAMAGED)
"""Statuses of kept runs that are computed again. A worker may have died for a reason that lies outside the run."""

Progress = Callable[[int, int], None]
"""Callback that is called with two numbers: how many runs were computed so far, and how many must be computed in total,
as far as known. Runs whose results were stored before do not count.
"""
_PATIENCE_S = 5.0
_LEAST_PENDING = 64
"""Ray gets at most this number of tasks at a time, or four per CPU if that is more. Waiting tasks make a Ray cluster
that grows on demand add machines.
"""
_LET_IN = (
    "a cluster that refuses the connection needs a token (RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
    "~/.ray/auth_token, as on its head) or has another version of Ray or Python"
)


class Engine(Protocol):
    def run(self, tasks: Sequence[Task]) -> Iterator[Done]:
        """Yields the result of each task, in any order."""

    def close(self) -> None: ...


class InProcessEngine:
    """Computes tasks in this process. A crash ends the whole command."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Done]:
        return map(compute, tasks)

    def close(self) -> None:
        """No effect: this engine holds no resources."""


class WorkerDiedError(Exception):
    """Raised if a worker process died. The message says how the process died."""


class Pool:
    """Worker processes on this machine. They start when there is work for them, and stay until the pool is closed. If a
    worker dies, another worker tries its task once more.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._idle: list[_Worker] = []
        self._busy: dict[Any, tuple[_Worker, Task, int]] = {}
        """Busy workers by their output stream, each with its task and the number of the attempt."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Done]:
        waiting = deque((task, 1) for task in tasks)
        while waiting or self._busy:
            self._hand_out(waiting)
            for stream in wait(list(self._busy)):
                worker, task, attempt = self._busy.pop(stream)
                try:
                    done = worker.answer()
                except WorkerDiedError as death:
                    if attempt < _ATTEMPTS:
                        waiting.appendleft((task, attempt + 1))
                    else:
                        yield crashed(task, f"{_ATTEMPTS} times, the last time of {death}")
                else:
                    self._idle.append(worker)
                    self._hand_out(waiting)  # it goes on while its answer is kept
                    yield done

    def close(self) -> None:
        """Stops all workers and drops unfinished tasks."""
        for worker in [*self._idle, *(worker for worker, _, _ in self._busy.values())]:
            worker.stop()
        self._idle.clear()
        self._busy.clear()

    def _hand_out(self, waiting: deque[tuple[Task, int]]) -> None:
        while waiting and len(self._busy) < self._num_workers:
            task, attempt = waiting.popleft()
            worker = self._idle.pop() if self._idle else _Worker()
            worker.send(task)
            self._busy[worker.answers] = (worker, task, attempt)


class _Worker:
    """A process that runs the module pdsim.study.points.worker, with the module search path of this process."""

    def __init__(self) -> None:
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pdsim.study.points.worker"],  # -P: not the folder that it starts in, too
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            process_group=0,  # a terminal's Ctrl-C goes to the pool alone, which closes the input
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._tasks, self.answers = self._process.stdin, self._process.stdout

    def send(self, task: Task) -> None:
        with suppress(BrokenPipeError):  # it has died, which its answer will show
            pickle.dump(task, self._tasks)
            self._tasks.flush()

    def answer(self) -> Done:
        try:
            done: Done = pickle.load(self.answers)  # noqa: S301  it is our own process
        except (EOFError, pickle.UnpicklingError):
            code = self.stop()
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise WorkerDiedError(how) from None
        return done

    def stop(self) -> int:
        """Closes the worker's input, which ends the process. Returns its exit code (below 0: minus the signal)."""
        with suppress(BrokenPipeError):
            self._tasks.close()
        self.answers.close()
        return self._process.wait()


class RayCluster:
    """A Ray cluster at an address. Without an address, Ray uses the variable RAY_ADDRESS or this machine."""

    def __init__(self, address: str | None) -> None:
        try:
            import ray  # noqa: PLC0415  an extra
        except ImportError:
            raise ConfigError("engine ray needs Ray, which is not installed: pip install 'pdsim[ray]'") from None
        self._ray: Any = ray
        named = os.environ.get("RAY_ADDRESS", "")
        if address is not None:
            _check_listens(address, f"--engine ray:{address}")
        elif named.rpartition(":")[2].isdigit():  # neither auto nor local, nor an address of another scheme
            _check_listens(named, f"--engine ray: RAY_ADDRESS {named}")
        self._prints = ExitStack()
        self._prints.enter_context(redirect_stdout(sys.stderr))  # Ray's own, of workers that die
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except Exception as wrong:  # noqa: BLE001  Ray has many kinds of them
            self._prints.close()
            where = address or os.environ.get("RAY_ADDRESS") or "this machine"
            raise ConfigError(f"engine ray: {where}: {str(wrong).splitlines()[0]}; {_LET_IN}") from None
        self._compute = ray.remote(max_retries=1, num_cpus=1)(compute)

    def run(self, tasks: Sequence[Task]) -> Iterator[Done]:
        waiting, pending = iter(tasks), dict[Any, Task]()
        most = max(_LEAST_PENDING, 4 * int(self._ray.cluster_resources().get("CPU", 1)))
        while True:
            for task in islice(waiting, most - len(pending)):
                pending[self._compute.remote(task)] = task
            if not pending:
                return
            (ready, *_), _ = self._ray.wait(list(pending), num_returns=1)  # looks at each of them
            task = pending.pop(ready)
            try:
                yield self._ray.get(ready)
            except self._ray.exceptions.RayError as death:
                yield crashed(task, f"twice: {str(death).splitlines()[0]}")

    def close(self) -> None:
        self._ray.shutdown()
        self._prints.close()


def _check_listens(address: str, named: str) -> None:
    """Raises ConfigError if the address is neither HOST:PORT nor ray://HOST:PORT, or if nothing accepts a TCP
    connection there within _PATIENCE_S seconds. Without this check, Ray waits for minutes before it fails. named: text
    that says in the error who gave the address.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"{named}: expected HOST:PORT or ray://HOST:PORT")
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE_S).close()
    except OSError as wrong:
        raise ConfigError(
            f"{named}: cannot be reached: {wrong}; is it running (ray start --head --port {port})?"
        ) from None


def open_engine(name: str, num_workers: int | None) -> Engine:
    """Opens the engine of this name: pool, here, ray or ray:ADDRESS. Raises ConfigError if the name is unknown,
    `num_workers` of a pool is below 1, Ray is not installed, or the Ray cluster cannot be reached.

    num_workers: number of processes of the pool; None: one per CPU. The other engines ignore this number.
    """
    kind, _, address = name.partition(":")
    if kind == "ray":
        return RayCluster(address or None)
    if name == "here":
        return InProcessEngine()
    if name != "pool":
        raise ConfigError(f"--engine {name}: there are pool, here, ray and ray:ADDRESS")
    if num_workers is not None and num_workers < 1:
        raise ConfigError(f"--jobs {num_workers}: at least 1")
    return Pool(num_workers or os.cpu_count() or 1)


class Work:
    """Computes those runs of points that a store of results lacks, and counts the runs."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        progress: Progress | None = None,
        slos: Mapping[str, Slo] | None = None,
    ) -> None:
        """engine: computes the runs. progress: called after each run; None: nothing is called. slos: SLOs that judge
        the results, by name. None: results are not judged.
        """
        self.store = store
        self._engine = engine
        self._progress = progress
        self._slos = slos
        self._answers: dict[str, Replication] = {}
        """Judged results by key (Task.key), each read or computed once. Empty if `slos` was None."""
        self._rows: dict[str, dict[str, Any]] = {}
        """Rows that the last call of `compute` read from the store, by key (Task.key). Empty unless `slos` was None."""
        self._seen: set[str] = set()
        self._with_result: set[str] = set()
        self.num_computed = 0
        self.num_kept = 0
        self.num_damaged = 0

    def compute(self, points: Iterable[Point]) -> None:
        """Computes those runs of these points that earlier calls have not seen and that the store lacks or has with a
        status in _COMPUTED_AGAIN. Reads the other new runs from the store; if results are not judged (`slos` was
        None), holds their rows in memory until the next call.
        """
        self._rows.clear()
        tasks: dict[str, Task] = {task.key: task for point in points for task in point.tasks.values()}
        new = [task for key, task in tasks.items() if key not in self._seen]
        missing = [task for task in new if self._lacks(task.key)]
        self._seen |= tasks.keys()
        self.num_kept += len(new) - len(missing)
        total = self.num_computed + len(missing)
        for done in self._engine.run(missing):
            self.store.keep(done)
            if self._slos is not None:
                self._answers[done.key] = replication(done.row, self._slos)
            self.num_computed += 1
            self._note(done.key, done.row)
            if self._progress is not None:
                self._progress(self.num_computed, total)

    def _lacks(self, key: str) -> bool:
        """True if the run with this key must be computed: its file is missing or damaged, or its worker died. Otherwise
        reads the stored result into memory and returns False.
        """
        row = self.store.kept(key)
        if row is None:
            return True
        self.num_damaged += row["status"] == DAMAGED
        if row["status"] in _COMPUTED_AGAIN:
            return True
        self._note(key, row)
        if self._slos is None:
            self._rows[key] = row
        else:
            self._answers[key] = replication(row, self._slos)
        return False

    def _note(self, key: str, row: Mapping[str, Any]) -> None:
        if row["status"] == "ok":
            self._with_result.add(key)

    def has_result(self, key: str) -> bool:
        """True if the run of this key was computed or read from the store, did not fail, and did not end early."""
        return key in self._with_result

    def forget(self, points: Iterable[Point]) -> None:
        """Removes the results of points from memory and from the store. Only the web page calls this, whose store is
        temporary.
        """
        for key in {task.key for point in points for task in point.tasks.values()}:
            self._seen.discard(key)
            self._with_result.discard(key)
            self._answers.pop(key, None)
            self._rows.pop(key, None)
            self.store.remove(key)

    def result(self, point: Point) -> PointResult:
        """Returns the results of a point whose runs are computed, judged by the SLOs if there are any."""
        keys = [task.key for task in point.tasks.values()]
        runs = [self._answers.get(key) or replication(self.store.read(key), self._slos or {}) for key in keys]
        return PointResult(point.number, point.changes, runs)

    def rows(self, point: Point) -> list[dict[str, Any]]:
        """The rows of results of a computed point, one for each seed."""
        keys = [task.key for task in point.tasks.values()]
        return [self._rows.get(key) or self.store.read(key) for key in keys]
