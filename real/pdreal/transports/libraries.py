"""Loads engines, and names what a machine lacks for them."""

import importlib
from types import ModuleType

from pdreal.transports.protocol import UnavailableError

DEBIAN_PACKAGES = {
    "libibverbs.so.1": "libibverbs1",
    "libmlx5.so.1": "ibverbs-providers",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}


def load_engine(modules: tuple[str, ...], wheel: str) -> ModuleType:
    """The first of these modules that is there. Raises UnavailableError."""
    for module in modules:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        except ImportError as wrong:
            raise UnavailableError(f"{module}: {wrong}{_hint(str(wrong))}") from None
    raise UnavailableError(f"{modules[0]} is not installed: pip install {wheel}")


def _hint(problem: str) -> str:
    for library, package in DEBIAN_PACKAGES.items():
        if library in problem:
            return f"; on Debian: apt-get install {package}"
    return ""
