"""The routes: from an HTTP request to a generation, and from its tokens to an HTTP answer.

A client that goes away aborts its request: the server cancels the handler, and leaving the answer early is to abort it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Any, Protocol

from aiohttp import web
from aiohttp.typedefs import Middleware

from pdreal.requests import RequestFailed
from pdreal.serve.connections import EventStream, listening, notice_if_gone, read_body
from pdreal.serve.fields import Fields, RefusedError, unavailable
from pdreal.serve.metrics import CONTENT_TYPE, gauges
from pdreal.serve.openai import ChatCompletions, Completions
from pdreal.serve.service import Answer, Generation, Service
from pdreal.serve.sglang import Generate

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_LARGE_BODY_BYTES = 1 << 16
"""Size from which a body is read beside the loop, on which streams wait."""
_OPEN_TO_ALL = "/health"
_LOG = logging.getLogger("pdreal.serve")


class Dialect(Protocol):
    """One way to ask for tokens, and to be given them."""

    def read(self, fields: Fields, service: Service) -> Generation: ...

    def part(self, answer: Answer, tokens: Sequence[int]) -> dict[str, Any]:
        """An event of a stream, with what is new."""
        ...

    def behind(self, answer: Answer) -> list[dict[str, Any]]:
        """The events behind the last token."""
        ...

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The answer in one piece."""
        ...


def application(service: Service) -> web.Application:
    app = web.Application(middlewares=[_refusals, _key_check(service)], client_max_size=service.room.body_bytes)
    app.router.add_post("/v1/completions", _generates(service, Completions()))
    app.router.add_post("/v1/chat/completions", _generates(service, ChatCompletions()))
    app.router.add_route("*", "/generate", _generates(service, Generate()))
    app.router.add_get("/v1/models", _models(service))
    app.router.add_get("/health", _health(service))
    app.router.add_get("/metrics", _metrics(service))
    app.router.add_route("*", "/flush_cache", _flush_cache(service))
    return app


def serving(service: Service, host: str, port: int) -> AbstractAsyncContextManager[str]:
    """Listens while it is entered; gives the URL. Port 0 takes a free one. Raises LaunchError."""
    return listening(application(service), host, port)


def _generates(service: Service, dialect: Dialect) -> Handler:
    def read(body: bytes) -> Generation:
        try:
            generation = dialect.read(Fields.parse(body), service)
        except UnicodeEncodeError as error:
            lone = error.object[error.start]
            raise RefusedError(f"the text has \\u{ord(lone):04x}, half of a character, which no text has") from None
        if not generation.prompt:
            raise RefusedError("the prompt is empty")
        service.room.check(len(generation.prompt), generation.sampling.max_tokens)
        return generation

    async def handle(request: web.Request) -> web.StreamResponse:
        service.entrance.check_open()
        notice_if_gone(request)
        body = await read_body(request)
        generation = read(body) if len(body) < _LARGE_BODY_BYTES else await asyncio.to_thread(read, body)
        service.entrance.check_open()  # it may have closed, or filled, meanwhile
        async with Answer(service, generation) as answer:
            if generation.stream:
                return await _stream(request, answer, dialect)
            async for _ in answer:
                pass
            return web.json_response(dialect.whole(answer))

    return handle


async def _stream(request: web.Request, answer: Answer, dialect: Dialect) -> web.StreamResponse:
    stream = EventStream(request)
    try:
        async for tokens in answer:
            await stream.send(dialect.part(answer, tokens))
        for event in dialect.behind(answer):
            await stream.send(event)
    except RequestFailed as error:
        if not stream.has_begun:
            raise
        await stream.send(_failure(error).body())
    return await stream.end()


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RefusedError as refused:
        return _refuse(refused)
    except RequestFailed as failed:
        return _refuse(_failure(failed))
    except web.HTTPException as error:
        return _refuse(RefusedError(_explained(error, request), status=HTTPStatus(error.status)))
    except ConnectionError:
        raise  # the client went away: nobody is there to be told
    except Exception:  # noqa: BLE001  the client is told, and the log has it
        _LOG.exception("%s %s", request.method, request.path)
        return _refuse(
            RefusedError("an error of the server; its log has more", status=HTTPStatus.INTERNAL_SERVER_ERROR)
        )


def _key_check(service: Service) -> Middleware:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != _OPEN_TO_ALL:
            service.entrance.check_key(request.headers.get("Authorization", ""))
        return await handler(request)

    return check


def _models(service: Service) -> Handler:
    model = {"id": service.model_name, "object": "model", "created": int(time.time()), "owned_by": "pdreal"}

    async def handle(_: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [model]})

    return handle


def _metrics(service: Service) -> Handler:
    async def handle(_: web.Request) -> web.StreamResponse:
        text = service.metrics.text(gauges(service.cluster.load(), service.page_size))
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    return handle


def _flush_cache(service: Service) -> Handler:
    async def handle(_: web.Request) -> web.StreamResponse:
        if num_live := service.cluster.num_live_requests:
            raise RefusedError(f"caches are flushed only while nothing runs; {num_live} requests are under way")
        service.cluster.flush_cache()
        return web.Response(text="flushed\n")

    return handle


def _health(service: Service) -> Handler:
    async def handle(_: web.Request) -> web.StreamResponse:
        if service.entrance.is_closed:
            raise unavailable("the server stops")
        if service.cluster.failure is not None:
            raise unavailable(service.cluster.failure)
        if missing := service.cluster.missing_roles:
            raise unavailable(f"no {' and no '.join(missing)} instance is up")
        return web.Response()

    return handle


def _failure(error: RequestFailed) -> RefusedError:
    return unavailable(f"the request failed: {error}")


def _refuse(refused: RefusedError) -> web.Response:
    return web.json_response(refused.body(), status=refused.status, headers=refused.headers)


def _explained(error: web.HTTPException, request: web.Request) -> str:
    match error:
        case web.HTTPNotFound():
            paths = {resource.canonical for resource in request.app.router.resources()}
            return f"there is no {request.path}; there are {', '.join(sorted(paths))}"
        case web.HTTPMethodNotAllowed():
            return f"{request.path} takes {' or '.join(sorted(error.allowed_methods))}, not {error.method}"
        case web.HTTPRequestEntityTooLarge():
            return f"the body has more than {request.client_max_size} bytes: no prompt that fits is so long"
    return error.reason
