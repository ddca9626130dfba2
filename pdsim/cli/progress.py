"""What a command says on a terminal while it works."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_over(what: str, total: int | None, *, quiet: bool) -> Iterator[Callable[..., None]]:
    """A bar with rate and time left on a terminal, and nothing elsewhere.

    Call without an argument to advance by one, or with the new count and, if it has changed, the new total.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda _done=None, _total=None: None
        return
    from rich import progress as bars
    from rich.console import Console

    text, elapsed, left = bars.TextColumn, bars.TimeElapsedColumn(), bars.TimeRemainingColumn()
    columns = (text("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn(), elapsed)
    ahead = (text("{task.fields[rate]}"), text("left"), left)
    with bars.Progress(*columns, *ahead, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total, rate="")

        def advance(done: int | None = None, total: int | None = None) -> None:
            if done is None:
                progress.advance(task)
            else:
                progress.update(task, completed=done, total=total)
            speed = progress.tasks[task].speed
            progress.update(task, rate=f"{speed:,.2g}/s" if speed else "")

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
