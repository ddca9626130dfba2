"""A suite of scenarios that run for real and are simulated: `matrix.yaml` in a folder of its own.

scenario: scenario.yaml     without costs
profile: profile.yaml       what the simulator takes them from
runs: runs                  where the folders of real runs are
real: {device: cuda, dtype: bfloat16, weights: "seed:0", timeout: 60 s}   how pdreal runs each
within: {median: 7 %, mean: 15 %, p99: 25 %, winner: 95 %}                what is asked for
variants:
  c1: [client.concurrency=1]
  tp2to1: {changes: [prefill.tp=2], profile: tp2to1.yaml}                 with costs of its own
"""

from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

from pdsim.calibration.validate.case import percent
from pdsim.scenario.fields import DURATION
from pdsim.scenario.loading import load_scenario
from pdsim.scenario.profile import read_profile
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sizing import resolve
from pdsim.scenario.yaml_file import ConfigError, did_you_mean, read_yaml
from pdsim.system.model import KV_DTYPES

SUITE_FILE = "matrix.yaml"

_MODEL = ("model", "weight_dtype", "kv_dtype", "state_dtype", "context_tokens")
_LOAD = ("workload", "client", "seed", "faults")
_NAMES = (*_MODEL, "page_size", "router", *_LOAD, "prefill", "decode", "aggregated")
"""Fields that a real run and its simulation share."""


@dataclass(frozen=True)
class RealRunSettings:
    """Flags of `pdreal run`."""

    device: str = "cpu"
    dtype: str = "float32"
    weights: str = "seed:0"
    threads: int | None = None
    """Threads of each rank; None lets pdreal divide the cores."""
    timeout_s: float = 120.0
    hosts: Path | None = None
    """Hosts and their instances."""

    @property
    def flags(self) -> tuple[str, ...]:
        threads = () if self.threads is None else ("--threads", str(self.threads))
        hosts = () if self.hosts is None else ("--hosts", str(self.hosts))
        return ("--device", self.device, "--dtype", self.dtype, *threads, "--weights", self.weights, *hosts)


@dataclass(frozen=True)
class Tolerances:
    """Largest relative errors, and the least share of pairs whose winner is found. None: any."""

    median: float | None = None
    """Median error of each metric over the variants."""
    mean: float | None = None
    """Errors of throughput and of every mean, in each variant."""
    p99: float | None = None
    """Errors of every 99th percentile, in each variant."""
    winner: float | None = None


@dataclass(frozen=True)
class Variant:
    name: str
    changes: tuple[str, ...]
    profile: Path | None = None
    """A profile of its own, instead of the suite's."""


@dataclass(frozen=True)
class ValidationSuite:
    name: str
    scenario_path: Path
    profile: Path | None
    runs: Path
    real: RealRunSettings
    tolerances: Tolerances
    variants: tuple[Variant, ...]

    def scenario(self, variant: Variant) -> Scenario:
        """The scenario that the simulator runs: with the real run's KV and the profile's costs."""
        profile = variant.profile or self.profile
        if profile is None:
            raise ConfigError(f"{self.name}: no profile: give --profile, or profile in {SUITE_FILE}")
        profile = profile.resolve()
        fitted = read_profile(profile)
        network = fitted.get("network", {})
        costs = [f"cost.profile={profile}"]
        if "transports" in network:
            costs.append(f"network.profile={profile}")
        elif "message_latency" in network:  # of an aggregated server, which sends nothing
            costs.append(f"network.message_latency={network['message_latency']}")
        if "front_end" in fitted:
            costs.append(f"front_end.profile={profile}")
        return load_scenario(self.scenario_path, (*self._real_changes(variant), *costs))

    def real_scenario(self, variant: Variant) -> Scenario:
        """The scenario that `pdreal` runs."""
        return load_scenario(self.scenario_path, self._real_changes(variant))

    def with_profile(self, profile: Path) -> "ValidationSuite":
        """The suite with the profile of another machine for all variants."""
        return replace(
            self, profile=profile, variants=tuple(replace(variant, profile=None) for variant in self.variants)
        )

    def require_same(self, variant: Variant, ran: Scenario, folder: Path) -> None:
        """Raises ConfigError for the folder of a run of something else."""
        expected = resolve(self.real_scenario(variant))
        for name in (*_NAMES, "network.transport", "network.staging"):
            is_there, should_be = _part(ran, name), _part(expected, name)
            if is_there != should_be:
                raise ConfigError(
                    f"{folder}: is a run of another scenario than variant {variant.name!r}: "
                    f"{_difference(name, is_there, should_be)}; delete the folder to run it again"
                )

    def _real_changes(self, variant: Variant) -> tuple[str, ...]:
        return (*variant.changes, f"kv_dtype={KV_DTYPES[self.real.dtype]}")


def is_suite(name: str, experiments: Path) -> bool:
    return any(path.is_file() for path in _places(name, experiments))


def load_suite(name: str, experiments: Path) -> ValidationSuite:
    """Reads a suite, named by its folder in experiments, a folder or a file. Raises ConfigError."""
    for path in _places(name, experiments):
        if path.is_file():
            return suite_of(read_yaml(path), path)
    known = sorted(path.parent.name for path in experiments.glob(f"*/{SUITE_FILE}"))
    raise ConfigError(f"no matrix {name!r}{did_you_mean(name, known)}; {experiments}/ has {', '.join(known) or 'none'}")


def suite_of(data: Any, path: Path) -> ValidationSuite:
    """The suite that the file at this path describes."""
    _require_fields(data, ("scenario", "profile", "runs", "real", "within", "variants"), str(path))
    for needed in ("scenario", "variants"):
        if needed not in data:
            raise ConfigError(f"{path}: {needed} is missing")
    folder, profile = path.parent, data.get("profile")
    return ValidationSuite(
        folder.resolve().name,
        folder / data["scenario"],
        None if profile is None else folder / profile,
        folder / data.get("runs", "runs"),
        _real(data.get("real", {}), folder, f"{path}: real"),
        _tolerances(data.get("within", {}), f"{path}: within"),
        tuple(_variants(data["variants"], folder, f"{path}: variants")),
    )


def _places(name: str, experiments: Path) -> tuple[Path, ...]:
    given = Path(name)
    return (
        experiments / name / SUITE_FILE,
        given / SUITE_FILE,
        *([given] if given.suffix in {".yaml", ".yml"} else []),
    )


def _real(data: Any, folder: Path, where: str) -> RealRunSettings:
    _require_fields(data, ("device", "dtype", "weights", "threads", "timeout", "hosts"), where)
    for name, known in (("device", ("cpu", "cuda")), ("dtype", tuple(KV_DTYPES))):
        if name in data and data[name] not in known:
            found = data[name]
            raise ConfigError(f"{where}: no {name} {found!r}{did_you_mean(str(found), known)}; {', '.join(known)}")
    given: dict[str, Any] = {name: str(data[name]) for name in ("device", "dtype", "weights") if name in data}
    if "threads" in data:
        given["threads"] = threads = data["threads"]
        if type(threads) is not int or threads < 1:
            raise ConfigError(f"{where}: threads: expected an integer of at least 1, found {threads!r}")
    if "timeout" in data:
        try:
            given["timeout_s"] = DURATION.parse(data["timeout"]) / 1e9
        except ValueError as wrong:
            raise ConfigError(f"{where}: timeout: {wrong}") from None
    if "hosts" in data:
        given["hosts"] = folder / str(data["hosts"])
    return RealRunSettings(**given)


def _tolerances(data: Any, where: str) -> Tolerances:
    _require_fields(data, tuple(Tolerances.__dataclass_fields__), where)
    return Tolerances(**{name: percent(value, f"{where}: {name}") for name, value in data.items()})


def _variants(data: Any, folder: Path, where: str) -> Iterator[Variant]:
    if not isinstance(data, dict) or not data:
        raise ConfigError(f"{where}: expected names, each with a list of changes, found {data!r}")
    for name, variant in data.items():
        if Path(str(name)).name != str(name):
            raise ConfigError(f"{where}: {name!r} cannot name a folder")
        changes, profile = variant, None
        if isinstance(variant, dict):
            _require_fields(variant, ("changes", "profile"), f"{where}: {name}")
            changes, profile = variant.get("changes", []), variant.get("profile")
        if not isinstance(changes, list) or not all(isinstance(change, str) for change in changes):
            raise ConfigError(f"{where}: {name}: expected a list of path=value, found {changes!r}")
        yield Variant(str(name), tuple(changes), None if profile is None else folder / str(profile))


def _require_fields(data: Any, known: tuple[str, ...], where: str) -> None:
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a mapping, found {type(data).__name__}")
    for name in data:
        if name not in known:
            raise ConfigError(f"{where}: unknown field {name!r}{did_you_mean(str(name), known)}; {', '.join(known)}")


def _part(scenario: Scenario, name: str) -> Any:
    """A part of a scenario that decides on both sides, without what only costs the simulator."""
    section, _, inside = name.partition(".")
    value: Any = getattr(scenario, section)
    value = getattr(value, inside) if inside and value is not None else value
    if inside == "staging" and value is not None:
        return {"ring": value.ring, "prefill_buffer": value.prefill_buffer}
    if hasattr(value, "model_dump"):
        value = value.model_dump()
        value.pop("retraction_backup", None)
    if is_dataclass(value) and not isinstance(value, type) and hasattr(value, "path"):
        value = replace(value, path=Path(value.path.name))  # a run folder has the whole path of its machine
    return value


def _difference(name: str, there: Any, here: Any) -> str:
    """The first field that differs."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in (*here, *there):
            if there.get(key) != here.get(key):
                return _difference(f"{name}.{key}", there.get(key), here.get(key))
    return f"{name} is {there!r} there, {here!r} here"
