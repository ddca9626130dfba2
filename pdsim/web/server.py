"""The HTTP server of `pdsim serve`. Listens on this machine only. Computes one answer at a time, for the newest
question.
"""

import asyncio
import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from aiohttp import web

from pdsim.scenario.yaml_file import ConfigError
from pdsim.web.board import Board

HOST = "127.0.0.1"
_BODY_S = 10.0
"""Maximum time in s in which the body of a question must arrive."""
_IDLE_S = 30.0
"""Maximum time in s that a connection may be idle, or that a request's headers may take."""
_KINDS = {"page.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
_COLOURS = files("pdsim.show") / "assets" / "colours.css"
"""Style sheet with the colours, which reports use as well."""


class BoardServer:
    def __init__(self, board: Board) -> None:
        self._board = board
        self._computing = asyncio.Lock()
        self._newest = 0
        self.app = web.Application(middlewares=[_from_here_alone])
        self.app.add_routes([web.get("/controls", self._controls), web.post("/answer", self._answer)])
        self.app.add_routes([web.get("/" if name == "page.html" else f"/{name}", _asset(name)) for name in _KINDS])

    async def _controls(self, _request: web.Request) -> web.Response:
        return web.json_response(self._board.controls())

    async def _answer(self, request: web.Request) -> web.Response:
        """Answers a question that the page sends. Status 409: a newer question arrived before the computation of this
        question began.
        """
        if request.content_type != "application/json":  # what a page of another origin may send unasked
            raise web.HTTPUnsupportedMediaType(text="send application/json")
        chosen = await _object_of(request)
        self._newest += 1
        number = self._newest
        async with self._computing:
            if number < self._newest:
                return web.json_response({"error": "a newer question came"}, status=409)
            try:
                answer = await asyncio.to_thread(self._board.answer, chosen)
            except ConfigError as wrong:
                return web.json_response({"error": str(wrong)}, status=422)
        return web.json_response(answer)


async def _object_of(request: web.Request) -> dict[str, Any]:
    """Returns the JSON object in the body of a request. Raises HTTPBadRequest (status 400) if the body has no JSON
    object, or does not arrive within _BODY_S.
    """
    try:
        body = await asyncio.wait_for(request.text(), _BODY_S)
        found = json.loads(body)
    except (ValueError, LookupError, RecursionError, TimeoutError) as wrong:
        raise web.HTTPBadRequest(text=f"send a JSON object: {wrong}") from None
    if not isinstance(found, dict):
        raise web.HTTPBadRequest(text=f"send a JSON object, not {json.dumps(found)[:40]}")
    return found


def _asset(name: str) -> Any:
    content = (files("pdsim.web") / "assets" / name).read_text(encoding="utf-8")
    if name == "page.css":
        content = _COLOURS.read_text(encoding="utf-8") + content

    async def found(_request: web.Request) -> web.Response:
        return web.Response(text=content, content_type=_KINDS[name])

    return found


@web.middleware
async def _from_here_alone(request: web.Request, handler: Any) -> web.StreamResponse:
    """Refuses requests whose Host header names another site. Such requests come from a page of that site, if the site's
    name was changed to this machine's address; the page could otherwise read the answers. handler: aiohttp's function
    that answers accepted requests.
    """
    try:
        host = request.url.host
    except ValueError:
        raise web.HTTPBadRequest(text="the Host header is no address") from None
    if host not in {HOST, "localhost"}:
        raise web.HTTPForbidden(text=f"open http://{HOST}:{request.url.port}")
    response: web.StreamResponse = await handler(request)
    return response


def serve(board: Board, port: int, opened: Callable[[str], None]) -> None:
    """Serves the page until the user interrupts. opened: called with the page's address. Raises OSError if another
    program uses the port.
    """

    async def run() -> None:
        runner = web.AppRunner(BoardServer(board).app, keepalive_timeout=_IDLE_S)
        await runner.setup()
        site = web.TCPSite(runner, HOST, port)
        try:
            await site.start()
            opened(f"http://{HOST}:{runner.addresses[0][1]}")
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    asyncio.run(run())
