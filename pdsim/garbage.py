"""Pauses the garbage collector while it would find nothing."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Context without the collector, for code that makes many objects that stay. Reference counts still free
    objects.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def search_seldom() -> None:
    """Makes collections rare, and skips the one at the end of the process, for programs with few reference cycles."""
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
