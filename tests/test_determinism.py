"""Same seed, same journal: in every process and under every PYTHONHASHSEED."""

import os
import subprocess
import sys

from pdsim.core.journal.lines import digest
from tests.support import run, small, small_aggregated

CODE = "from tests.test_determinism import digests; print(digests())"

LOAD = {
    "workload": {
        "use": "prefix_pool",
        "num_requests": 60,
        "num_prefixes": 4,
        "prefix_tokens": 80,
        "input_tokens": {"use": "normal", "mean": 30, "stddev": 9},
        "output_tokens": {"use": "uniform", "low": 1, "high": 60},
    },
    "client": {"use": "closed_loop", "concurrency": 9},
    "router": "power_of_two",
}


def digests(seed: int = 5) -> list[str]:
    """Of a disaggregated and of an aggregated run."""
    pair = small(
        prefill__instances=2,
        decode__instances=2,
        decode__pool_tokens=600,
        decode__radix_cache=True,
        seed=seed,
        **LOAD,
    )
    aggregated = small_aggregated(
        aggregated__instances=2,
        aggregated__pool_tokens=600,
        aggregated__overlap=True,
        seed=seed,
        **LOAD,
    )
    return [digest(run(scenario).journal) for scenario in (pair, aggregated)]


def test_the_journal_depends_on_nothing_but_the_scenario():
    environments = [{**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": "."} for seed in (0, 1, 2, 3)]
    processes = [
        subprocess.Popen([sys.executable, "-c", CODE], env=environment, stdout=subprocess.PIPE, text=True)
        for environment in environments
    ]
    printed = {process.communicate()[0].strip() for process in processes}
    assert printed == {str(digests())}


def test_another_seed_is_another_run():
    assert all(six != five for six, five in zip(digests(6), digests(5), strict=True))
