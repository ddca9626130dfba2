"""Same seed, same journal: in every process and under every PYTHONHASHSEED."""

import os
import subprocess
import sys

from pdsim.core.journal import digest
from tests.support import run, small

CODE = "from tests.test_determinism import journal_digest; print(journal_digest())"


def journal_digest(seed: int = 5) -> str:
    scenario = small(
        workload={
            "use": "prefix_pool",
            "num_requests": 60,
            "num_prefixes": 4,
            "prefix_tokens": 80,
            "input_tokens": {"use": "normal", "mean": 30, "stddev": 9},
            "output_tokens": {"use": "uniform", "low": 1, "high": 60},
        },
        client={"use": "closed_loop", "concurrency": 9},
        prefill__instances=2,
        decode__instances=2,
        decode__pool_tokens=600,
        decode__radix_cache=True,
        router="power_of_two",
        seed=seed,
    )
    return digest(run(scenario).journal)


def test_the_journal_depends_on_nothing_but_the_scenario():
    environments = [{**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": "."} for seed in (0, 1, 2, 3)]
    processes = [
        subprocess.Popen([sys.executable, "-c", CODE], env=environment, stdout=subprocess.PIPE, text=True)
        for environment in environments
    ]
    digests = {process.communicate()[0].strip() for process in processes}
    assert digests == {journal_digest()}


def test_another_seed_is_another_run():
    assert journal_digest(6) != journal_digest(5)
