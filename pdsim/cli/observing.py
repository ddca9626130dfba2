"""The command that observes a running server."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from pdsim.cli.command import Json, print_json
from pdsim.metrics.run_folder import require_out
from pdsim.scenario.yaml_file import ConfigError


def observe(
    url: str,
    *,
    out: Annotated[Path, Parameter(name=("--out", "-o"), help="Write rows, server and load here.")] = Path("observed"),
    minutes: Annotated[float, Parameter(help="Longest time in all.")] = 10.0,
    requests: Annotated[int, Parameter(help="Most completions in all.")] = 600,
    concurrency: Annotated[int, Parameter(help="Most completions at a time.")] = 16,
    longest_prompt: Annotated[int, Parameter(help="Tokens of the longest prompt.")] = 4096,
    model: Annotated[str | None, Parameter(help="As the server calls it; its first if not given.")] = None,
    gpu: Annotated[str | None, Parameter(help="In the catalog: what the server runs on, which none says.")] = None,
    tp: Annotated[int | None, Parameter(help="GPUs of an instance, where the server does not say it.")] = None,
    api_key: Annotated[
        str | None, Parameter(env_var="OPENAI_API_KEY", help="Sent as bearer token, written nowhere.")
    ] = None,
    dry_run: Annotated[bool, Parameter(negative=(), help="Say what would be sent, and send nothing.")] = False,
    json_: Json = False,
) -> None:
    """Measure a running OpenAI-compatible server from outside: rows for calibrate, and a load for validate --observed.

    Prompts are random text, each sent once. An interrupted command keeps what it has.

    Parameters
    ----------
    url
        Where the server listens, such as http://127.0.0.1:30000.

    """
    from dataclasses import asdict

    from pdsim.calibration.observe.plan import Budget, loads, planned
    from pdsim.calibration.observe.server import ServerClient
    from pdsim.calibration.observe.session import Session
    from pdsim.cli.finished import progress_over
    from pdsim.show.observation_tables import print_observation, print_plan

    if not minutes > 0:
        raise ConfigError(f"--minutes: expected a time above 0, found {minutes}")
    least_of = {"requests": (requests, 20), "concurrency": (concurrency, 1), "longest-prompt": (longest_prompt, 64)}
    if tp is not None:
        least_of["tp"] = (tp, 1)
    for name, (value, least) in least_of.items():
        if value < least:
            raise ConfigError(f"--{name}: expected at least {least}, found {value}")
    server = ServerClient(url, model=model, api_key=api_key)
    budget = Budget(minutes, requests, concurrency, longest_prompt)
    probes = list(planned(budget))
    if dry_run:
        if json_:
            print_json({"url": server.url, "budget": asdict(budget), "probes": [one._asdict() for one in probes]})
        else:
            print_plan(server.url, budget, probes, loads(budget))
        return
    require_out(out)
    words = {
        "--minutes": minutes,
        "--requests": requests,
        "--concurrency": concurrency,
        "--longest-prompt": longest_prompt,
    }
    command = " ".join(["pdsim observe", server.url, *(f"{flag} {value:g}" for flag, value in words.items())])
    session = Session(server, budget, out, command=command, gpu=gpu, tp=tp)
    with progress_over("observing", sum(one.num_requests for one in probes), quiet=json_) as advance:
        session.run(probes, advance)
    for note in session.notes:
        print(f"pdsim: {note}", file=sys.stderr)
    if json_:
        print_json(session.to_json())
    else:
        print_observation(session)
    if session.interrupted:
        raise SystemExit(130)
