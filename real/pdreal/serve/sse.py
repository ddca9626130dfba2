"""Server-sent events: one `data:` line an event, written at once."""

import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web


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
