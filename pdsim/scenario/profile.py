"""Settings that were fitted to measurements, in a file of their own with where they come from.

name: qwen3-32b-b200-tp2
cost: {use: affine, ..., measured: {model: ..., ...}}   or {prefill: {...}, decode: {...}, host: {...}, measured: {...}}
network:                          optional
  transports: {mooncake-tcp: {bandwidth: ..., transfer_latency: ..., descriptor_latency: ...,
    handover: ...}}
  staging: {gather_host: ..., ...}
  message_latency: ...
front_end: {service: ..., latency_in: ..., latency_out: ...}                  optional
provenance: {fitted_on: ..., command: ..., date: ...}
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ValidationInfo

from pdsim.cost.step_times import Measured, SizeRange
from pdsim.metrics.records import StepRecord
from pdsim.scenario.fields import Section, base_folder
from pdsim.scenario.yaml_file import ConfigError, did_you_mean, read_yaml

_BESIDE = ("measured", "host", "cold_start")
"""Sections of a profile's cost that a scenario may change."""
_OF_ROLE = {
    "prefill": ("prefill_interval",),
    "decode": (
        "decode_interval",
        "graph_sizes",
        "graph_empty_row_kv",
        "eager_layer",
        "attention_sm_bandwidth",
        "attention_merge",
        "cold_start",
    ),
}
"""Fields of a profile's cost that belong to one role, besides the cost model of that name."""
_HOST_OF_DECODE = ("decode_step", "decode_request")


def _named(value: Any, info: ValidationInfo[Any]) -> tuple[Path, dict[str, Any]] | None:
    """The profile that a section names, and the fields beside it; None: it names none."""
    if not (isinstance(value, dict) and "profile" in value):
        return None
    beside = {key: setting for key, setting in value.items() if key != "profile"}
    return base_folder(info) / str(value["profile"]), beside


def cost_by_role(value: Any, info: ValidationInfo[Any]) -> Any:
    """Replaces {profile: FILE} by what the file says. Only changes of sections in _BESIDE may stand beside it."""
    of_role = {role: its for role in _OF_ROLE if isinstance(value, dict) and (its := _named(value.get(role), info))}
    named = _named(value, info)
    if of_role:
        return _joined(value, dict.fromkeys(_OF_ROLE, named) | of_role if named else of_role)
    if named is None:
        return value
    path, beside = named
    for section, changes in beside.items():
        if section in _BESIDE and not isinstance(changes, dict):
            raise ValueError(f"{section}: expected a section, {{name: value}}, found {changes!r}")
    if any(section not in _BESIDE for section in beside):
        known, found = " and ".join((", ".join(_BESIDE[:-1]), _BESIDE[-1])), ", ".join(beside)
        raise ValueError(f"profile stands alone, or beside {known}, found {found} beside it")
    cost = read_profile(path)["cost"]
    changed = {section: {**cost.get(section, {}), **changes} for section, changes in beside.items()}
    return {"measured": {}, **cost, **changed}  # without `measured` it does not say what it was measured on


def _joined(value: dict[str, Any], of_role: dict[str, tuple[Path, dict[str, Any]]]) -> dict[str, Any]:
    """Cost whose roles have profiles of their own."""
    given = {key: setting for key, setting in value.items() if key != "profile"}
    costs = {}
    for role, (path, others) in of_role.items():
        if role in given and others:
            raise ValueError(f"{role}: profile stands alone, found {', '.join(others)} beside it")
        costs[role] = read_profile(path)["cost"]
    found: dict[str, Any] = {}
    for role, cost in costs.items():
        model = cost.get(role) or {key: setting for key, setting in cost.items() if key not in _BESIDE}
        found |= {role: model, **{field: cost[field] for field in _OF_ROLE[role] if field in cost}}
    hosts = {role: cost.get("host") or {} for role, cost in costs.items()}
    host = {
        name: time
        for role, times in hosts.items()
        for name, time in times.items()
        if (name in _HOST_OF_DECODE) == (role == "decode")
    }
    beside = {
        "host": {**host, **given.pop("host", {})},
        "measured": {**_measured(costs), **given.pop("measured", {})},
    }
    return {**given, **found, **beside}


def _measured(costs: dict[str, Any]) -> dict[str, Any]:
    """Setups of the roles in one: texts that differ are joined, so that they are no run's."""
    known = {role: cost.get("measured") or {} for role, cost in costs.items()}
    found: dict[str, Any] = {} if len(known) == len(_OF_ROLE) else {"role": next(iter(known))}
    for name in ("model", "weight_dtype", "kv_dtype", "device", "scaled_from"):
        texts = [str(one[name]) for one in known.values() if one.get(name) is not None]
        if texts and (name == "scaled_from" or len(texts) == len(known)):
            found[name] = " and ".join(dict.fromkeys(texts))
    for name in ("tp", "dp"):
        sizes = [one.get(name, (1, 1))[list(_OF_ROLE).index(role)] for role, one in known.items()]
        found[name] = (sizes[0], sizes[-1])
    for role, one in known.items():
        found |= {name: bounds for name, bounds in one.items() if name.startswith(f"{role}_")}
    if any(one.get("outside") == "extend" for one in known.values()):
        found["outside"] = "extend"
    return found


def network_of_profile(value: Any, info: ValidationInfo[Any]) -> Any:
    """Replaces `profile: FILE` by what was fitted for the transport; what stands beside it goes before it."""
    if (named := _named(value, info)) is None:
        return value
    path, given = named
    fitted = dict(read_profile(path).get("network") or {})
    transports = fitted.pop("transports", {})
    staging = fitted.pop("staging", {})
    name = given.get("transport") or (next(iter(transports)) if len(transports) == 1 else None)
    if name not in transports:
        hint = did_you_mean(str(name), transports) if name else ""
        what = f"has no transport {name!r}{hint}" if name else "has more than one transport, or none: name one"
        raise ValueError(f"profile {path} {what}; there are {', '.join(transports) or 'none'}")
    found = {"transport": name, **fitted, **transports[name], **given}
    if isinstance(given.get("staging"), dict):  # whether there is staging is the scenario's choice
        found["staging"] = {**staging, **given["staging"]}
    return found


def front_end_of_profile(value: Any, info: ValidationInfo[Any]) -> Any:
    """Replaces `profile: FILE` by what was measured; what stands beside it goes before it."""
    if (named := _named(value, info)) is None:
        return value
    path, given = named
    measured = read_profile(path).get("front_end")
    if not measured:
        raise ValueError(f"profile {path} has no field 'front_end'")
    return {**measured, **given}


def read_profile(path: Path) -> dict[str, Any]:
    profile: dict[str, Any] = read_yaml(path)
    for field in ("cost", "provenance"):
        if not isinstance(profile, dict) or field not in profile:
            raise ConfigError(f"profile {path} has no field {field!r}")
    return profile


# What a profile was measured on, and how far it reaches.

_TITLES = {
    "prefill_new_tokens": "new tokens of a forward",
    "prefill_context_tokens": "context tokens of a forward",
    "decode_batch": "batch",
    "decode_context_tokens": "KV tokens of a batch",
}
_GOES_ON = "decode_context_tokens"
"""A decode step is a line in them, which is not clamped."""


def _ordered(values: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= values[0] <= values[1]:
        raise ValueError(f"a range is [least, most], found {list(values)}")
    return values


Bounds = Annotated[tuple[float, float], AfterValidator(_ordered)]


class Setup(Section):
    """A model, and what it runs on."""

    model: str | None = None
    """Model; None: the setup is not known."""
    weight_dtype: str | None = None
    """Type of the weights."""
    kv_dtype: str | None = None
    """Type of the KV."""
    device: str | None = None
    """GPU of the catalog, or a CPU's name."""
    tp: tuple[int, int] = (1, 1)
    """Sizes of prefill and of decode."""
    dp: tuple[int, int] = (1, 1)
    """Sizes of prefill and of decode."""
    pp: int = 1
    """Pipeline stages of prefill."""
    cp: int = 1
    """Context parallelism of prefill."""

    def __str__(self) -> str:
        return ", ".join(part for part in self.parts().values() if part)

    def differences(self, run: "Setup") -> list[str]:
        """Parts of a run's setup that are not this one's."""
        mine, theirs = self.parts(), run.parts()
        known = (name for name in mine if getattr(self, name) is not None)
        return [theirs[name] or f"no {name}" for name in known if mine[name] != theirs[name]]

    def parts(self) -> dict[str, str | None]:
        """A text for each field; nothing where there is nothing to say."""
        return {
            "model": self.model,
            "weight_dtype": f"{self.weight_dtype} weights" if self.weight_dtype else "",
            "kv_dtype": f"{self.kv_dtype} KV" if self.kv_dtype else "",
            "tp": _sizes_of_roles("TP", self.tp),
            "dp": "" if self.dp == (1, 1) else _sizes_of_roles("DP", self.dp),
            "pp": "" if self.pp == 1 else f"PP{self.pp} prefill",
            "cp": "" if self.cp == 1 else f"CP{self.cp} prefill",
            "device": self.device,
        }


def _sizes_of_roles(what: str, sizes: tuple[int, int]) -> str:
    prefill, decode = sizes
    return f"{what}{prefill}" if prefill == decode else f"{what}{prefill} to {what}{decode}"


class MeasuredSettings(Setup):
    """The setup, and the step sizes [least, most], that times were measured on, from `pdsim calibrate`.

    Commands print one line about a run that leaves it. None: not known.
    """

    role: Literal["prefill", "decode"] | None = None
    """The role that alone was measured; sizes and device are then its own. None: both."""
    scaled_from: str | None = None
    """The setup that times are scaled from, where nothing was measured on this one."""
    prefill_new_tokens: Bounds | None = None
    """New tokens of one forward."""
    prefill_context_tokens: Bounds | None = None
    """Tokens cached or computed before, of all prompts of a forward."""
    decode_batch: Bounds | None = None
    """Requests of a step."""
    decode_context_tokens: Bounds | None = None
    """KV tokens of a step; beyond, time goes on along its line."""
    outside: Literal["clamp", "extend"] = "clamp"
    """A step outside takes the nearest measured time (clamp), or what the cost model says (extend)."""

    def bounds(self) -> Measured | None:
        """Sizes that times are clamped to; None if they are not."""
        given = (self.prefill_new_tokens, self.prefill_context_tokens, self.decode_batch)
        if self.outside == "extend" or not any(given):
            return None
        return Measured(*(SizeRange() if bounds is None else SizeRange(*bounds) for bounds in given))

    def __str__(self) -> str:
        of_role = "" if self.role is None else f" of {self.role}"
        if self.model is None:
            return f"profile{of_role} does not say what it was measured on"
        if self.scaled_from is not None:
            return f"profile{of_role} scaled from {self.scaled_from} to {super().__str__()}, where nothing was measured"
        return f"profile{of_role} measured on {super().__str__()}"

    def exceeded(self, steps: Iterable[StepRecord]) -> list[str]:
        """Each field that steps leave, with the value that is farthest outside."""
        found = []
        for name, (least, most) in reached(steps).items():
            bounds = getattr(self, name)
            if bounds is not None and (most > bounds[1] or least < bounds[0]):
                value = most if most > bounds[1] else least
                found.append(self._exceeded(name, value, SizeRange(*bounds)))
        return found

    def _exceeded(self, name: str, value: float, bounds: SizeRange) -> str:
        goes_on = self.outside == "extend" or name == _GOES_ON
        taken = "" if goes_on else f", taken as {bounds.nearest(value):,.0f}"
        return f"{_TITLES[name]} {value:,.0f} (measured {bounds.least:,.0f} to {bounds.most:,.0f}{taken})"


def reached(steps: Iterable[StepRecord]) -> dict[str, tuple[float, float]]:
    """Least and most of the sizes of steps, by the field that bounds them."""
    extremes: dict[str, tuple[float, float]] = {}
    for step in steps:
        for name, low, high in _sizes(step):
            least, most = extremes.get(name, (low, high))
            extremes[name] = min(least, low), max(most, high)
    return extremes


def _sizes(step: StepRecord) -> Iterator[tuple[str, float, float]]:
    """Fields of the settings, each with the least and the most of it in a record."""
    if step.kind == "decode":
        grown = step.num_requests * (step.num_steps - 1)
        yield "decode_batch", step.num_requests, step.num_requests
        yield "decode_context_tokens", step.num_context_tokens, step.num_context_tokens + grown
    else:
        yield "prefill_new_tokens", step.num_tokens, step.num_tokens
        yield "prefill_context_tokens", step.num_context_tokens, step.num_context_tokens
