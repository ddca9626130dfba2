"""The command line of real mode: `pdreal` and its subcommands, such as run, serve and measure."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from pdreal.settings.host import read_hosts
from pdreal.settings.options import Dtype, OnDevice, Options, RealA2a, Threads
from pdsim.cli.command import Force, Json, Out, Port, Seed, Set, print_json, program, run_app

_OF_REAL_MODE = {"aiohttp", "safetensors", "torch", "zmq"}
"""Modules that `pip install 'pdsim[real]'` installs in addition to pdsim's own dependencies."""

app = program(
    "pdreal", "Run prefill/decode disaggregated LLM serving for real, with the scheduler that pdsim simulates."
)

RealOptions = Annotated[Options, Parameter(name="*", help="How models run.")]
OnHosts = Annotated[Path | None, Parameter(name="--hosts", help="File that assigns instances to hosts (YAML).")]


@app.command
def run(
    scenario: Path,
    *,
    set_: Set = (),
    seed: Seed = None,
    out: Out = None,
    force: Force = False,
    options: RealOptions = Options(),  # noqa: B008  it is frozen
    hosts: OnHosts = None,
    reference: Annotated[
        Path | None,
        Parameter(help="Run folder of the same requests without drafts. Accepted drafts repeat that run's outputs."),
    ] = None,
    record_experts: Annotated[
        bool, Parameter(help="Record the number of tokens of each expert in each step, in the run folder.")
    ] = False,
    json_: Json = False,
) -> None:
    """Run a scenario on real models and print the summary of the run.

    Parameters
    ----------
    scenario
        Scenario file (YAML).

    """
    from pdreal.run import run_scenario
    from pdsim.metrics.run_folder import require_out_of_run
    from pdsim.scenario.yaml_file import ConfigError

    if out is not None:
        require_out_of_run(out, force=force)
    elif record_experts:
        raise ConfigError("--record-experts needs --out FOLDER, where the counts are written")
    options = replace(options, record_experts=record_experts, hosts=read_hosts(hosts))
    changes = set_ if seed is None else (*set_, f"seed={seed}")
    finished, real = run_scenario(scenario, changes, options, out, quiet=json_, reference=reference)
    if json_:
        print_json(finished.summary)
    else:
        from pdsim.show.terminal.tables import print_stages, print_summaries

        print_summaries({finished.name: finished.summary})
        print_stages({finished.name: finished.records})
        if out is not None:
            print(f"run folder: {out}")
    if real.failure is None:
        from pdsim.cli.finished import fail_if_incomplete

        fail_if_incomplete(finished, program="pdreal")
    _fail_for([*([real.failure] if real.failure else []), *real.leaks], f"{finished.name}: ")


@app.command
def recover(run: Path, *, json_: Json = False) -> None:
    """Complete the run folder of a killed `pdreal run` from the logs in it, and print the summary of the run.

    Parameters
    ----------
    run
        Folder that the killed command got as --out.

    """
    from pdreal.run_folder import recover as recovered

    finished = recovered(run)
    if json_:
        print_json(finished.summary)
        return
    from pdsim.show.terminal.tables import print_stages, print_summaries

    print_summaries({finished.name: finished.summary})
    print_stages({finished.name: finished.records})
    print(f"run folder: {run}")


@app.command
def serve(
    scenario: Path,
    *,
    set_: Set = (),
    host: str = "127.0.0.1",
    port: Port = 30000,
    model_name: str | None = None,
    api_key: Annotated[str | None, Parameter(env_var="PDREAL_API_KEY")] = None,
    max_waiting_requests: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 4096,
    options: RealOptions = Options(),  # noqa: B008  it is frozen
    hosts: OnHosts = None,
) -> None:
    """Serve a scenario's cluster over HTTP for OpenAI's and SGLang's clients, until interrupted.

    Parameters
    ----------
    scenario
        Scenario file (YAML). Its workload and client are ignored.
    host
        Address to listen on.
    port
        Port; 0 takes a free one.
    model_name
        Name of the model for clients [the catalog's name].
    api_key
        Key that clients must send as bearer token. Other users of the machine cannot see it in an environment variable.
    max_waiting_requests
        Maximum number of answers that wait for their first token; a request asks for n answers, by default one.
        Further requests get 503 and Retry-After.

    """
    from pdreal.serve.origin import is_loopback
    from pdreal.serve.server import Address, serve
    from pdreal.serve.service import Entrance
    from pdreal.settings.scenario import served_scenario
    from pdsim.scenario.loading import load_scenario
    from pdsim.scenario.yaml_file import named

    options = replace(options, hosts=read_hosts(hosts))
    with named(scenario):
        served = served_scenario(load_scenario(scenario, set_), options)
    name = model_name or served.model

    def announce(url: str) -> None:
        print(f"pdreal: {name} at {url}", flush=True)

    if api_key is None and not is_loopback(host):
        print(
            f"pdreal: warning: anyone who can reach {host} can use the server; set a key with --api-key",
            file=sys.stderr,
        )
    entrance = Entrance(api_key, max_waiting_requests)
    leaks = asyncio.run(serve(served, options, Address(host, port), name, entrance, announce=announce))
    _fail_for(leaks)


def _fail_for(problems: Sequence[str], who: str = "") -> None:
    """If there are problems, prints them to standard error and ends the command with exit code 1. who: begins the
    message with the name of the run, such as "chat: "; empty: no name.
    """
    if problems:
        print("\n  ".join([f"pdreal: {who}problems at the end of the run:", *problems]), file=sys.stderr)
        raise SystemExit(1)


@app.command
def host() -> None:
    """Run instances on this host for a launcher on another host.

    `pdreal run`, `serve`, `measure` and `campaign` start this command if they are given --hosts.
    """
    from pdreal.hosts.remote_host import read_ticket, serve_host

    ticket = read_ticket()
    if "target" in ticket:
        from pdreal.measure.transfers import serve_target

        serve_target(**ticket["target"])
    else:
        serve_host(**ticket)


@app.command
def measure(
    *,
    model: str,
    out: Annotated[
        Path,
        Parameter(name=("--out", "-o"), help="CSV file to write. An interrupted command keeps its rows."),
    ],
    device: OnDevice = "cpu",
    dtype: Dtype = "float32",
    threads: Threads = None,
    page_size: int = 64,
    tp: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 1,
    ep: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 1,
    moe_a2a_backend: RealA2a = "none",
    only: str | None = None,
    quick: bool = False,
    rounds: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 1,
    draft_tokens: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 1,
    hosts: OnHosts = None,
) -> None:
    """Measure this machine and write rows for `pdsim calibrate`.

    Parameters
    ----------
    model
        Model, by its name in pdsim catalog. Its weights are random.
    page_size
        Number of tokens per KV page.
    tp
        Tensor-parallel size for the parts prefill, decode and host. With --device cuda, each rank needs a GPU.
    ep
        Expert-parallel size: 1, or the size of --tp, which gives each rank whole experts.
    moe_a2a_backend
        deepep: ranks send tokens to the ranks of their experts. none: every rank has all tokens.
    only
        Parts to measure, separated by commas: prefill, decode, gather and scatter (copies to and from staging memory),
        transfer (writes by each transfer engine), host (messages and other host work), and storage. Storage is
        measured only if it is named.
    quick
        Measure few shapes of each part, to check that everything works.
    rounds
        Number of rounds of all measurements, for a machine whose speed varies.
    draft_tokens
        Number of tokens of each request that decode steps verify, with the drafts of an EAGLE head; 1: no drafts.

    """
    from pdreal.measure.plan import FULL, QUICK
    from pdreal.measure.run import measure, measurement
    from pdsim.metrics.run_folder import require_out_file
    from pdsim.metrics.summary_rows import counted

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    pair = read_hosts(hosts)
    options = Options(device=device, dtype=dtype, threads=threads, hosts=None if pair is None else pair.as_pair())
    require_out_file(out, [], "kind,")
    plan = QUICK if quick else FULL
    chosen = measurement(model, options, page_size, tp, ep, only, plan, rounds, draft_tokens, moe_a2a_backend)
    try:
        num_rows = measure(chosen, out, tell)
    except KeyboardInterrupt:
        tell(f"pdreal: interrupted; what was measured is in {out}")
        raise SystemExit(130) from None
    print(f"{counted(num_rows, 'row')}: {out}")


@app.command
def campaign(
    matrix: str,
    *,
    out: Annotated[Path, Parameter(name=("--out", "-o"), help="Folder to write. An unfinished folder is completed.")],
    set_: Set = (),
    hosts: OnHosts = None,
    rounds: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 1,
) -> None:
    """Measure this machine, run a matrix for real, calibrate, simulate, and pack the results for a pull request.

    The exit code is 1 if a variant has no real run, or if `pdsim validate` fails for another reason.

    Parameters
    ----------
    matrix
        Folder with a matrix.yaml, or its name in experiments.
    rounds
        Number of rounds of all measurements.

    """
    import torch

    from pdsim.cli.matrix import carry_out

    def tell(line: str) -> None:
        print(f"pdreal: {line}", file=sys.stderr, flush=True)

    limits = {"rounds": rounds, "num_gpus": torch.cuda.device_count()}
    archive, exit_code = carry_out(matrix, out, set_, hosts, **limits, tell=tell)
    print(f"campaign: {out}, packed in {archive}")
    if exit_code:
        tell(f"pdsim validate ended with exit code {exit_code}; its messages above say why")
        raise SystemExit(1)


@app.command
def experts(run: Path, *, ep: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 8) -> None:
    """Print the load of each expert-parallel rank in a recorded run, and the value of cost.expert_skew for simulations.

    Parameters
    ----------
    run
        Run folder of `pdreal run --record-experts`.
    ep
        Number of ranks that share the experts, in blocks of neighbours.

    """
    from pdreal.control.expert_counts import read_counts, skews

    for skew in skews(read_counts(run), ep):
        shares = " ".join(f"{share:.2f}" for share in skew.shares)
        beyond = f"{skew.step_skew:.3f} in single steps, {skew.lasting_skew:.3f} over all steps"
        print(f"{skew.kind}: {skew.num_steps} steps, {skew.tokens_per_step:.1f} expert choices per step and layer")
        print(f"  tokens of each of {ep} ranks, relative to their mean: {shares}")
        print(f"  busiest rank relative to the mean, minus 1: {beyond}")
        print(f"  simulate it: expert_skew: {skew.step_skew:.3f}")


@app.command
def tokenizer(folder: Path, *, vocab_size: int = 512, hf_home: bool = False) -> None:
    """Write the server's tokenizer as files that clients load with transformers.

    Parameters
    ----------
    folder
        Folder to write. Clients take this path as their tokenizer.
    vocab_size
        Vocabulary size, which may exceed that of the model. The text of a token beyond this size is several tokens.
    hf_home
        Treat the folder as a Hugging Face home (HF_HOME) and write into its cache, for clients that take no path.

    """
    from pdreal.serve.tokenizer import HUB_NAME, holds_tokenizer, plant_in_hub_cache, write_tokenizer
    from pdsim.files import require_empty_or_own

    if hf_home:
        plant_in_hub_cache(folder, vocab_size)
        print(f"HF_HOME={folder} HF_HUB_OFFLINE=1 finds the tokenizer {HUB_NAME}")
    else:
        require_empty_or_own(folder, "tokenizer", is_own=holds_tokenizer(folder))
        write_tokenizer(folder, vocab_size)
        print(f"tokenizer: {folder}")


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        from pdreal.settings.host import LaunchError

        run_app(app, arguments, (LaunchError,))
    except ModuleNotFoundError as missing:
        if missing.name not in _OF_REAL_MODE:
            raise
        print(f"pdreal: {missing.name} is not installed: pip install 'pdsim[real]'", file=sys.stderr)
        raise SystemExit(2) from None
