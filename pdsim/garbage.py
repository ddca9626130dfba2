"""Pauses Python's garbage collector where it would find nothing to collect, or lets it run rarely."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Context in which the garbage collector is off, for code that makes many objects that stay. Reference counting
    still frees objects.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def search_seldom() -> None:
    """Lets the garbage collector run rarely, and not at the end of the process. For programs with few reference
    cycles.
    """
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
