"""A server at 80 % of what it takes, while its ranks are killed and stopped: no wrong token, no growth, every failure
with its reason. PDREAL_SOAK_MINUTES says for how long [10].
"""

import asyncio
import os
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from time import monotonic

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'pdsim[real]'")
aiohttp = pytest.importorskip("aiohttp")

from pdreal.launcher import Launcher
from pdreal.serve.http import serving
from pdreal.serve.server import service_of
from pdreal.serve.service import Entrance
from pdreal.settings.options import Options
from pdreal.settings.scenario import served_scenario

from tests.real import clusters

SOAK_S = 60 * float(os.environ.get("PDREAL_SOAK_MINUTES", "10"))
CALIBRATION_S = 10.0
NUM_AT_ONCE = 16
FAULT_S = 12.0
"""Mean time between two faults."""
GROWTH_MB, GROWTH_DESCRIPTORS = 40, 20
PROMPTS = [[Random(seed).randrange(3, 500) for _ in range(4 + 3 * seed)] for seed in range(24)]
HEALTH = {"heartbeat_interval": "500 ms", "heartbeat_failures": 2, "transfer_timeout": "5 s", "release_timeout": "5 s"}


class Answers:
    """What became of the requests."""

    def __init__(self, client):
        self._client = client
        self.num_right = 0
        self.wrong = []
        self.failures = Counter()
        self._known = set()

    async def ask(self, prompt, num_tokens):
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": num_tokens, "ignore_eos": True}}
        async with self._client.post("/generate", json=body) as response:
            answer = await response.json()
        if response.status != 200:
            assert response.status == 503, answer
            self.failures[answer["error"]["message"]] += 1
            return
        key = tuple(prompt), tuple(answer["output_ids"])
        if key not in self._known and not (
            len(key[1]) == num_tokens and await asyncio.to_thread(clusters.is_greedy, prompt, list(key[1]))
        ):
            self.wrong.append(key)
        self._known.add(key)
        self.num_right += 1


async def closed_loop(answers, draw, until_s):
    while monotonic() < until_s:
        await answers.ask(draw.choice(PROMPTS), 12)


async def open_loop(answers, draw, rate, until_s):
    async with asyncio.TaskGroup() as under_way:
        while monotonic() < until_s:
            await asyncio.sleep(draw.expovariate(rate))
            under_way.create_task(answers.ask(draw.choice(PROMPTS), 12))


async def disturb(cluster, draw, until_s, faults):
    """Kill or stop a rank, again and again; the last in time for all to come back."""
    while (now_s := monotonic()) < until_s - 2 * FAULT_S:
        await asyncio.sleep(min(draw.expovariate(1 / FAULT_S), until_s - now_s))
        number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
        ranks = [rank for ranks in cluster._instances.fleet._home._alive.values() for rank in ranks]
        with suppress(ProcessLookupError, IndexError):
            os.kill(draw.choice(ranks).pid, number)
            faults[number.name] += 1


def used():
    """Memory in MB and descriptors of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.nightly
def test_a_server_outlives_its_ranks(capsys):
    options, draw, faults = Options(), Random(0), Counter()
    two = {"prefill__instances": 2, "decode__instances": 2}
    scenario = served_scenario(clusters.scenario(**two, router="round_robin", health=HEALTH), options)

    async def main():
        cluster = Launcher(scenario, options)
        await cluster.start()
        service = service_of(scenario, options, cluster, "tiny", Entrance())
        connections = aiohttp.TCPConnector(limit=0, force_close=True)
        async with serving(service, "127.0.0.1", 0) as url, aiohttp.ClientSession(url, connector=connections) as client:
            answers = Answers(client)
            until_s = monotonic() + CALIBRATION_S
            await asyncio.gather(*(closed_loop(answers, draw, until_s) for _ in range(NUM_AT_ONCE)))
            rate, before = 0.8 * answers.num_right / CALIBRATION_S, used()
            until_s = monotonic() + SOAK_S
            await asyncio.gather(open_loop(answers, draw, rate, until_s), disturb(cluster, draw, until_s, faults))
            async with asyncio.timeout(60):
                while set(cluster.load()) != set(cluster.instance_ids):
                    await asyncio.sleep(0.1)
            await asyncio.gather(*(answers.ask(prompt, 12) for prompt in PROMPTS))
            after = used()
        return answers, rate, before, after, await cluster.stop()

    answers, rate, before, after, leaks = asyncio.run(main())
    with capsys.disabled():
        print(f"\n{SOAK_S:.0f} s at {rate:.1f}/s, {dict(faults)}: {answers.num_right} answers, {answers.failures}")
        print(f"memory {before[0]:.0f} -> {after[0]:.0f} MB, descriptors {before[1]} -> {after[1]}")
    assert answers.wrong == []
    assert all(message.startswith("the request failed: ") for message in answers.failures)
    assert answers.num_right > 0.8 * rate * SOAK_S
    assert after[0] - before[0] < GROWTH_MB
    assert after[1] - before[1] < GROWTH_DESCRIPTORS
    assert leaks == []
