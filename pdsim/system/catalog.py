"""Models, GPUs and transfer engines by name: one YAML file each, in this package or in a folder of the user's."""

import atexit
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, Literal

from pdsim.system.entry import EntryError, build, hint
from pdsim.system.model import Dtype, ModelSpec
from pdsim.system.transport import Transport


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """A GPU; `sources` says where each number comes from. Rates are per second and per direction."""

    name: str
    memory_bytes: float
    memory_bandwidth: float
    flops: dict[Dtype, float]
    """Dense; a type that the GPU has no units for is absent."""
    nvlink_bandwidth: float
    nic_bandwidth: float
    host_bandwidth: float
    """Bandwidth of the link to the memory of its host."""
    num_sms: int | None = None
    """Streaming multiprocessors, or compute units; None: not told."""
    gpus_per_server: int = 8
    """Joined by one NVLink domain, or on one board: as far as tensor parallelism goes."""
    gpus_per_host: int | None = None
    """GPUs that one operating system sees, where an NVLink domain has several hosts; None: all of a server."""
    board_power_w: float | None = None
    """The most that its board draws."""
    sources: dict[str, str]

    def __post_init__(self) -> None:
        if "bf16" not in self.flops:
            raise EntryError("flops.bf16 is missing: what a type without units of its own computes in")

    def num_hosts(self, num_gpus: int) -> int:
        """Hosts that a server of so many GPUs needs."""
        return -(-num_gpus // (self.gpus_per_host or self.gpus_per_server))

    def flops_for(self, dtype: Dtype) -> float:
        """FLOP/s of the type itself, or of the widest narrower type's compute it runs in: bf16."""
        return self.flops.get(dtype, self.flops["bf16"])


Kind = Literal["models", "gpus", "transports"]
KINDS: dict[Kind, type[Any]] = {"models": ModelSpec, "gpus": GpuSpec, "transports": Transport}

VARIABLE = "PDSIM_CATALOG"
"""The environment variable with a folder of the user's, which processes inherit."""
SHIPPED = Path(__file__).parent / "catalog"


_lent: list[Path] = []
"""Copies of entries that other machines or users had."""
_borrowed: dict[str, str] = {}
_located: ContextVar[dict[tuple[Kind, str], tuple[Path, int]] | None] = ContextVar("located", default=None)
"""Files of entries, and when they were modified; None: each is looked for whenever it is asked for."""


class CatalogError(ValueError):
    """An entry that is missing, or wrong."""


def own_folder() -> Path:
    """The user's folder, whatever they work on."""
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path("~/.config").expanduser()) / "pdsim"


def folders() -> list[Path]:
    """The folders of entries, those of this package first."""
    given = os.environ.get(VARIABLE)
    return list(dict.fromkeys([SHIPPED, *([Path(given).absolute()] if given else []), own_folder()]))


@contextmanager
def searched(folder: Path | None, *, is_new: bool = False) -> Iterator[None]:
    """Entries of this folder are found for as long as this lasts, also by processes that are started meanwhile.

    is_new: it may not be there yet.
    """
    if folder is None:
        yield
        return
    if not folder.is_dir() and not (is_new and not folder.exists()):
        raise CatalogError(f"catalog {folder}: no such folder")
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(folder.absolute())
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


@contextmanager
def lookups_remembered() -> Iterator[None]:
    """Each entry is looked for once for as long as this lasts. What changes meanwhile is seen afterwards."""
    token = _located.set(_located.get() or {})
    try:
        yield
    finally:
        _located.reset(token)


def lend(folder: Path) -> list[str]:
    """Lets this process find entries of a folder that no other folder has; the others that differ from it."""
    if folder not in _lent:
        _lent.append(folder)
    differing = []
    for kind in KINDS:
        for path in sorted((folder / kind).glob("*.yaml")):
            found = file_of(kind, path.stem)
            if found.read_bytes() != path.read_bytes():
                differing.append(f"{found} differs from {path}, and is used")
    return differing


def own_entries(named: Iterable[tuple[Kind, str]]) -> dict[str, str]:
    """Text of the user's entries among these, by place in a catalog, with those that they are the same as."""
    found: dict[str, str] = {}
    for kind, entry in named:
        name: str | None = entry
        while name is not None and f"{kind}/{name}.yaml" not in found:
            path = file_of(kind, name)
            if path.is_relative_to(SHIPPED):
                break
            found[f"{kind}/{name}.yaml"] = path.read_text(encoding="utf-8")
            data = _read(path)
            name = data.get("same_as") if isinstance(data, dict) else None
    return found


def borrow(entries: Mapping[str, str]) -> None:
    """Finds entries in this process that another one had: those that are missing here."""
    missing = {place: text for place, text in entries.items() if not any((one / place).is_file() for one in folders())}
    if missing and missing.items() - _borrowed.items():
        folder = Path(mkdtemp(prefix="pdsim-catalog-"))
        atexit.register(rmtree, folder, ignore_errors=True)
        write_entries(missing, folder)
        lend(folder)
        _borrowed.update(missing)


def write_entries(entries: Mapping[str, str], folder: Path) -> None:
    """Makes a catalog of them; no folder of none."""
    for place, text in entries.items():
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def names(kind: Kind) -> list[str]:
    """Entries of all folders together."""
    return sorted({path.stem for folder in (*folders(), *_lent) for path in (folder / kind).glob("*.yaml")})


def load_model(name: str) -> ModelSpec:
    """Raises CatalogError, as all that load do."""
    entry: ModelSpec = _load("models", name)
    return entry


def load_gpu(name: str) -> GpuSpec:
    entry: GpuSpec = _load("gpus", name)
    return entry


def load_transport(name: str) -> Transport:
    entry: Transport = _load("transports", name)
    return entry


def file_of(kind: Kind, name: str) -> Path:
    """The file that has the entry. Raises CatalogError if there is none, or more than one."""
    return _located_file(kind, name)[0]


def _located_file(kind: Kind, name: str) -> tuple[Path, int]:
    """The file, and when it was modified, in ns."""
    remembered = _located.get()
    if remembered is None:
        remembered = {}
    if (found := remembered.get((kind, name))) is None:
        path = _look_for(kind, name)
        found = remembered[kind, name] = path, path.stat().st_mtime_ns
    return found


def _look_for(kind: Kind, name: str) -> Path:
    paths = [path for folder in folders() if (path := folder / kind / f"{name}.yaml").is_file()]
    paths = paths or [path for folder in _lent if (path := folder / kind / f"{name}.yaml").is_file()][:1]
    if not paths or "/" in name:
        known = names(kind)
        raise CatalogError(f"no {kind[:-1]} {name!r} in the catalog, which has {', '.join(known)}{hint(name, known)}")
    if paths[1:]:
        raise CatalogError(f"{paths[1]}: {paths[0].parent} has a {kind[:-1]} {name!r} too: give the file another name")
    return paths[0]


def _load(kind: Kind, name: str) -> Any:
    return _built(kind, name, *_located_file(kind, name))


@cache
def _built(kind: Kind, name: str, path: Path, modified_ns: int) -> Any:
    """The entry of the file as it stood at that time."""
    del modified_ns
    data = _read(path)
    passed = [name]
    while isinstance(data, dict) and "same_as" in data:
        passed.append(str(data["same_as"]))
        if passed[-1] in passed[:-1]:
            raise CatalogError(f"{path}: same_as: {' is '.join(passed)}")
        path = file_of(kind, passed[-1])
        data = _read(path)
    try:
        return build(KINDS[kind], data, name=name)
    except EntryError as wrong:
        raise CatalogError(f"{path}: {wrong}") from None


def _read(path: Path) -> Any:
    from ruamel.yaml import YAML  # noqa: PLC0415  the catalog alone needs it here
    from ruamel.yaml.error import YAMLError  # noqa: PLC0415

    try:
        return YAML(typ="safe", pure=True).load(path)
    except (YAMLError, UnicodeDecodeError) as wrong:
        raise CatalogError(f"{path}: not YAML: {wrong}") from None
