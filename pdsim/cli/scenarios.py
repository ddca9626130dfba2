"""Commands on scenarios: init, schema, fields, launch."""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from pdsim.cli.command import Json, ScenarioFile, Set, out_at, print_json
from pdsim.files import require_empty_or_own, require_new, write_new, write_whole
from pdsim.scenario.starter import StarterOptions, commented, first_scenario, starting_point
from pdsim.scenario.yaml_file import ConfigError, named

if TYPE_CHECKING:
    from pdsim.launch.commands import Launch
    from pdsim.scenario.schema import Scenario

_MARK = "# written by pdsim launch"
"""First line of every file that `pdsim launch` writes."""
_WITHOUT_COMMENTS = (".json", ".jsonl")


def init(
    file: Annotated[
        Path, Parameter(help="File to write. Its name without the suffix becomes the scenario's name.")
    ] = Path("scenario.yaml"),
    /,
    *,
    options: Annotated[StarterOptions, Parameter(name="*", help="Cluster and load.")] = StarterOptions(),  # noqa: B008  it is frozen
    set_: Set = (),
    json_: Json = False,
) -> None:
    """Write a first scenario file with comments. On a terminal, without --set, ask for the values that no flag gives.

    An existing file is never overwritten.
    """
    require_new(file)
    if sys.stdin.isatty() and not json_ and not set_:
        try:
            options = _asked(options)
        except (EOFError, KeyboardInterrupt):
            print("\npdsim: nothing is written", file=sys.stderr)
            raise SystemExit(130) from None
    data = first_scenario(options, set_, file=file)
    write_new(file, commented(data))
    if json_:
        print_json({"scenario": str(file)})
    else:
        print(f"{file}: {_summary(data)}\nrun it: pdsim run {file}")


def _summary(data: dict[str, Any]) -> str:
    """The cluster of a scenario as text, such as "qwen3-8b on 1P3D, each of 1 h100"."""
    prefill, decode = data.get("prefill"), data.get("decode")
    if not prefill or not decode:
        return str(data["model"])
    servers = [f"{role['tp']} {role['gpu']}" for role in (prefill, decode)]
    each = " and ".join(dict.fromkeys(servers))
    return f"{data['model']} on {prefill['instances']}P{decode['instances']}D, each of {each}"


def _asked(options: StarterOptions) -> StarterOptions:
    """Asks the user for each option that is missing. Returns the options with the answers."""
    from pdsim.system.catalog import load_gpu, load_model, names

    start = starting_point()
    print(
        f"models: {', '.join(names('models'))}\nGPUs: {', '.join(names('gpus'))}\nEnter takes what stands in brackets."
    )
    in_flight = f"{start['client']['concurrency']} in flight"
    questions: tuple[tuple[str, str, str, Callable[[str], Any]], ...] = (
        ("model", "model", start["model"], lambda answer: load_model(answer).name),
        ("gpu", "GPU", start["prefill"]["gpu"], lambda answer: load_gpu(answer).name),
        ("prefill", "prefill servers", start["prefill"]["instances"], _count),
        ("decode", "decode servers", start["decode"]["instances"], _count),
        ("tp", "GPUs of each server", "the fewest that hold the model", _count),
        ("trace", "file of a trace", "made-up requests", _file),
        ("rate", "requests per second, such as 4/s", in_flight, str),
    )
    answered = {"trace"} if options.input_tokens or options.output_tokens else set()
    answered |= {"rate"} if options.concurrency else set()
    for name, question, default, parse in questions:
        if getattr(options, name) is None and name not in answered:
            shown = f"the trace's times, else {default}" if name == "rate" and options.trace else default
            options = replace(options, **{name: _answer(f"{question} [{shown}]: ", parse)})
    return options


def _answer(question: str, parse: Callable[[str], Any]) -> Any:
    """Asks the user until the answer is valid, and returns the value. parse: makes the value from the answer's text;
    raises ValueError for an invalid answer. Returns None if the user pressed Enter.
    """
    while answer := input(question).strip():
        try:
            return parse(answer)
        except ValueError as wrong:
            print(wrong)
    return None


def _count(answer: str) -> int:
    if not answer.isdecimal() or int(answer) < 1:
        raise ValueError(f"{answer!r}: expected a number of at least 1")
    return int(answer)


def _file(answer: str) -> Path:
    path = Path(answer).expanduser()
    if not path.is_file():
        raise ValueError(f"{answer}: no such file")
    return path


def schema(
    kind: Annotated[Literal["scenario", "sweep"], Parameter(help="Kind of file: scenario or sweep.")] = "scenario", /
) -> None:
    """Print the JSON schema of scenario files, or of sweep files."""
    from pdsim.scenario.loading import scenario_schema
    from pdsim.study.sweeping.sweep_file import sweep_schema

    print_json(sweep_schema() if kind == "sweep" else scenario_schema())


def fields(
    name: Annotated[str | None, Parameter(help="A section such as network.staging, a component, or a table.")] = None,
    /,
    *,
    json_: Json = False,
) -> None:
    """Explain the fields of scenarios, summaries and tables of a run. Without a name, list the sections."""
    from pdsim.show.reference import ReferenceEntry, entries, entry, print_entry

    if name is None:
        found = ReferenceEntry(
            "", "pdsim fields NAME", ("name", "meaning"), [(one.name, one.about) for one in entries()]
        )
    else:
        found = entry(name)
    if json_:
        print_json([dict(zip(found.columns, row, strict=True)) for row in found.rows])
    else:
        print_entry(found)


Engine = Literal["sglang", "vllm", "dynamo", "dynamo-vllm", "kubernetes"]


def launch(
    scenario: ScenarioFile,
    *,
    engine: Annotated[
        Engine | None, Parameter(help="Engine to write for; dynamo has workers of SGLang [the scenario's engine].")
    ] = None,
    model_path: Annotated[
        str | None,
        Parameter(help="Path of the model, or its name on Hugging Face [the scenario's checkpoint or model]."),
    ] = None,
    set_: Set = (),
    out: Annotated[Path | None, out_at("Folder for a file per command.")] = None,
    json_: Json = False,
) -> None:
    """Write the commands or manifests that start the cluster of a scenario and send its load."""
    from pdsim.launch import ENGINES
    from pdsim.metrics.run_folder import require_out
    from pdsim.scenario.loading import load_scenario

    loaded = load_scenario(scenario, set_)
    model = model_path or loaded.checkpoint or loaded.model
    if model.startswith("-"):
        raise ConfigError(f"--model-path {model}: servers would read it as a flag; write ./{model}")
    source = [str(scenario), *(word for change in set_ for word in ("--set", change))]
    with named(scenario):
        made = ENGINES[engine or loaded.engine](loaded, source, model)
    if engine == "kubernetes" and "trace" in made.commands:
        _replay_in_job(made, loaded, scenario, set_, model)
    if (model_path or loaded.checkpoint) is None:
        made.notes.insert(0, f"model: {model}: the catalog's name; --model-path takes a path or Hugging Face's name")
    if made.hosts:
        made.notes.append(f"hosts: {', '.join(sorted(made.hosts))} are addresses of servers with these GPUs; set them")
    files = _files(made)
    if out is not None:
        require_out(out)
        _require_launch(out, files)
        for name, text in files.items():
            write_whole(out / name, text if name.endswith(_WITHOUT_COMMENTS) else f"{_MARK}\n{text}")
    if json_:
        print_json({"commands": made.commands, "manifests": made.manifests, "notes": made.notes})
    elif out is not None:
        print(f"{', '.join(files)}: {out}")
    else:
        print(_printed(made), end="")


_LONGEST_TRACE, _BLOCK_TOKENS = 20_000, 512
"""Maximum number of requests of a trace in a Kubernetes Job, and tokens per hash id. A longer trace would be too large,
and its simulation too slow.
"""


def _replay_in_job(made: "Launch", loaded: "Scenario", path: Path, set_: Set, model: str) -> None:
    """Replaces the commands in `made` that send the load by a Kubernetes Job that replays the load as a trace. The load
    is simulated, as `pdsim export` does, to find out when each request is sent. Adds no Job if the load has more than
    _LONGEST_TRACE requests, if its requests are no turns of sessions, or if the trace is too large for a ConfigMap; in
    the last case, adds a note. model: the model's path or name for the servers.
    """
    from pdsim.cli.obtaining import obtain_runs
    from pdsim.launch.kubernetes import replay_in_job
    from pdsim.scenario.building.cluster import requests_of
    from pdsim.workload.hash_ids import NotASessionError, mooncake_rows

    requests = requests_of(loaded)
    if len(requests) > _LONGEST_TRACE:
        return
    (finished,) = obtain_runs((path,), set_, None, quiet=True)
    sent_ns = {request.request_id: request.arrival_ns for request in finished.records.requests}
    try:
        rows = [json.dumps(row) for row in mooncake_rows(requests, sent_ns, block_tokens=_BLOCK_TOKENS)]
    except NotASessionError:
        return
    replay_in_job(made, loaded, model, "".join(f"{row}\n" for row in rows))


def _printed(made: "Launch") -> str:
    """Text for the terminal: the scripts, which a shell can run as printed, or the manifests that start the cluster,
    and the notes. Of other files, only the names are printed.
    """
    from pdsim.launch.words import comment

    files = _files(made)
    shown, others = made.manifests, made.commands
    if any(what.startswith(("prefill", "aggregated")) for what in made.commands):
        shown, others = made.commands, made.manifests
    left = [name for name in files if name.removesuffix(".sh") in others or name in others]
    parts = [f"{comment(name)}{text}" for name, text in files.items() if name not in left]
    return ("\n---\n" if shown is made.manifests else "\n").join(parts) + "".join(
        comment(f"{name}: with --out") for name in left
    )


def _require_launch(out: Path, files: Iterable[str]) -> None:
    """Raises ForeignFileError if the folder has files but none that `pdsim launch` wrote, and ConfigError if one of the
    new files would replace a file that `pdsim launch` did not write. Files that `pdsim launch` wrote have _MARK as
    their first line; JSON files cannot have this line, and may always be replaced.
    """
    own = {path.name for path in (out.iterdir() if out.is_dir() else ()) if _is_of_launch(path)}
    require_empty_or_own(out, "launch", is_own=bool(own))
    for name in files:
        is_there = (out / name).is_symlink() or (out / name).exists()
        if is_there and name not in own and not name.endswith(_WITHOUT_COMMENTS):
            raise ConfigError(f"--out {out}: {name} exists and is not a file of pdsim launch; name another folder")


def _is_of_launch(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MARK)) == _MARK.encode()


def _files(made: "Launch") -> dict[str, str]:
    """The scripts or manifests, and the notes, by the names of their files."""
    from pdsim.launch.words import comment

    files = {f"{what}.sh": f"{command}\n" for what, command in made.commands.items()}
    notes = "".join(map(comment, made.notes))
    return {**files, **made.manifests, **({"notes.txt": notes} if notes else {})}
