"""Compares the speed of other simulators on the same trace: python bench/peers.py [COMPILED] [REQUESTS]

Installs ai-dynamo and ai-dynamo-runtime 1.6.1 (NVIDIA DynoSim: the Rust mocker and its offline replay) and sched-sim
into .bench/, each in an environment of its own. Writes the load of experiments/speed as a trace with hash blocks of 16
tokens, which pdsim and DynoSim read. Prints the CPU seconds and the peak memory of each whole command, with start-up.
COMPILED is a folder with a compiled pdsim. Rows "as typed" have what a user's command has: the default cost with its
ranges, and a run folder. Up to 10,000 requests are run three times, and the best run counts; more requests are run
once; a million requests (a trace of 1 GB) only by the compiled pdsim and by DynoSim's vLLM. Models and timing differ
between simulators; trace and number of requests do not. Peers that cannot be installed are named and left out.
"""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

from measure import measure

from pdsim import load_scenario
from pdsim.workload.request_spec import Streams

ROOT = Path(__file__).parent.parent
HOME = ROOT / ".bench"
SCENARIO = ROOT / "experiments" / "speed" / "scenario.yaml"
BLOCK = 16
FEW = 10_000
"""Loads of at most this many requests are run three times, and also by slow simulators."""
MANY = 1_000_000
DYNOSIM_RELEASE = "1.6.1"

DYNOSIM = """
import sys
from dynamo.replay import run_trace_replay
def engine(role):
    return {"engine": {"backend": sys.argv[2], "num_gpu_blocks": 20000, "block_size": 16, "worker_type": role}}
run_trace_replay([sys.argv[1]], prefill_engine_args=engine("prefill"), decode_engine_args=engine("decode"),
                 num_prefill_workers=1, num_decode_workers=1, trace_block_size=16)
"""


def environment(name: str, *installs: list[str]) -> Path | None:
    """Makes a virtual environment, unless an earlier command made it. installs: arguments of the calls of pip. Returns
    the path of the environment's Python. None: pip failed.
    """
    folder = HOME / name
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    venv.create(folder, with_pip=True)
    for packages in installs:
        done = subprocess.run(
            [python, "-m", "pip", "install", "-q", *packages], capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(f"{name}: not installable here: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            return None
    (folder / "ready").touch()
    return python


def write_traces(num_requests: int) -> tuple[Path, Path]:
    """Writes the load as a Mooncake trace and in sched-sim's format, and returns the paths of both files."""
    scenario = load_scenario(SCENARIO, [f"workload.num_requests={num_requests}"])
    streams = Streams(scenario.seed)
    specs = scenario.workload.requests(streams)
    times = scenario.client.arrivals.times_ns(streams.named("arrivals"))
    block = 0
    HOME.mkdir(exist_ok=True)
    mooncake, plain = HOME / "trace.jsonl", HOME / "trace.json"
    with mooncake.open("w") as blocks, plain.open("w") as lengths:
        for spec, at_ns in zip(specs, times, strict=False):
            num_tokens, num_outputs, num_blocks = len(spec.prompt), len(spec.output), -(-len(spec.prompt) // BLOCK)
            sizes = {"input_length": num_tokens, "output_length": num_outputs}
            hash_ids = list(range(block, block + num_blocks))
            blocks.write(json.dumps({"timestamp": at_ns // 10**6, **sizes, "hash_ids": hash_ids}) + "\n")
            request = {"timestamp": at_ns / 1e9, "prompt_tokens": num_tokens, "output_tokens": num_outputs}
            lengths.write(("[" if not block else ", ") + json.dumps(request))
            block += num_blocks
        lengths.write("]")
    return mooncake, plain


def commands_of(compiled: str | None, num_requests: int) -> dict[str, list[str]]:
    """Returns the command of each simulator for the same load."""
    mooncake, plain = write_traces(num_requests)
    trace = f"workload={{use: mooncake_trace, path: {mooncake}, block_tokens: {BLOCK}}}"
    run = [sys.executable, "-m", "pdsim", "run", str(SCENARIO), "--json", "--set", trace, "--set", "client=open_loop"]
    typed = [*run, "--set", "cost=kernels"]
    kept = [*typed, "--out", str(HOME / "run"), "--force"]
    commands = {"pdsim": run, "pdsim, as typed": typed, "pdsim, as typed, --out": kept}
    if compiled is not None:
        fast = ["env", f"PYTHONPATH={Path(compiled).resolve()}"]
        commands |= {name.replace("pdsim", "pdsim, compiled"): [*fast, *one] for name, one in commands.items()}
    needs = ["pydantic", "msgspec", "numpy", "pandas", "uvloop", "scipy", "scikit-learn"]
    pins = ["--no-deps", f"ai-dynamo=={DYNOSIM_RELEASE}", f"ai-dynamo-runtime=={DYNOSIM_RELEASE}"]
    if python := environment(f"dynosim-{DYNOSIM_RELEASE}", pins, needs):
        for engine in ("sglang", "vllm"):
            commands[f"DynoSim {DYNOSIM_RELEASE}, {engine}"] = [str(python), "-c", DYNOSIM, str(mooncake), engine]
    if num_requests <= FEW and (python := environment("sched-sim", ["sched-sim==0.2.1"])):
        tool = str(python.parent / "sched-sim")
        commands["sched-sim 0.2.1"] = [tool, "trace", str(plain), "--token-budget", "2048", "--no-gantt"]
    if num_requests >= MANY:
        kept_names = {"pdsim" if compiled is None else "pdsim, compiled", f"DynoSim {DYNOSIM_RELEASE}, vllm"}
        commands = {name: command for name, command in commands.items() if name in kept_names}
    return commands


def main() -> None:
    compiled = next((word for word in sys.argv[1:] if not word.isdecimal()), None)
    num_requests = next((int(word) for word in sys.argv[1:] if word.isdecimal()), FEW)
    commands = commands_of(compiled, num_requests)
    os.chdir(HOME)  # a tree that is compiled or not must not be found by chance
    costs = {}
    for name, command in commands.items():
        costs[name] = cost = measure(command, repeats=3 if num_requests <= FEW else 1)
        print(f"{name:32} {cost.cpu_s:8.2f} CPU s   {cost.peak_mib:6,.0f} MiB", flush=True)
    base = next((name for name in costs if name.endswith("vllm")), "pdsim")
    print("DynoSim has no contention on links, no page pool with a radix tree, no ranges, and keeps no journal.")
    for name, cost in costs.items():
        print(f"{name:32} {cost.cpu_s / costs[base].cpu_s:5.2f} x the CPU of {base}")


if __name__ == "__main__":
    main()
