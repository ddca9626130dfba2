"""The command `pdsim import`, which makes a scenario from the files of a deployment."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from pdsim.cli.command import Json, Set, out_at, print_json
from pdsim.files import require_new, write_new
from pdsim.scenario.yaml_file import ConfigError, named, to_yaml

if TYPE_CHECKING:
    from pdsim.formats.deployments.importing import Imported


def import_(
    *files: Annotated[
        Path,
        Parameter(
            help="Scripts, manifests or values with commands of SGLang, vLLM or Dynamo, or a folder of them; beside "
            "these a trace or a client's result for the load."
        ),
    ],
    out: Annotated[Path, out_at("Scenario file to write.")] = Path("imported.yaml"),
    model: Annotated[
        str | None, Parameter(help="Model, by its name in pdsim catalog, if the files use another name.")
    ] = None,
    gpu: Annotated[
        str | None, Parameter(help="GPU, by its name in pdsim catalog, if the files do not name it.")
    ] = None,
    set_: Set = (),
    json_: Json = False,
) -> None:
    """Write a scenario from a deployment, and list what was read, what was ignored, and what was assumed."""
    from pdsim.formats.deployments.importing import changed, import_deployment
    from pdsim.scenario.building.cluster import build
    from pdsim.scenario.loading import parse_scenario

    if not files:
        raise ConfigError("import needs files of a deployment")
    require_new(out)
    with named(*files):
        found = import_deployment(files, model=model, gpu=gpu)
    data = changed(found, set_)
    problem = ""
    try:
        build(parse_scenario(data, base=out.parent, where=str(out)))
    except ConfigError as wrong:
        problem = str(wrong)
    write_new(out, _text(found, data))
    if json_:
        print_json({"scenario": str(out), **_said(found), "problem": problem})
    else:
        for title, lines in _said(found).items():
            print(f"{title}:" if lines else f"{title}: nothing")
            print("".join(f"  {line}\n" for line in lines), end="")
        print(f"scenario: {out}")
    if problem:
        raise ConfigError(f"{out} was written, but cannot run yet: {problem}")


def _said(found: "Imported") -> dict[str, list[str]]:
    return {"understood": found.understood, "left aside": found.aside, "assumed": found.assumed}


def _text(found: "Imported", data: object) -> str:
    """The text of the scenario file, with the fields in `data`. Comments at its beginning list fields that were ignored
    or assumed.
    """
    from pdsim.launch.words import comment

    notes = [*(f"assumed: {line}" for line in found.assumed), *(f"left aside: {line}" for line in found.aside)]
    return "".join(map(comment, ["read by pdsim import", *notes])) + to_yaml(data)
