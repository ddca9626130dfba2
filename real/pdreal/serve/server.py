"""Runs a cluster and the front end before it, until a signal says that it is enough or the cluster cannot go on."""

import asyncio
import signal
from collections.abc import Callable
from typing import NamedTuple

from pdreal.launcher import Launcher
from pdreal.model_choice import model_config
from pdreal.options import Options
from pdreal.serve.http import serving
from pdreal.serve.metrics import Metrics
from pdreal.serve.room import Room
from pdreal.serve.service import Service
from pdreal.serve.tokenizer import Tokenizer
from pdsim.scenario.schema import Scenario


class Address(NamedTuple):
    host: str
    port: int


async def serve(
    scenario: Scenario, options: Options, address: Address, model_name: str, *, announce: Callable[[str], None]
) -> list[str]:
    """What did not come back when all had ended: should be nothing. Raises LaunchError.

    scenario: resolved. announce: called with the URL when it serves.
    """
    told = asyncio.ensure_future(_stop_signal().wait())
    launcher = Launcher(scenario, options)
    starting = asyncio.ensure_future(launcher.start())
    await asyncio.wait([told, starting], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait([starting])
        return []
    await starting
    try:
        async with serving(service_of(scenario, options, launcher, model_name), *address) as url:
            announce(url)
            await told
    finally:
        leaks = await launcher.stop()
    return leaks


def service_of(scenario: Scenario, options: Options, launcher: Launcher, model_name: str) -> Service:
    model = model_config(options, scenario.model.name)
    return Service(
        cluster=launcher,
        model_name=model_name,
        tokenizer=Tokenizer(model.vocab_size),
        room=Room.of(scenario, model.max_context_tokens),
        page_size=scenario.page_size,
        metrics=Metrics(model_name),
    )


def _stop_signal() -> asyncio.Event:
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    return told
