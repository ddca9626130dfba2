"""Whether files may name modules of a user's own. To import a module is to run the code of whoever wrote it.

Programs that read files of unknown origin refuse by default (`--trust`); in Python whoever loads a file is trusted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.machinery import PathFinder

_ALLOWED: ContextVar[bool] = ContextVar("imports_allowed", default=True)


@contextmanager
def imports(*, allowed: bool) -> Iterator[None]:
    """Whether components may be named by import path, for as long as this lasts."""
    token = _ALLOWED.set(allowed)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def imports_are_allowed() -> bool:
    return _ALLOWED.get()


def require_trust(name: str, module: str) -> None:
    """Raises ValueError with the file that would be imported, which is found without importing anything."""
    if imports_are_allowed():
        return
    package = module.partition(".")[0]
    found = PathFinder.find_spec(package) or PathFinder.find_spec(package, [""])
    where = "which is nowhere to be found" if found is None else f"from {found.origin or package}"
    raise ValueError(
        f"{name!r} is no built-in name: pdsim would import the module {module}, {where}, and run its code; "
        "if you trust whoever wrote it, give --trust or set PDSIM_TRUST=1"
    )
