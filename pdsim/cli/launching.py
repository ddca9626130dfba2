"""pdsim launch: what starts the cluster of a scenario."""

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from pdsim.cli.command import Json, Set, print_json

if TYPE_CHECKING:
    from pdsim.launch.commands import Launch

Engine = Literal["sglang", "vllm", "dynamo", "dynamo-vllm", "kubernetes"]


def launch(
    scenario: Path,
    *,
    engine: Annotated[
        Engine | None, Parameter(help="Whose commands; dynamo has workers of SGLang [the scenario's engine].")
    ] = None,
    model_path: Annotated[
        str | None, Parameter(help="Path of the model, or its name on Hugging Face [the catalog's name].")
    ] = None,
    set_: Set = (),
    out: Annotated[Path | None, Parameter(name=("--out", "-o"), help="Write a file for each command here.")] = None,
    json_: Json = False,
) -> None:
    """Write what starts the cluster of a scenario and sends its load; what the engine lacks is refused.

    Parameters
    ----------
    scenario
        A scenario file (YAML).

    """
    from pdsim.launch import ENGINES
    from pdsim.metrics.run_folder import require_out
    from pdsim.scenario.loading import load_scenario

    loaded = load_scenario(scenario, set_)
    model = model_path or loaded.model
    source = shlex.join([str(scenario), *(word for change in set_ for word in ("--set", change))])
    made = ENGINES[engine or loaded.engine](loaded, source, model)
    if model_path is None:
        made.notes.insert(0, f"model: {model}: the catalog's name; --model-path takes a path or Hugging Face's name")
    if hosts := sorted({host for command in made.commands.values() for host in re.findall(r"\$HOST\d+", command)}):
        made.notes.append(f"hosts: {', '.join(hosts)} are addresses of servers with these GPUs")
    files = _files(made)
    if out is not None:
        require_out(out)
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_text(text, encoding="utf-8")
    if json_:
        print_json({"commands": made.commands, "manifests": made.manifests, "notes": made.notes})
    elif out is not None:
        print(f"{', '.join(files)}: {out}")
    else:
        print("\n".join(f"# {name}\n{text}" for name, text in files.items()), end="")


def _files(made: "Launch") -> dict[str, str]:
    """Scripts or manifests, and notes."""
    files = {f"{what}.sh": f"{command}\n" for what, command in made.commands.items()}
    notes = "".join(f"# {note}\n" for note in made.notes)
    return {**files, **made.manifests, **({"notes.txt": notes} if notes else {})}
