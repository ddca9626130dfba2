"""Handles the signals that end a program: Ctrl-C (SIGINT), and SIGTERM, which job schedulers and containers send."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import NoReturn

_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Context in which SIGTERM does what Ctrl-C does: temporary folders are removed, and workers end. Does nothing in
    threads other than the main thread, because Python handles no signals there.
    """
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Context in which the signals that end a program wait until the context's end. The context is for short work on
    files. Does nothing in threads other than the main thread, because Python handles no signals there.
    """
    if current_thread() is not main_thread():
        yield
        return
    waiting: list[int] = []
    before = {number: signal.signal(number, lambda number, _frame: waiting.append(number)) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if waiting:
            signal.raise_signal(waiting[0])
