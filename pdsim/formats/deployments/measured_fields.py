"""Fields that a scenario gets only with a measured number, which no command line has: speculation and HiSparse."""

from collections.abc import Mapping
from typing import Any

from pdsim.formats.deployments.readers import Read, Value, count_of, object_of
from pdsim.scenario.sections.speculation import named

_TOP_K = 2048
"""SGLang's default of top_k in --hisparse-config (0.5.23, mem_cache/sparsity/factory.py:79)."""


def read_hisparse_config(read: Read, value: Value) -> None:
    """Stores SGLang's --hisparse-config (0.5.23, mem_cache/sparsity/factory.py:63) in the server's fields. The kernel's
    block size is left out, because scenarios have no such field.
    """
    found = object_of(value)
    read.server["hisparse"] = {
        "device_buffer_tokens": found.get("device_buffer_size", 2 * count_of(str(found.get("top_k", _TOP_K)))),
        "host_to_device_ratio": found.get("host_to_device_ratio", 2),
    }


def take_measured_fields(given: dict[str, Any], read: Read, role: str) -> dict[str, Any]:
    """Removes the fields of speculation and HiSparse from `given`, and returns them (none for prefill). given: fields
    that a server's options set. read: gets a note if an aggregated server uses HiSparse, which pdsim does not model.
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
    """Adds those fields to a role's fields (`servers`) that say nothing without a measured number, if the user has set
    this number in `servers`. Returns (the role's fields, notes). withheld: such fields, as take_measured_fields returns
    them. Fields of speculation need speculative_accept_length, and hisparse needs a miss rate. The notes name the
    fields that are not added, and the number that they need.
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
