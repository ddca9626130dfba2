"""Peers on the same trace, in environments of their own: python bench/peers.py [COMPILED] [--large]

Installs ai-dynamo and ai-dynamo-runtime 1.5.1 (NVIDIA DynoSim: the Rust mocker and its offline replay) and sched-sim
into .bench/, writes the load of experiments/speed as a trace with hash blocks of 16 tokens, which pdsim and DynoSim
read, and prints the CPU seconds and the peak memory of each whole command, with start-up. COMPILED is a folder with a
compiled pdsim; --large makes it 100,000 requests. Models and timing differ between simulators; trace and number of
requests do not. Peers that cannot be installed are named and left out.
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
LARGE = 100_000

DYNOSIM = """
import json, sys
from dynamo._core import MockEngineArgs
from dynamo.replay import run_trace_replay
def engine(**role):
    return MockEngineArgs.from_json(
        json.dumps(dict(engine_type=sys.argv[2], num_gpu_blocks=20000, block_size=16, **role))
    )
run_trace_replay([sys.argv[1]], prefill_engine_args=engine(is_prefill=True), decode_engine_args=engine(is_decode=True),
                 num_prefill_workers=1, num_decode_workers=1, trace_block_size=16)
"""


def environment(name: str, *installs: list[str]) -> Path | None:
    """A virtual environment with these pip calls made once."""
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


def write_traces(changes: list[str]) -> tuple[Path, Path]:
    """The load as a Mooncake trace, and as sched-sim wants it."""
    scenario = load_scenario(SCENARIO, changes)
    streams = Streams(scenario.seed)
    specs = scenario.workload.requests(streams)
    times = scenario.client.arrivals.times_ns(streams.named("arrivals"))
    mooncake, plain, block = [], [], 0
    for spec, at_ns in zip(specs, times, strict=False):
        num_blocks = -(-len(spec.prompt) // BLOCK)
        ids = list(range(block, block + num_blocks))
        block += num_blocks
        sizes = {"input_length": len(spec.prompt), "output_length": len(spec.output)}
        mooncake.append(json.dumps({"timestamp": at_ns // 10**6, **sizes, "hash_ids": ids}))
        plain.append({"timestamp": at_ns / 1e9, "prompt_tokens": len(spec.prompt), "output_tokens": len(spec.output)})
    HOME.mkdir(exist_ok=True)
    (HOME / "trace.jsonl").write_text("\n".join(mooncake) + "\n")
    (HOME / "trace.json").write_text(json.dumps(plain))
    return HOME / "trace.jsonl", HOME / "trace.json"


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--large"]
    changes = [f"workload.num_requests={LARGE}"] if "--large" in sys.argv else []
    mooncake, plain = write_traces(changes)
    trace = f"workload={{use: mooncake_trace, path: {mooncake}, block_tokens: {BLOCK}}}"
    run = [sys.executable, "-m", "pdsim", "run", str(SCENARIO), "--json", "--set", trace, "--set", "client=open_loop"]
    commands = {"pdsim": run}
    if words:
        commands["pdsim, compiled"] = ["env", f"PYTHONPATH={Path(words[0]).resolve()}", *run]
    needs = ["pydantic", "msgspec", "numpy", "pandas", "uvloop", "scipy", "scikit-learn"]
    pins = ["--no-deps", "ai-dynamo==1.5.1", "ai-dynamo-runtime==1.5.1"]
    if python := environment("dynosim", pins, needs):
        for engine in ("sglang", "vllm"):
            commands[f"DynoSim 1.5.1, {engine}"] = [str(python), "-c", DYNOSIM, str(mooncake), engine]
    if not changes and (python := environment("sched-sim", ["sched-sim==0.2.1"])):
        tool = str(python.parent / "sched-sim")
        commands["sched-sim 0.2.1"] = [tool, "trace", str(plain), "--token-budget", "2048", "--no-gantt"]
    os.chdir(HOME)  # a tree that is compiled or not must not be found by chance
    costs = {name: measure(command, repeats=1 if changes else 3) for name, command in commands.items()}
    base = next((name for name in costs if name.endswith("vllm")), "pdsim")
    for name, cost in costs.items():
        ratio = cost.cpu_s / costs[base].cpu_s
        print(f"{name:22} {cost.cpu_s:6.2f} CPU s   {cost.peak_mib:5.0f} MiB   {ratio:5.2f} x {base}")


if __name__ == "__main__":
    main()
