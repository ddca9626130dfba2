"""No search for garbage where none comes about."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Switch the collector off while much is made that stays: reference counts free the rest at once."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def search_seldom() -> None:
    """Lets the collector look seldom, and not at all as the process ends: for one that makes little garbage."""
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
