"""A suite of scenarios that run for real and are simulated: `matrix.yaml` in a folder of its own.

scenario: scenario.yaml     without costs
profile: profile.yaml       fitted costs for the simulator
runs: runs                  folder of the real runs
real: {device: cuda, dtype: bfloat16, weights: "seed:0", timeout: 60 s}   flags of pdreal for each variant
within: {median: 7 %, mean: 15 %, p99: 25 %, winner: 95 %}                accepted errors
variants:
  c1: [client.concurrency=1]
  tp2to1: {changes: [prefill.tp=2], profile: tp2to1.yaml}                 with its own costs
"""

from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from pdsim.calibration.validate.case import named_cases, percent
from pdsim.dataclass import dataclass
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.loading import load_scenario, read_section
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.fields import Duration, FolderName, Section
from pdsim.scenario.sections.profile import read_profile
from pdsim.scenario.yaml_file import ConfigError, did_you_mean
from pdsim.system.model import KV_DTYPES

SUITE_FILE = "matrix.yaml"

_MODEL = ("model", "weight_dtype", "kv_dtype", "state_dtype", "context_tokens")
_LOAD = ("workload", "client", "seed", "faults")
_NAMES = (*_MODEL, "page_size", "router", *_LOAD, "prefill", "decode", "aggregated")
"""Fields of a scenario that a real run and its simulation must have in common."""


class RealRunSettings(Section):
    """Options of `pdreal run`."""

    device: Literal["cpu", "cuda"] = "cpu"
    """cpu: ranks run on CPU cores. cuda: ranks run on GPUs, and share them if there are fewer GPUs than ranks."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of weights, activations and KV."""
    weights: str = "seed:0"
    """seed:N for random weights, or the folder of a checkpoint."""
    threads: int | None = Field(default=None, ge=1)
    """Number of threads of each rank. None: pdreal divides the CPU's cores among the ranks."""
    timeout: Duration = 120 * 10**9
    """Maximum duration of a run. A run that takes longer counts as failed."""
    hosts: Path | None = None
    """File that lists hosts, and the instances on each. None: all instances run on this host."""

    @property
    def flags(self) -> tuple[str, ...]:
        threads = () if self.threads is None else ("--threads", str(self.threads))
        hosts = () if self.hosts is None else ("--hosts", str(self.hosts))
        return ("--device", self.device, "--dtype", self.dtype, *threads, "--weights", self.weights, *hosts)


Percentage = Annotated[float, BeforeValidator(percent)]


class Tolerances(Section):
    """Largest relative errors that a suite accepts, and the smallest share of pairs of variants that the simulation
    must rank right. None: any.
    """

    median: Percentage | None = None
    """Largest accepted median of the absolute values of a metric's errors over all variants."""
    mean: Percentage | None = None
    """Largest accepted error of request throughput and of mean times (TTFT, TPOT, ITL, latency), for each variant."""
    p99: Percentage | None = None
    """Largest accepted error of any p99 in each variant."""
    winner: Percentage | None = None
    """Smallest accepted share of pairs of variants that the simulation ranks as the measurement does, for request
    throughput and the mean TTFT, TPOT and latency, each alone. None: any.
    """


class VariantFields(Section):
    """A variant: changes of the scenario, and possibly a profile of its own."""

    changes: tuple[str, ...] = ()
    """Changes of the scenario, in the notation of --set."""
    profile: Path | None = None
    """Profile of this variant. None: the profile of the suite."""

    @model_validator(mode="before")
    @classmethod
    def _of_changes(cls, found: Any) -> Any:
        return {"changes": found} if isinstance(found, list) else found


class SuiteFile(Section):
    scenario: Path
    """Path of the scenario file that the variants change."""
    profile: Path | None = None
    """Profile with the step times of the simulations. None: each variant or the option --profile must name a profile.
    """
    runs: Path = Path("runs")
    """Folder with the run folders of the real runs."""
    real: RealRunSettings = RealRunSettings()
    """Options with which missing real runs are made."""
    within: Tolerances = Tolerances()
    """The errors that the suite accepts."""
    variants: dict[Annotated[FolderName, BeforeValidator(str)], VariantFields] = Field(min_length=1)
    """Variants by name. A variant's run folder has the same name."""


@dataclass(frozen=True)
class Variant:
    name: str
    """Name of the variant and of its real run's folder."""
    changes: tuple[str, ...]
    """Changes of the scenario, in the notation of --set."""
    profile: Path | None = None
    """Profile of this variant. None: the profile of the suite."""


@dataclass(frozen=True)
class ValidationSuite:
    name: str
    path: Path
    """Path of the suite's own file."""
    scenario_path: Path
    profile: Path | None
    """Profile with the step times of the simulations, for variants without a profile of their own. None: each variant
    must have its own for a simulation.
    """
    runs: Path
    """Folder with the run folders of the real runs."""
    real: RealRunSettings
    """Options with which missing real runs are made."""
    tolerances: Tolerances
    """The errors that the suite accepts."""
    variants: tuple[Variant, ...]

    def scenario(self, variant: Variant) -> Scenario:
        """The scenario that the simulator runs for a variant. KV has the data type of the real run, so that KV pools
        have the same sizes. Step times come from the profile, and so do the network and the front end, as far as the
        profile has them. Raises ConfigError if there is no profile.
        """
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
        """The scenario that `pdreal` runs for a variant. KV has the data type that the suite sets for real runs."""
        return load_scenario(self.scenario_path, self._real_changes(variant))

    def with_profile(self, profile: Path) -> "ValidationSuite":
        """The suite in which all variants have this profile, for example that of another machine."""
        return replace(
            self, profile=profile, variants=tuple(replace(variant, profile=None) for variant in self.variants)
        )

    def require_same(self, variant: Variant, ran: Scenario, folder: Path) -> None:
        """Raises ConfigError if the scenario of a run differs from the variant's in a field that real and simulated run
        must have in common (_NAMES, network.transport, network.staging). ran: the scenario of the run. folder: the run
        folder, for the message.
        """
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
    """Reads a suite. name: a folder in `experiments`, any other folder, or a file. Raises ConfigError if there is no
    suite, or its file is wrong.
    """
    for path in _places(name, experiments):
        if path.is_file():
            return suite_of(read_section(path, SuiteFile), path)
    known = sorted(path.parent.name for path in experiments.glob(f"*/{SUITE_FILE}"))
    raise ConfigError(f"no matrix {name!r}{did_you_mean(name, known)}; {named_cases(known, experiments)}")


def suite_of(file: SuiteFile, path: Path) -> ValidationSuite:
    """The suite that a file describes. Relative paths in the file start at the folder of `path`."""
    folder = path.parent

    def beside(given: Path | None) -> Path | None:
        return None if given is None else folder / given

    runs = folder / file.runs
    if not runs.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{path}: runs: {file.runs} lies outside of {folder}; name a folder elsewhere with --runs")
    return ValidationSuite(
        folder.resolve().name,
        path,
        folder / file.scenario,
        beside(file.profile),
        runs,
        file.real.model_copy(update={"hosts": beside(file.real.hosts)}),
        file.within,
        tuple(Variant(name, one.changes, beside(one.profile)) for name, one in file.variants.items()),
    )


def _places(name: str, experiments: Path) -> tuple[Path, ...]:
    given = Path(name)
    return (
        experiments / name / SUITE_FILE,
        given / SUITE_FILE,
        *([given] if given.suffix in {".yaml", ".yml"} else []),
    )


def _part(scenario: Scenario, name: str) -> Any:
    """Value of the field `name` of a scenario, for comparing scenarios of real and simulated runs. Leaves out settings
    that only simulated costs use.
    """
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
    """Text on the first field in which two values differ. there, here: values of the field `name` in the run and in the
    variant.
    """
    if isinstance(there, dict) and isinstance(here, dict):
        for key in (*here, *there):
            if there.get(key) != here.get(key):
                return _difference(f"{name}.{key}", there.get(key), here.get(key))
    return f"the run has {name} {there!r}, the variant {here!r}"
