"""Finds the shortest command that simulates the cluster and load that the page shows."""

import shlex
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from pdsim.scenario.loading import Changes, apply_change, parse_scenario, set_field
from pdsim.scenario.schema import Scenario
from pdsim.scenario.starter import starting_point
from pdsim.scenario.yaml_file import ConfigError, read_yaml
from pdsim.study.base import Base
from pdsim.study.points.tasks import described


def shortest_command(base: Base, changes: Changes, slo: str) -> str:
    """The shortest `pdsim run` command that repeats the simulation behind an answer. The command names the scenario
    file, if there is one, and the changes (--set) without those that have no effect; a change of the whole client
    always stays. Without a file, the changes start from pdsim's built-in scenario without its client. slo: the SLO as
    text.
    """
    own = read_yaml(base.path) if base.of_starter is None else starting_point()
    if base.of_starter is not None:
        del own["client"]  # without a file, `pdsim run` asks for a load
    given = [described({path: value}) for path, value in _differences(own, _data(base, changes))]
    wanted = base.changed(changes)
    for change in list(given):
        fewer = [one for one in given if one != change]
        if not change.startswith("client=") and _changed(own, fewer, base) == wanted:
            given = fewer
    file = [shlex.quote(str(base.path))] if base.of_starter is None else []
    sets = [f"--set {shlex.quote(change)}" for change in given]
    return " ".join(["pdsim run", *file, "--seed 1", f"--slo {shlex.quote(slo)}", *sets])


def _data(base: Base, changes: Changes) -> dict[str, Any]:
    data: dict[str, Any] = read_yaml(base.path)
    for change in base.changes:
        apply_change(data, change)
    for path, value in changes.items():
        set_field(data, path, deepcopy(value), where=path)
    return data


def _changed(own: Mapping[str, Any], given: list[str], base: Base) -> Scenario | None:
    """The scenario that the fields `own` of a file make with the changes `given`, in the notation of --set. None: the
    changed fields are no valid scenario.
    """
    data = deepcopy(dict(own))
    try:
        for change in given:
            apply_change(data, change)
        return parse_scenario(data, base=base.path.parent)
    except ConfigError:
        return None


def _differences(before: Mapping[str, Any], after: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the path and the new value of each field of `after` that differs from `before`. Both are scenarios as
    nested dicts and lists. If a section names another component (`use`), or lacks fields that the section has in
    `before`, the whole section is a single field. path: prefix of the yielded paths.
    """
    for name, value in after.items():
        own = before.get(name)
        if name in before and own == value:
            continue
        if _is_same_section(own, value):
            yield from _differences(own or {}, value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _is_same_section(own: Any, value: Any) -> bool:
    if not isinstance(value, Mapping) or not value:
        return False
    if own is None:
        return "use" not in value
    return isinstance(own, Mapping) and own.keys() <= value.keys() and own.get("use") == value.get("use")
