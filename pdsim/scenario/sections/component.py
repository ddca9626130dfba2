"""Reads components of a scenario file: policies, cost models, workloads and clients. A file names a component, such as
`fcfs`, or gives a mapping, such as `{use: "my_module:MyPolicy", patience: 5 s}`.

A component is a dataclass whose fields are its settings. A component's name stands in a table of this module, or is an
import path; nothing is registered. In a file, a field with a unit has no unit in its name: patience_ns is written
`patience: 5 s`.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from importlib.machinery import PathFinder
from math import isfinite
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter, ValidationError, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from pdsim.cost.model import CostSettings
from pdsim.inputs import shown
from pdsim.policy import protocols
from pdsim.scenario.sections.faults import Fault
from pdsim.scenario.sections.fields import DIMENSIONS, Dimension, Seed, base_folder, require_no_boolean
from pdsim.scenario.yaml_file import did_you_mean
from pdsim.workload.client import Arrivals, Client
from pdsim.workload.lengths import Lengths
from pdsim.workload.request_spec import Workload

_ALLOWED: ContextVar[bool] = ContextVar("imports_allowed", default=True)


@contextmanager
def imports(*, allowed: bool) -> Iterator[None]:
    """Context in which import paths of components are allowed or refused."""
    token = _ALLOWED.set(allowed)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def imports_are_allowed() -> bool:
    return _ALLOWED.get()


def require_trust(name: str, module: str) -> None:
    """Raises ValueError if import paths are refused. The message names the file of the module's top package, which an
    import would run first; the file is found without an import. name: import path of the component. module: its module.
    """
    if imports_are_allowed():
        return
    package = module.partition(".")[0]
    found = PathFinder.find_spec(package) or PathFinder.find_spec(package, [""])
    where = "which is not found" if found is None else f"from {found.origin or package}"
    raise ValueError(
        f"{name!r} is no built-in name: pdsim would import the module {module}, {where}, and run its code; "
        "if you trust its author, give --trust or set PDSIM_TRUST=1"
    )


BUILT_IN: dict[Any, dict[str, str]] = {
    protocols.PrefillPolicy: {
        "fcfs": "pdsim.policy.prefill:FirstComeFirstServed",
        "shortest_prompt_first": "pdsim.policy.prefill:ShortestPromptFirst",
        "priority": "pdsim.policy.prefill:HighestPriorityFirst",
        "lpm": "pdsim.policy.prefill:LongestPrefixFirst",
        "lof": "pdsim.policy.prefill:LongestOutputFirst",
        "hrrn": "pdsim.policy.prefill:HighestResponseRatioFirst",
        "shortest_prefill_first": "pdsim.policy.prefill:ShortestPrefillFirst",
        "dfs_weight": "pdsim.policy.prefill:DepthFirst",
        "random": "pdsim.policy.prefill:RandomOrder",
    },
    protocols.AdmissionPolicy: {
        "reserve_decode_tokens": "pdsim.policy.pages:ReserveDecodeTokens",
        "reserve_max_output": "pdsim.policy.pages:ReserveMaxOutput",
        "free_pages": "pdsim.policy.pages:FreePages",
    },
    protocols.PreemptionPolicy: {
        "fewest_outputs_first": "pdsim.policy.pages:FewestOutputsFirst",
        "last_arrived_first": "pdsim.policy.pages:LastArrivedFirst",
        "last_admitted_first": "pdsim.policy.pages:LastAdmittedFirst",
        "lowest_priority_first": "pdsim.policy.pages:LowestPriorityFirst",
    },
    protocols.EvictionPolicy: {
        "lru": "pdsim.policy.pages:LeastRecentlyUsed",
        "lfu": "pdsim.policy.pages:LeastFrequentlyUsed",
        "fifo": "pdsim.policy.pages:FirstInFirstOut",
    },
    protocols.TransferPolicy: {
        "every_chunk": "pdsim.policy.prefill:EveryChunk",
        "whole_prompt": "pdsim.policy.prefill:WholePrompt",
    },
    protocols.RoutingPolicy: {
        "cache_aware": "pdsim.policy.routing:CacheAware",
        "round_robin": "pdsim.policy.routing:RoundRobin",
        "random": "pdsim.policy.routing:RandomChoice",
        "power_of_two": "pdsim.policy.routing:PowerOfTwo",
        "least_loaded": "pdsim.policy.routing:LeastLoaded",
        "dynamo_kv": "pdsim.policy.dynamo:DynamoKv",
        "llm_d": "pdsim.policy.llm_d:LlmD",
        "session_affinity": "pdsim.policy.sessions:SessionAffinity",
        "manual": "pdsim.policy.sessions:Manual",
        "sticky_least_loaded": "pdsim.policy.sessions:StickyLeastLoaded",
    },
    protocols.DisaggregationPolicy: {
        "prefix_based": "pdsim.policy.routing:PrefixBased",
        "length_and_queue": "pdsim.policy.routing:LengthAndQueue",
    },
    protocols.ScalingPolicy: {
        "load_thresholds": "pdsim.policy.scaling:LoadThresholds",
        "forecast": "pdsim.policy.scaling:Forecast",
        "spare_saturation": "pdsim.policy.planners:SpareSaturation",
        "throughput_planner": "pdsim.policy.planners:ThroughputPlanner",
    },
    protocols.SheddingPolicy: {
        "queue_limit": "pdsim.policy.routing:QueueLimit",
    },
    protocols.QueuePolicy: {
        "busy_threshold": "pdsim.policy.queueing:BusyThreshold",
    },
    CostSettings: {
        "kernels": "pdsim.cost.settings:Kernels",
        "roofline": "pdsim.cost.settings:Roofline",
        "affine": "pdsim.cost.settings:Affine",
        "table": "pdsim.cost.settings:AffineTable",
        "aiconfigurator": "pdsim.cost.settings:AiConfigurator",
    },
    Workload: {
        "random_lengths": "pdsim.workload.synthetic:RandomLengths",
        "prefix_pool": "pdsim.workload.synthetic:PrefixPool",
        "shared_prefix_groups": "pdsim.workload.synthetic:SharedPrefixGroups",
        "sessions": "pdsim.workload.synthetic:Sessions",
        "mooncake_trace": "pdsim.workload.traces:MooncakeTrace",
        "agentic_mooncake_trace": "pdsim.workload.traces:AgenticMooncakeTrace",
        "applied_compute_trace": "pdsim.workload.traces:AppliedComputeTrace",
        "bailian_trace": "pdsim.workload.traces:BailianTrace",
        "burstgpt_trace": "pdsim.workload.traces:BurstGptTrace",
        "azure_trace": "pdsim.workload.traces:AzureTrace",
        "sharegpt": "pdsim.workload.prompts:ShareGpt",
        "chat_trace": "pdsim.workload.prompts:ChatTrace",
        "weka_trace": "pdsim.workload.agent_plays:WekaTrace",
        "request_table": "pdsim.workload.traces:RequestTable",
    },
    Client: {
        "open_loop": "pdsim.workload.client:OpenLoop",
        "closed_loop": "pdsim.workload.client:ClosedLoop",
    },
    Fault: {
        "kill": "pdsim.scenario.sections.faults:Kill",
        "link": "pdsim.scenario.sections.faults:SlowLink",
        "abort": "pdsim.scenario.sections.faults:ClientAbort",
        "abort_fraction": "pdsim.scenario.sections.faults:ClientAborts",
    },
    Arrivals: {
        "poisson": "pdsim.workload.client:Poisson",
        "gamma": "pdsim.workload.client:Gamma",
        "constant": "pdsim.workload.client:Constant",
        "bursts": "pdsim.workload.client:Bursts",
        "profile": "pdsim.workload.client:Profile",
    },
    Lengths: {
        "fixed": "pdsim.workload.lengths:Fixed",
        "uniform": "pdsim.workload.lengths:Uniform",
        "normal": "pdsim.workload.lengths:Normal",
        "lognormal": "pdsim.workload.lengths:Lognormal",
        "gamma_lengths": "pdsim.workload.lengths:GammaLengths",
        "exponential": "pdsim.workload.lengths:Exponential",
        "empirical": "pdsim.workload.histogram:Empirical",
        "mixed": "pdsim.workload.lengths:Mixed",
    },
}
ROUTING_POLICIES = tuple(BUILT_IN[protocols.RoutingPolicy])


class Component:
    """Marks a pydantic field that holds a component, such as a policy. In files the field has the component's name and
    settings. In code it has the object.

    A mapping without `use` changes the settings of the default component.
    """

    def __init__(self, default: str | None = None, *, by_field: bool = False) -> None:
        """default: name of the component that a mapping without `use` means; None: such a mapping is refused. by_field:
        True: a mapping without `use` means the component that is named like one of the mapping's fields.
        """
        self.default, self.by_field = default, by_field

    def __get_pydantic_core_schema__(self, seam: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def validate(value: Any, info: ValidationInfo[Any]) -> Any:
            if isinstance(value, Mapping) and "use" not in value:
                named = (
                    next((name for name in BUILT_IN[seam] if name in value), None) if self.by_field else self.default
                )
                value = {"use": named, **value} if named else value
            return build_component(seam, value, base_folder(info))

        return core_schema.with_info_plain_validator_function(
            validate,
            serialization=core_schema.plain_serializer_function_ser_schema(describe_component),
            metadata={"seam": seam},
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        names = BUILT_IN[schema["metadata"]["seam"]]
        by_name = {"type": "string", "anyOf": [{"enum": list(names)}, {"pattern": ":"}]}
        by_fields = {
            "type": "object",
            "properties": {"use": by_name},
            "required": [] if self.default or self.by_field else ["use"],
        }
        return {"anyOf": [by_name, by_fields]}


def build_component(seam: Any, spec: Any, base: Path) -> Any:
    """Makes a component from its name, or from a mapping with `use` and settings. Returns an object unchanged.

    seam: the protocol or union of classes that the component must satisfy. base: folder at which relative paths start.
    spec: the name, the mapping or the object; for lengths also a number of tokens, which means `fixed`.
    """
    if seam is Lengths and isinstance(spec, int) and not isinstance(spec, bool):
        spec = {"use": "fixed", "tokens": spec}
    if is_dataclass(spec) and not isinstance(spec, type):
        return _checked(seam, spec)
    given = {"use": spec} if isinstance(spec, str) else spec
    if not isinstance(given, Mapping) or not isinstance(given.get("use"), str):
        raise ValueError(f"expected a name or a mapping with `use`, found {shown(spec)}; {_choices(seam)}")
    settings = {name: value for name, value in given.items() if name != "use"}
    return _checked(seam, _construct(_load(seam, given["use"]), given["use"], settings, base))


def describe_component(value: Any) -> Any:
    """Returns the name of a component without settings; of others, a mapping with the name (`use`) and all settings.
    From either, `build_component` makes the component again.
    """
    kind: Any = type(value)
    name = _name_of(kind)
    settings = {key: _describe(getattr(value, field.name), dimension) for field, key, dimension in settings_of(kind)}
    return {"use": name, **settings} if settings else name


def component_name(value: Any) -> str:
    """The name by which scenario files choose the component, as the value of `use`."""
    kind: Any = type(value)
    return _name_of(kind)


@cache
def _name_of(kind: type[Any]) -> str:
    path = f"{kind.__module__}:{kind.__qualname__}"
    return next((n for table in BUILT_IN.values() for n, p in table.items() if p == path), path)


@cache
def settings_of(kind: type[Any]) -> tuple[tuple[Field[Any], str, Dimension | None], ...]:
    """The fields of a class that scenario files can configure, such as a policy or a workload. Each field comes with
    its name in files and the dimension of its value, such as time (None: the value has no unit). kind: the class.
    """
    return tuple((field, *in_file(field.name)) for field in fields(kind) if field.init)


_type_hints = cache(get_type_hints)
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def default_of(field: Field[Any], dimension: Dimension | None) -> Any:
    """The default of a field, as a file would give it. MISSING: the field has no default. dimension: gives numbers
    their unit; None: the field has no unit.
    """
    if field.default is MISSING and field.default_factory is MISSING:
        return MISSING
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return _describe(default, dimension)


def _describe(value: Any, dimension: Dimension | None) -> Any:
    if is_dataclass(value):
        return describe_component(value)
    if dimension is not None and isinstance(value, Mapping):
        return {key: dimension.show(amount) for key, amount in value.items()}
    if dimension is not None and isinstance(value, tuple):
        return [dimension.show(amount) for amount in value]
    if isinstance(value, tuple) and any(map(is_dataclass, value)):
        return [describe_component(part) for part in value]
    if dimension is not None and value is not None:
        return dimension.show(value)
    return str(value.absolute()) if isinstance(value, Path) else value


def _construct(kind: Any, name: str, settings: dict[str, Any], base: Path) -> Any:
    hints = _type_hints(kind)
    known = {key: field for field, key, _ in settings_of(kind)}
    arguments = {}
    for key, value in settings.items():
        if key not in known:
            raise ValueError(
                f"{name} has no field {key!r}{did_you_mean(key, known)}; it has {', '.join(known) or 'none'}"
            )
        field_name = known[key].name
        try:
            hint = Seed if field_name == "seed" else hints[field_name]  # policies know no pydantic
            arguments[field_name] = _convert(hint, in_file(field_name)[1], value, base)
        except ValueError as wrong:
            raise ValueError(f"{name}.{key}: {wrong}") from None
    missing = [
        key
        for key, field in known.items()
        if field.default is MISSING and field.default_factory is MISSING and field.name not in arguments
    ]
    if missing:
        raise ValueError(f"{name} needs {', '.join(missing)}")
    return kind(**arguments)


def _convert(hint: Any, dimension: Dimension | None, value: Any, base: Path) -> Any:
    """Converts a value from a file to the type of its field. hint: type of the field. dimension: kind of quantity of
    the value; None: a plain value.
    """
    options = get_args(hint) or (hint,)
    if value is None and NoneType in options:
        return None
    for seam in BUILT_IN:
        if get_origin(hint) is tuple and seam in options and isinstance(value, list):
            return tuple(build_component(seam, one, base) for one in value)
        if seam in options or hint == seam:
            return build_component(seam, value, base)
    if dimension is not None and any(get_origin(option) is Mapping for option in options):
        return _quantities(dimension, value)
    if dimension is not None and isinstance(value, list) and any(get_origin(option) is tuple for option in options):
        return tuple(_convert(options[0], dimension, one, base) for one in value)
    if dimension is not None:
        amount = dimension.parse(value)
        return round(amount) if int in options else amount
    if Path in options:
        if not isinstance(value, str | Path):
            raise ValueError(f"expected a path, found {shown(value)}")
        return base / value
    require_no_boolean(hint, value)
    try:
        made = _adapter(hint).validate_python(value)
    except ValidationError as wrong:
        raise ValueError(f"{wrong.errors()[0]['msg']}, found {shown(value)}") from None
    if isinstance(made, float) and not isfinite(made):
        raise ValueError(f"expected a finite number, found {shown(value)}")
    return made


def _quantities(dimension: Dimension, value: Any) -> dict[int, float]:
    """Reads a mapping from sizes to quantities, such as {256: 11.8 ms, 1024: 20 ms}. The returned quantities are in the
    dimension's base unit, such as ns.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, int) and key >= 0 for key in value):
        raise ValueError(
            f"expected a {dimension.what} for each size, such as {{1: {dimension.example}}}, found {shown(value)}"
        )
    return {key: dimension.parse(amount) for key, amount in value.items()}


def in_file(field_name: str) -> tuple[str, Dimension | None]:
    for dimension in DIMENSIONS:
        if field_name.endswith(dimension.suffix):
            return field_name.removesuffix(dimension.suffix), dimension
    return field_name, None


def _load(seam: Any, name: str) -> type[Any]:
    path = BUILT_IN[seam].get(name, name)
    module, colon, attribute = path.partition(":")
    if not colon:
        raise ValueError(f"no {_seam_name(seam)} {name!r}{did_you_mean(name, BUILT_IN[seam])}; {_choices(seam)}")
    if not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(f"{module!r} in {name!r} is no module's name; write module:Class, such as my_policies:Mine")
    if path == name:
        require_trust(name, module)
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as missing:
        raise ValueError(f"cannot import {name!r}: {missing}; is its folder in PYTHONPATH?") from None
    except Exception as wrong:  # noqa: BLE001  whatever its author's code raises
        raise ValueError(f"cannot import {name!r}: {type(wrong).__name__}: {wrong}") from None
    if found is None:
        raise ValueError(f"module {module!r} has no {attribute!r}")
    if not (isinstance(found, type) and is_dataclass(found)):
        raise ValueError(f"{name} is no dataclass; fields of a dataclass are the settings")
    return found


def _checked(seam: Any, made: Any) -> Any:
    """Returns the component `made`. Raises ValueError if it does not satisfy `seam`: a protocol whose methods it must
    have, or a union of classes to one of which it must belong.
    """
    kinds = get_args(seam)
    if kinds and not isinstance(made, kinds):
        raise ValueError(f"{made!r} is none of {', '.join(kind.__name__ for kind in kinds)}")
    if not kinds:
        wanted = [name for name, value in vars(seam).items() if callable(value) and not name.startswith("_")]
        if lacking := [name for name in wanted if not callable(getattr(made, name, None))]:
            raise ValueError(f"{type(made).__name__} is no {_seam_name(seam)}: it has no method {', '.join(lacking)}")
    return made


def _seam_name(seam: Any) -> str:
    return "fault" if seam is Fault else getattr(seam, "__name__", "client")


def _choices(seam: Any) -> str:
    return f"there are {', '.join(BUILT_IN[seam])}, or write module:Class"
