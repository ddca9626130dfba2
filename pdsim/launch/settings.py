"""Fields of a scenario that a launch says, leaves aside or refuses: none is dropped in silence."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, is_dataclass
from typing import Any, NamedTuple

from pdsim.scenario.component import component_name, settings_of
from pdsim.scenario.fields import Section
from pdsim.scenario.schema import Scenario
from pdsim.scenario.servers import Split
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.catalog import load_model

ROLES = ("prefill", "decode", "aggregated")


class Aside(str):
    """The reason why a field is nothing that one launches."""

    __slots__ = ()


Check = Callable[[Any, Scenario], str | None]
Rule = Check | Aside | str | None
"""None: said by the launch; a check, or words: why it is refused, and what is possible."""

_TIMES = Aside("times and shares that the real cluster has of its own")
_OF_PAIRS = Aside("an aggregated cluster has one policy of routing and no transfers")
_DRAFTS = Aside("drafting and acceptance are those of the draft model")
RULES: dict[str, Rule] = {
    "name": None,
    "description": Aside("for readers"),
    "seed": None,
    "model": None,
    "context_tokens": None,
    "page_size": None,
    **dict.fromkeys(ROLES),
    **{
        f"*.{name}": None
        for name in ("instances", "gpu", "tp", "dp", "ep", "mem_fraction", "pool_tokens", "radix_cache")
    },
    "*.expert_skew": Aside("a property of the load"),
    "*.redundant_experts": None,
    **{f"*.{name}": None for name in ("max_running_requests", "chunked_prefill_tokens", "overlap")},
    "*.speculative_draft_tokens": None,
    "*.speculative_accept_length": _DRAFTS,
    "*.speculative_drafting": _DRAFTS,
    "decode.retraction_backup": _TIMES,
    "router.prefill.seed": Aside("draws are the router's own"),
    "router.decode.seed": Aside("draws are the router's own"),
    "network": _TIMES,
    "network.staging": "only SGLang has a staging buffer; leave it out",
    "cost": _TIMES,
    "corner": _TIMES,
    "cost.graph_sizes": None,
    "front_end": _TIMES,
    "workload": None,
    "client": None,
    "faults": Aside("things that a real cluster is not told"),
}
"""Rules that all engines share."""
_LACKING = "has no such setting; leave it out"


class Leaf(NamedTuple):
    path: str
    value: Any
    is_default: bool


def leaves(section: Section, path: str = "") -> Iterator[Leaf]:
    """Fields without fields of their own, and names of components."""
    for name, info in type(section).model_fields.items():
        value, default = getattr(section, name), info.get_default(call_default_factory=True)
        where = f"{path}.{name}" if path else name
        if isinstance(value, Section):
            yield Leaf(where, value, default is not None and type(default) is type(value))
            yield from leaves(value, where)
        elif is_dataclass(value):
            yield from _of_component(value, where, is_default=type(default) is type(value))
        else:
            yield Leaf(where, value, value == default)


def _of_component(component: Any, path: str, *, is_default: bool) -> Iterator[Leaf]:
    yield Leaf(path, component_name(component), is_default)
    kind: Any = type(component)
    for field, name, _ in settings_of(kind):
        value = getattr(component, field.name)
        if is_dataclass(value):
            yield from _of_component(value, f"{path}.{name}", is_default=False)
        else:
            yield Leaf(f"{path}.{name}", value, field.default is not MISSING and value == field.default)


def notes_on(scenario: Scenario, engine: str, rules: Mapping[str, Rule]) -> list[str]:
    """Notes: the servers, and fields that are left aside. Raises ConfigError with all that the engine refuses."""
    rules = {**RULES, **rules}
    refused: list[str] = []
    aside: dict[str, list[str]] = {}
    for leaf in leaves(scenario):
        is_of_pairs = scenario.aggregated is not None and leaf.path.startswith(("router.decode", "network"))
        rule = _OF_PAIRS if is_of_pairs else _nearest(rules, leaf.path, f"{engine} {_LACKING}")
        if isinstance(rule, Aside):
            if not leaf.is_default:
                aside.setdefault(rule, []).append(leaf.path)
        elif words := rule(leaf.value, scenario) if callable(rule) else None if leaf.is_default else rule:
            shown = "given" if isinstance(leaf.value, Section) else leaf.value
            refused.append(f"{leaf.path}: {shown}: {words}")
    if refused:
        raise ConfigError(f"--engine {engine} cannot launch {scenario.name}:\n  " + "\n  ".join(refused))
    return [*_servers(scenario), *(f"{', '.join(paths)}: {why}" for why, paths in aside.items())]


def _servers(scenario: Scenario) -> list[str]:
    given = {role: getattr(scenario, role) for role in ROLES if getattr(scenario, role) is not None}
    return [
        f"{role}: instances {servers.instances}, {_sizes(servers.split)}, gpu {servers.gpu}"
        for role, servers in given.items()
    ]


def _sizes(split: Split) -> str:
    return ", ".join(f"{name} {size}" for name, size in split._asdict().items() if size > 1 or name == "tp")


def _nearest(rules: Mapping[str, Rule], path: str, missing: str) -> Rule:
    """The rule of the field, or of what it is part of. A check is for one field alone."""
    inner = path
    while inner:
        role, dot, rest = inner.partition(".")
        for key in (inner, f"*.{rest}" if dot and role in ROLES else inner):
            if key in rules and (inner == path or not callable(rules[key])) and (inner == path or key not in ROLES):
                return rules[key]
        inner = inner.rpartition(".")[0]
    return missing


def one_of(names: Iterable[str], who: str) -> Check:
    known = tuple(names)
    return lambda value, _: None if value in known else f"{who} has {', '.join(known)}"


def weights(value: Any, scenario: Scenario) -> str | None:
    """Engines cast a checkpoint to FP8 while they load it (--quantization fp8); all else is another checkpoint."""
    if value in (None, "fp8", load_model(scenario.model).weight_dtype):
        return None
    return "an engine takes the checkpoint's weights, or fp8; leave it out and give --model-path of such a checkpoint"


def quantization(scenario: Scenario) -> str | None:
    """The value of --quantization."""
    is_other = scenario.weight_dtype == "fp8" and load_model(scenario.model).weight_dtype != "fp8"
    return "fp8" if is_other else None
