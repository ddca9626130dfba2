"""Runs a cluster and its front end until a stop signal, or until the cluster cannot continue."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pdreal.hosts.processes import STOP_SIGNALS
from pdreal.launcher import Launcher
from pdreal.serve.http import serving
from pdreal.serve.metrics import Metrics
from pdreal.serve.service import Entrance, Service
from pdreal.serve.tokenizer import FILE, CheckpointTokenizer, Tokenizer
from pdreal.settings.model import model_config
from pdreal.settings.options import Options
from pdreal.settings.scenario import Room
from pdsim.scenario.schema import Scenario

_LOG = logging.getLogger("pdreal")
DRAIN_S = 20.0
"""Maximum time in s that running requests have to end when the server stops."""


class Address(NamedTuple):
    host: str
    port: int


async def serve(
    scenario: Scenario,
    options: Options,
    address: Address,
    model_name: str,
    entrance: Entrance,
    *,
    announce: Callable[[str], None],
) -> list[str]:
    """Serves until a stop signal, or until the cluster cannot continue; its requests have then failed, and their
    clients get the reason. Returns errors: why the cluster cannot continue, and descriptions of memory that was still
    held at the end. Raises LaunchError if the cluster does not start, the checkpoint's tokenizer cannot be read, or the
    port is taken.

    scenario: resolved. model_name: name of the model for clients. entrance: admits or refuses requests. announce:
    called with the URL when the server accepts requests.
    """
    stopped, hurried = _stop_signals()
    waiting = asyncio.ensure_future(stopped.wait())
    launcher = Launcher(scenario, options)
    starting = asyncio.ensure_future(launcher.start())
    await asyncio.wait([waiting, starting], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait([starting])
        return []
    await starting
    try:
        service = service_of(scenario, options, launcher, model_name, entrance)
        async with serving(service, *address) as url:
            announce(url)
            failed = asyncio.ensure_future(launcher.failed.wait())
            await asyncio.wait([waiting, failed], return_when=asyncio.FIRST_COMPLETED)
            failed.cancel()
            if launcher.failure is None and entrance.num_inside:
                what = "pdreal: waits at most %g s for requests under way (%d); a second signal ends them"
                _LOG.warning(what, DRAIN_S, entrance.num_inside)
            await entrance.close(DRAIN_S, hurried)
    finally:
        leaks = await launcher.stop()
    return leaks if launcher.failure is None else [f"the cluster cannot continue: {launcher.failure}", *leaks]


def service_of(
    scenario: Scenario, options: Options, launcher: Launcher, model_name: str, entrance: Entrance
) -> Service:
    model = model_config(options, scenario.model)
    return Service(
        cluster=launcher,
        model_name=model_name,
        tokenizer=tokenizer_of(options, model.vocab_size),
        room=Room.of(scenario, model.max_context_tokens),
        page_size=scenario.page_size,
        metrics=Metrics(model_name),
        entrance=entrance,
    )


def tokenizer_of(options: Options, vocab_size: int) -> Tokenizer | CheckpointTokenizer:
    """Returns the checkpoint's tokenizer. Without one, returns a tokenizer of bytes. Raises LaunchError if the
    checkpoint's tokenizer cannot be read.
    """
    folder = Path(options.weights)
    if (folder / FILE).is_file():
        return CheckpointTokenizer(folder, vocab_size)
    return Tokenizer(vocab_size)


def _stop_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Returns two events: the first stop signal sets the first, any later signal sets the second."""
    stopped, hurried = asyncio.Event(), asyncio.Event()

    def tell() -> None:
        (hurried if stopped.is_set() else stopped).set()

    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, tell)
    return stopped, hurried
