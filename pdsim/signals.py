"""Handles the signals that end a program: Ctrl-C (SIGINT), SIGTERM, which job schedulers and containers send, and
SIGHUP, which a closed terminal sends.
"""

import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import current_thread, main_thread
from typing import NoReturn

_ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP do what Ctrl-C does: temporary folders are removed, and workers end. A signal
    that the program ignores, as it does SIGHUP under nohup, stays ignored. Does nothing in threads other than the main
    thread, because Python handles no signals there.
    """
    if current_thread() is not main_thread():
        yield
        return
    before = {number: signal.signal(number, _interrupt) for number in _heeded() if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _heeded() -> list[signal.Signals]:
    return [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]


def _interrupt(number: int, _frame: object) -> NoReturn:
    if number != signal.SIGTERM:  # so it is SIGHUP
        _leave_closed_terminal()
    raise KeyboardInterrupt


def _leave_closed_terminal() -> None:
    """Sends what is printed from now on to /dev/null if the terminal is closed: a write to it would raise an error."""
    for descriptor in (1, 2):
        with suppress(OSError):  # the caller closed it
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
                    os.dup2(nowhere.fileno(), descriptor)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Context in which the signals that end a program wait until the context's end. The context is for short work on
    files. Does nothing in threads other than the main thread, because Python handles no signals there.
    """
    if current_thread() is not main_thread():
        yield
        return
    waiting: list[int] = []
    before = {number: signal.signal(number, lambda number, _frame: waiting.append(number)) for number in _heeded()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if waiting:
            signal.raise_signal(waiting[0])
