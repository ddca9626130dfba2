"""What an operator does to a server under load, and what the log says of what ended."""

import asyncio
import logging
import os
import signal

import pytest

aiohttp = pytest.importorskip("aiohttp")

from pdreal.launcher import Launcher
from pdreal.serve.http import serving
from pdreal.serve.server import service_of
from pdreal.serve.service import Entrance
from pdreal.settings.options import Options
from pdreal.settings.scenario import served_scenario

from tests.real import clusters

HEALTH = {"heartbeat_interval": "100 ms", "heartbeat_failures": 2}


async def until(holds):
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110  the launcher tells nobody
            await asyncio.sleep(0.02)


async def keep_asking(client, number, answers):
    """One request after another, each with a prompt of its own."""
    while True:
        prompt = [5 + number, 7, 11 + len(answers) % 200]
        async with client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 12}) as response:
            answers.append((prompt, response.status, await response.json()))


def test_an_instance_is_restarted_under_load_and_no_request_fails(caplog):
    """One of each role. One that is killed instead leaves a line with its signal and its age."""
    options = Options()
    scenario = served_scenario(
        clusters.scenario(prefill__instances=2, decode__instances=2, router="round_robin", health=HEALTH), options
    )
    answers = []

    async def main():
        launcher = Launcher(scenario, options)
        await launcher.start()
        service = service_of(scenario, options, launcher, "tiny", Entrance())
        async with serving(service, "127.0.0.1", 0) as url, aiohttp.ClientSession(url) as client:
            asking = [asyncio.create_task(keep_asking(client, number, answers)) for number in range(4)]
            for instance_id in ("prefill-0", "decode-0"):
                before = len(answers)
                await until(lambda: len(answers) > before + 4)  # noqa: B023  it is awaited here
                async with asyncio.timeout(60), client.post(f"/instances/{instance_id}/restart") as response:
                    assert response.status == 200, await response.text()
            lives = dict(launcher._instances.fleet.lives)
            for task in asking:
                task.cancel()
            await asyncio.wait(asking)
            await kill_and_be_refused(launcher, client)
        return lives, await launcher.stop()

    async def kill_and_be_refused(launcher, client):
        with caplog.at_level(logging.ERROR, logger="pdreal"):
            os.kill(launcher._instances.fleet._home._alive["decode-1"][0].pid, signal.SIGKILL)
            await until(lambda: len(launcher._plain_router.roles["decode"].offered) == 1)
        async with client.post("/instances/decode-0/restart") as response:
            assert response.status == 409
        async with client.post("/instances/decode-7/restart") as response:
            assert response.status == 404
            assert "there are prefill-0, prefill-1, decode-0, decode-1" in await response.text()

    lives, leaks = asyncio.run(main())
    assert lives == {"prefill-0": 1, "prefill-1": 0, "decode-0": 1, "decode-1": 0}
    assert leaks == []
    assert {status for _, status, _ in answers} == {200}
    assert "decode-1: killed by SIGKILL, " in caplog.text
    assert " s after it was up" in caplog.text
