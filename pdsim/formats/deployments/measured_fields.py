"""Fields that a scenario gets only with a measured number, which no command line has: speculation and HiSparse."""

from collections.abc import Mapping
from typing import Any

from pdsim.formats.deployments.readers import Read, Value, count_of, object_of
from pdsim.scenario.sections.speculation import named

_TOP_K = 2048
"""SGLang's default of top_k in --hisparse-config (0.5.23, mem_cache/sparsity/factory.py:79)."""


def read_hisparse_config(read: Read, value: Value) -> None:
    """Stores device_buffer_size and host_to_device_ratio of SGLang's --hisparse-config, or their defaults (0.5.23,
    mem_cache/sparsity/factory.py:63), in the server's field `hisparse`. The kernel's block size is left out, because
    scenarios have no such field. Raises ValueError if the value is no JSON object.
    """
    found = object_of(value)
    read.server["hisparse"] = {
        "device_buffer_tokens": found.get("device_buffer_size", 2 * count_of(str(found.get("top_k", _TOP_K)))),
        "host_to_device_ratio": found.get("host_to_device_ratio", 2),
    }


def take_measured_fields(given: dict[str, Any], read: Read, role: str) -> dict[str, Any]:
    """Removes the fields of speculation and HiSparse from `given`. Returns those that the role can use: for prefill
    none, hisparse only if a decode server enables it, and speculative_draft_model only with the algorithm STANDALONE.
    given: fields that a server's options set. read: gets a note if an aggregated server enables HiSparse, which pdsim
    models on decode servers only.
    """
    taken = {name: given.pop(name) for name in [*given] if name.startswith("speculative_")}
    config, is_on = given.pop("hisparse", {}), given.pop("enable_hisparse", False)
    if role == "prefill":
        return {}
    if named(taken.get("speculative_algorithm")) != "STANDALONE":
        taken.pop("speculative_draft_model", None)
    if is_on and role == "aggregated":
        read.aside.append("--enable-hisparse: pdsim models HiSparse on decode servers only")
    elif is_on:
        taken["hisparse"] = config
    return taken


def with_measured_fields(servers: dict[str, Any], withheld: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns (the fields of a role with the withheld fields that can be simulated, notes). Withheld fields of
    speculation are added if `servers` has speculative_accept_length. Withheld settings of HiSparse are added if
    `servers` has a mapping `hisparse`, in which the user gives the miss rate. Values in `servers` take precedence. The
    notes name the fields that are not added, and the number that they need. servers: the role's fields. withheld: as
    take_measured_fields returns them.
    """
    found, notes = dict(servers), []
    drafts = {name: value for name, value in withheld.items() if name != "hisparse"}
    if servers.get("speculative_accept_length") is not None:
        found = {**drafts, **found}
    elif drafts:
        notes.append(
            f"{_shown(drafts)}: set speculative_accept_length, the accepted tokens of a step, to simulate drafts"
        )
    if (config := withheld.get("hisparse")) is None:
        return found, notes
    if isinstance(given := servers.get("hisparse"), dict):
        found["hisparse"] = {**config, **given}
    else:
        notes.append(
            f"--enable-hisparse ({_shown(config) or 'defaults'}): set decode.hisparse.miss_rate, the share of chosen "
            "tokens that a step copies from host memory, to simulate HiSparse"
        )
    return found, notes


def _shown(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())
