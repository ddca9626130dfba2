"""Every variant of the scenario for real, one after another, on two GPUs: python experiments/real-h200/campaign.py OUT

Each leaves its run folder at OUT/NAME, and what it said at OUT/NAME.log; one that fails does not stop the others.
`pdsim run` takes the same --set for the simulation beside it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

SCENARIO = Path(__file__).parent / "scenario.yaml"
PDREAL = [sys.executable, "-c", "from pdreal.cli import main; main()"]
SHARED = (
    "workload={use: prefix_pool, num_requests: 64, num_prefixes: 4, prefix_tokens: 2048, input_tokens: 256, "
    "output_tokens: 128}"
)

STAGING = "network.staging={ring: 1 GiB, prefill_buffer: 1 GiB}"


def load(concurrency: int, num_requests: int, input_tokens: int = 1024) -> list[str]:
    return [
        f"client.concurrency={concurrency}",
        f"workload.num_requests={num_requests}",
        f"workload.input_tokens={input_tokens}",
    ]


VARIANTS = {
    "c1": load(1, 12),
    "c8": load(8, 48),
    "c16": [],
    "c32": load(32, 96),
    "c64": load(64, 192),
    "in4k_c8": load(8, 40, 4096),
    "in16k_c4": load(4, 16, 16000),
    "page16_c16": ["page_size=16"],
    "shared_c16": [SHARED],
    "shared_radix_c16": [SHARED, "decode.radix_cache=true"],
    "ipc_c16": ["network.transport=cuda-ipc"],
    "tp2to1_slices_c16": ["prefill.tp=2"],
    "nixl_c16": ["network={transport: nixl-cuda-ipc}"],
    "tcp_c16": ["network={transport: mooncake-tcp}"],
    "tp2to1_staging_c16": ["prefill.tp=2", STAGING],
    "tp1to2_slices_c16": ["decode.tp=2"],
    "tp1to2_staging_c16": ["decode.tp=2", STAGING],
}
"""By name, what changes."""


def run(name: str, options: Namespace) -> str:
    """One line of what came out."""
    changes = [word for change in VARIANTS[name] for word in ("--set", change)]
    where = ["--device", options.device, "--dtype", options.dtype, "--out", str(options.out / name)]
    command = [*PDREAL, "run", str(options.scenario), *where, "--json", *changes]
    begin_s = time.monotonic()
    with (options.out / f"{name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        try:
            output, _ = process.communicate(timeout=options.timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too: they hold the GPUs
            process.wait()
            return f"{name:18} not done after {options.timeout:.0f} s: see {options.out / name}.log"
    took_s = time.monotonic() - begin_s
    if process.returncode:
        return f"{name:18} failed with {process.returncode} after {took_s:.0f} s: see {options.out / name}.log"
    summary = json.loads(output)
    return (
        f"{name:18} {summary['completed']:4} completed in {summary['duration']:6.2f} s, "
        f"TTFT {summary['mean_ttft_ms']:8.1f} ms, TPOT {summary['mean_tpot_ms']:6.2f} ms ({took_s:.0f} s in all)"
    )


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="where run folders go")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--scenario", type=Path, default=SCENARIO)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for each variant")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        print(run(name, options), flush=True)


if __name__ == "__main__":
    main()
