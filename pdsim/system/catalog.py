"""The catalog: models, GPUs and transfer engines by name. Each has a YAML file, in this package or in a folder of the
user.

The data of a file becomes a dataclass. Errors name the field.
"""

import atexit
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from math import inf
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pdsim.dataclass import dataclass
from pdsim.files import write_whole
from pdsim.inputs import MOST_YAML_BYTES, InputError, parse_yaml, read_text
from pdsim.system.model import Dtype, ModelSpec
from pdsim.system.transport import Transport


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """A GPU. `sources` names the source of each number. Rates are per second; bandwidths of links are per direction."""

    name: str
    memory_bytes: float
    memory_bandwidth: float
    flops: dict[Dtype, float]
    """Dense FLOP/s by data type. Types that the GPU computes in bf16 are absent."""
    nvlink_bandwidth: float
    nic_bandwidth: float
    """Bandwidth in bytes per second of the GPU's own NIC."""
    host_bandwidth: float
    """Bandwidth in bytes per second of the link between the GPU and its host's memory, per direction."""
    num_sms: int | None = None
    """Number of streaming multiprocessors or compute units. None: unknown."""
    gpus_per_server: int = 8
    """Number of GPUs that links of nvlink_bandwidth join: the GPUs of one NVLink domain, or of one server if the GPUs
    have no NVLink."""
    gpus_per_host: int | None = None
    """Number of GPUs in one host (which runs one operating system), for GPUs whose NVLink domain spans several hosts.
    None: one host has gpus_per_server GPUs.
    """
    board_power_w: float | None = None
    """Maximum power of the GPU's board in W."""
    sources: dict[str, str]

    def __post_init__(self) -> None:
        if "bf16" not in self.flops:
            raise ValueError("flops.bf16 is missing: the rate of types without units of their own")

    @property
    def domain(self) -> str:
        """Word for the gpus_per_server GPUs in messages: "host" or, if they span several hosts, "NVLink domain"."""
        return "host" if self.gpus_per_host is None else "NVLink domain"

    def num_hosts(self, num_gpus: int) -> int:
        """Number of hosts that a server with num_gpus GPUs spans."""
        return -(-num_gpus // (self.gpus_per_host or self.gpus_per_server))

    def flops_for(self, dtype: Dtype) -> float:
        """FLOP/s for a data type: the type's own rate, or the rate of bf16 if the GPU has no units for the type."""
        return self.flops.get(dtype, self.flops["bf16"])


Kind = Literal["models", "gpus", "transports"]
KINDS: dict[Kind, type[Any]] = {"models": ModelSpec, "gpus": GpuSpec, "transports": Transport}

VARIABLE = "PDSIM_CATALOG"
"""Environment variable with the path of a further catalog folder. Child processes inherit it."""
SHIPPED = Path(__file__).parent / "catalog"
Entry = TypeVar("Entry")

_lent: list[Path] = []
"""Further folders, in which the catalog looks for entries that the folders of folders() lack. They hold copies of
catalog entries of other machines or users.
"""
_borrowed: dict[str, str] = {}
_located: ContextVar[dict[tuple[Kind, str], tuple[Path, int]] | None] = ContextVar("located", default=None)
"""Path and modification time in ns of the file of each catalog entry that was looked up. Keys: kind and name of the
entry. None: results of look-ups are not kept."""


class CatalogError(ValueError):
    """Raised if a catalog entry is missing or wrong."""


class EntryError(ValueError):
    """Raised if a field of a catalog entry is wrong."""


def own_folder() -> Path:
    """Path of the catalog folder in the user's home: $XDG_CONFIG_HOME/pdsim, or ~/.config/pdsim. The folder need not
    exist.
    """
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path("~/.config").expanduser()) / "pdsim"


def folders() -> list[Path]:
    """Paths of the catalog folders: this package's folder, the folder of the variable PDSIM_CATALOG if it is set, and
    own_folder. Folders that `lend` adds are not included.
    """
    given = os.environ.get(VARIABLE)
    return list(dict.fromkeys([SHIPPED, *([Path(given).absolute()] if given else []), own_folder()]))


@contextmanager
def searched(folder: Path | None, *, is_new: bool = False) -> Iterator[None]:
    """Context manager that sets PDSIM_CATALOG to a folder. Within the context, the catalog also looks there, but not in
    the folder that PDSIM_CATALOG named before. Processes that start within the context do the same. folder: None:
    nothing changes.

    is_new: True: the folder need not exist yet. Raises CatalogError if `folder` is a file, or does not exist although
    is_new is False.
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
    """Context manager: within it, each catalog file is looked up only once, so changes of files are not seen."""
    remembered = _located.get()
    token = _located.set({} if remembered is None else remembered)
    try:
        yield
    finally:
        _located.reset(token)


def lend(folder: Path) -> list[str]:
    """Adds a folder with copies of entries. A copy is not used if a folder of folders(), or a folder that was lent
    before, has an entry of the same kind and name. Returns a note for each copy that differs from the entry that is
    used in its place. Raises CatalogError if several of folders() have an entry of a copy's kind and name.
    """
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
    """Returns the texts of the entries in `named` (kinds and names) that this package does not ship, and of the entries
    to which these refer (same_as), up to the first that is shipped. Keys: paths within a catalog folder, such as
    models/NAME.yaml.
    """
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
    """Adds entries of another process that this process lacks. entries: texts by path within a catalog folder."""
    missing = {place: text for place, text in entries.items() if not any((one / place).is_file() for one in folders())}
    if missing and missing.items() - _borrowed.items():
        folder = Path(mkdtemp(prefix="pdsim-catalog-"))
        atexit.register(rmtree, folder, ignore_errors=True)
        write_entries(missing, folder)
        lend(folder)
        _borrowed.update(missing)


def write_entries(entries: Mapping[str, str], folder: Path) -> None:
    """Writes entries into a catalog folder, and makes missing folders. Without entries, no folder is made. entries:
    texts by path within the folder.
    """
    for place, text in entries.items():
        write_whole(folder / place, text)


def names(kind: Kind) -> list[str]:
    """Names of all catalog entries of one kind (such as GPUs or models), in all catalog folders."""
    return sorted({path.stem for folder in (*folders(), *_lent) for path in (folder / kind).glob("*.yaml")})


def load_model(name: str) -> ModelSpec:
    """Loads a model by its name. Raises CatalogError if the catalog has no model or several models of this name, or if
    the entry is wrong.
    """
    entry: ModelSpec = _load("models", name)
    return entry


def load_gpu(name: str) -> GpuSpec:
    entry: GpuSpec = _load("gpus", name)
    return entry


def load_transport(name: str) -> Transport:
    entry: Transport = _load("transports", name)
    return entry


def file_of(kind: Kind, name: str) -> Path:
    """Path of an entry's file: from folders(), or else from the first folder of _lent that has one. Raises CatalogError
    if there is no file, or if several of folders() have one.
    """
    return _located_file(kind, name)[0]


def _located_file(kind: Kind, name: str) -> tuple[Path, int]:
    """Path of an entry's file, and its modification time in ns."""
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
    """Loads a catalog entry from its file, or from the file of the entry that same_as names. Raises CatalogError if a
    file is missing or wrong.
    """
    path, modified_ns = _located_file(kind, name)
    first, data, passed = path, _parsed(path, modified_ns), [name]
    while isinstance(data, dict) and "same_as" in data:
        passed.append(str(data["same_as"]))
        if passed[-1] in passed[:-1]:
            raise CatalogError(f"{first}: same_as: {' is '.join(passed)}")
        path, modified_ns = _located_file(kind, passed[-1])
        data = _parsed(path, modified_ns)
    return _built(kind, name, path, modified_ns)


@cache
def _built(kind: Kind, name: str, path: Path, modified_ns: int) -> Any:
    """Makes a catalog entry from a file. Cached until the file's modification time changes."""
    try:
        return build(KINDS[kind], _parsed(path, modified_ns), name=name)
    except EntryError as wrong:
        raise CatalogError(f"{path}: {wrong}") from None


@cache
def _parsed(path: Path, modified_ns: int) -> Any:
    """Content of an entry's file. Cached until the file's modification time changes."""
    del modified_ns
    return _read(path)


def _read(path: Path) -> Any:
    try:
        return parse_yaml(read_text(path, "YAML", MOST_YAML_BYTES), str(path))
    except InputError as wrong:
        raise CatalogError(str(wrong)) from None


def hint(word: Any, among: Iterable[str]) -> str:
    close = get_close_matches(str(word), list(among), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def build(kind: type[Entry], data: Any, path: str = "", **given: Any) -> Entry:
    """Makes an entry from a mapping of its fields.

    kind: the entry's dataclass. given: further fields, which `data` must not have. path: text before each field's name
    in messages, ending with a dot. Raises EntryError if `data` is no mapping, or if a field is missing, unknown or
    wrong. Required numbers must be above 0; numbers with a default may be 0.
    """
    if not isinstance(data, Mapping):
        raise EntryError(f"{path.rstrip('.') or 'the file'}: expected a mapping of fields, found {data!r}")
    known = {field.name: field for field in fields(kind) if field.name not in given}  # type: ignore[arg-type]
    for name in data:
        if name not in known:
            raise EntryError(f"unknown field {f'{path}{name}'!r}; here are {', '.join(known)}{hint(name, known)}")
    types, values = get_type_hints(kind), dict(given)
    for name, field in known.items():
        is_needed = field.default is MISSING
        if name in data:
            values[name] = _value(types[name], data[name], f"{path}{name}")
            if is_needed and values[name] == 0:
                raise EntryError(f"{path}{name}: expected a number above 0, found {data[name]!r}")
        elif is_needed:
            raise EntryError(f"{path}{name} is missing")
    try:
        return kind(**values)
    except ValueError as wrong:
        raise EntryError(str(wrong)) from None


def _value(kind: Any, value: Any, path: str) -> Any:
    """Returns the value of a field. A mapping becomes the dataclass that the type asks for. kind: the field's type.
    path: the field's name in messages. Raises EntryError if the value has another type, or is a negative or infinite
    number.
    """
    options = [option for option in get_args(kind) if option is not NoneType]
    if NoneType in get_args(kind):
        return None if value is None else _value(options[0], value, path)
    if get_origin(kind) is Literal:
        return _one_of(options, value, path)
    if get_origin(kind) is dict:
        if not isinstance(value, Mapping):
            raise EntryError(f"{path}: expected a mapping, found {value!r}")
        return {_value(options[0], key, path): _value(options[1], one, f"{path}.{key}") for key, one in value.items()}
    if get_origin(kind) is tuple:  # of one kind, however many
        if not isinstance(value, list):
            raise EntryError(f"{path}: expected a list, found {value!r}")
        return tuple(_value(options[0], one, f"{path}.{i}") for i, one in enumerate(value))
    if is_dataclass(kind):
        return build(kind, value, f"{path}.")  # type: ignore[arg-type]
    if options:  # dataclasses, told apart by their field `kind`
        kinds, chosen = {option.KIND: option for option in options}, dict(value) if isinstance(value, Mapping) else {}
        return build(kinds[_one_of(kinds, chosen.pop("kind", None), f"{path}.kind")], chosen, f"{path}.")
    return _scalar(kind, value, path)


def _one_of(among: Iterable[str], value: Any, path: str) -> Any:
    if value not in list(among):  # it may be unhashable
        raise EntryError(f"{path}: expected one of {', '.join(among)}, found {value!r}{hint(value, among)}")
    return value


def _scalar(kind: type, value: Any, path: str) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < inf
    if kind is float and is_number:
        return value
    if kind is int and is_number and int(value) == value:
        return int(value)
    if kind in (str, bool) and isinstance(value, kind):
        return value
    what = {float: "a number from 0 on", int: "a whole number from 0 on", str: "a text", bool: "true or false"}[kind]
    raise EntryError(f"{path}: expected {what}, found {value!r}")
