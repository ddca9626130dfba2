"""A process of the pool: takes tasks from its standard input and answers on its standard output, until input ends."""

import gc
import os
import pickle
import signal
import sys
import warnings
from queue import SimpleQueue
from threading import Thread
from typing import IO

from pdsim.study.compute import Done, compute
from pdsim.study.plan import Task
from pdsim.workload.trace_file import InputWarning


def main() -> None:
    warnings.simplefilter("ignore", InputWarning)  # who planned the tasks has told it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the pool that is interrupted, and closes the input
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a policy prints is no answer
    source = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    tasks: SimpleQueue[Task] = SimpleQueue()
    Thread(target=_receive, args=(source, tasks), daemon=True).start()
    gc.disable()  # each task begins with a search for what the one before left
    _answer(compute(tasks.get()), answers)
    gc.collect()
    gc.freeze()  # code and workload stay: no search looks at them again
    while True:
        _answer(compute(tasks.get()), answers)


def _answer(done: Done, answers: IO[bytes]) -> None:
    pickle.dump(done, answers)
    answers.flush()


def _receive(source: IO[bytes], tasks: "SimpleQueue[Task]") -> None:
    """Nobody waits for the answer any more when the input ends, however the other side ended."""
    try:
        while True:
            tasks.put(pickle.load(source))  # noqa: S301  it is our own process
    except EOFError:
        os._exit(0)


if __name__ == "__main__":
    main()
