"""What a command says on a terminal while it works."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_over(what: str, total: int, *, quiet: bool) -> Iterator[Callable[..., None]]:
    """A bar on a terminal, and nothing elsewhere. Call without an argument to advance by one, or with the new count."""
    if quiet or not sys.stderr.isatty():
        yield lambda _done=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)

        def advance(done: int | None = None) -> None:
            if done is None:
                progress.advance(task)
            else:
                progress.update(task, completed=done)

        yield advance


@contextmanager
def saying(what: str, *, quiet: bool) -> Iterator[None]:
    """A line on a terminal for as long as it takes, and nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    print(what, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
