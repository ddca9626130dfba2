"""Counts the machine instructions of simulating one request: python bench/instructions.py

valgrind counts the instructions of the load of experiments/speed with 300 and with 1,300 requests. The difference has
no start-up in it. It does not depend on what else the machine does, but it depends on the version of Python.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from shutil import which

SCENARIO = Path(__file__).parent.parent / "experiments" / "speed" / "scenario.yaml"
FEW, MANY = 300, 1_300


def instructions(num_requests: int) -> int:
    """Returns the number of instructions that the whole command executes for a load of `num_requests` requests."""
    change = f"workload.num_requests={num_requests}"
    count = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    run = [sys.executable, "-m", "pdsim", "run", str(SCENARIO), "--json", "--set", change]
    done = subprocess.run(
        [*count, *run], capture_output=True, text=True, check=False, env={**os.environ, "PYTHONHASHSEED": "0"}
    )
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or found is None:
        sys.exit(f"{' '.join([*count, *run])} failed with {done.returncode}:\n{done.stderr}")
    return int(found[1])


def main() -> None:
    if which("valgrind") is None:
        sys.exit("instructions are counted by valgrind, which is not installed (Debian, Ubuntu: apt install valgrind)")
    few, many = instructions(FEW), instructions(MANY)
    per_request = (many - few) / (MANY - FEW)
    print(f"{per_request / 1e6:.3f} million instructions a request, {(few - FEW * per_request) / 1e6:,.0f} to start")


if __name__ == "__main__":
    main()
