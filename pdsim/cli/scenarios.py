"""Commands of scenario files: what they may name and hold, and the same cluster with SGLang."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from pdsim.cli.command import Json, Seed, Set, changes_of, print_json


def sglang(
    scenario: Path,
    *,
    model: Annotated[str, Parameter(help="Path or name of the model, for SGLang.")] = "$MODEL",
    set_: Set = None,
    seed: Seed = None,
    json_: Json = False,
) -> None:
    """Print the commands that put a scenario on real GPUs with SGLang: servers, gateway, load.

    Parameters
    ----------
    scenario
        A scenario file (YAML).

    """
    from pdsim.launch.sglang import launch
    from pdsim.scenario.loading import load_scenario

    loaded = load_scenario(scenario, changes_of(set_, seed))
    made = launch(loaded, model)
    if json_:
        print_json({"commands": made.commands, "notes": made.notes})
        return
    for what, command in made.commands.items():
        print(f"# {what}\n{command}\n")
    for note in made.notes:
        print(f"# not carried over: {note}")
    if "load" in made.commands:
        print(f"# beside the simulation\npdsim compare {scenario} {loaded.name}.jsonl")


def schema(of: Literal["scenario", "sweep"] = "scenario", /) -> None:
    """Print the JSON schema of scenario files, or of sweep files.

    Parameters
    ----------
    of
        Which of the two.

    """
    from pdsim.scenario.loading import scenario_schema
    from pdsim.study.sweep_file import sweep_schema

    print_json(sweep_schema() if of == "sweep" else scenario_schema())
