"""Connections of clients: where the server listens, and how long a client may take and stay silent."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from aiohttp import web

from pdreal.bootstrap import LaunchError
from pdreal.serve.fields import RefusedError

HEADERS_S = 30.0
"""Limit for a client's headers, and between two requests of a connection."""
BODY_S = 60.0
_GONE_S = 60
"""A client that acknowledges nothing for so long is gone: its request is aborted."""
_PROBE_S = 15
_SHUTDOWN_S = 2.0


@asynccontextmanager
async def listening(app: web.Application, host: str, port: int) -> AsyncIterator[str]:
    """Serves while it is entered; gives the URL. Port 0 takes a free one. Raises LaunchError."""
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        shutdown_timeout=_SHUTDOWN_S,
        access_log=None,
        keepalive_timeout=HEADERS_S,
        auto_decompress=False,
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise LaunchError(f"cannot listen at {host}:{port}: {error.strerror}") from None
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def read_body(request: web.Request) -> bytes:
    """Raises RefusedError, or HTTPRequestEntityTooLarge."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise RefusedError(f"the body has Content-Encoding {encoding}: send it as it is")
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise RefusedError(f"the body did not come within {BODY_S:g} s", status=HTTPStatus.REQUEST_TIMEOUT) from None


def notice_if_gone(request: web.Request) -> None:
    """Probe a client that nothing comes from, for one whose machine vanished closes no connection."""
    connection = None if request.transport is None else request.transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_S * 1000)


class EventStream:
    """The answer to a request. It begins with the first event: until then the request can be refused with a status."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )

    @property
    def has_begun(self) -> bool:
        return self._response.prepared

    async def send(self, event: Mapping[str, Any]) -> None:
        await self._write(json.dumps(event))

    async def end(self) -> web.StreamResponse:
        await self._write("[DONE]")
        await self._response.write_eof()
        return self._response

    async def _write(self, data: str) -> None:
        if not self.has_begun:
            await self._response.prepare(self._request)
        await self._response.write(f"data: {data}\n\n".encode())
