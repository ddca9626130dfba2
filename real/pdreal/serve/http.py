"""The HTTP server: connections, routes, the way from an HTTP request to the cluster, and from tokens to an answer.

A client that disconnects aborts its request: the server cancels the handler, and a cancelled handler aborts its
request.
"""

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from pdreal.control.refused import RefusedError
from pdreal.control.requests import RequestFailed, RestartError
from pdreal.serve.dialects import ChatCompletions, Completions, Dialect, Generate, closing_events, last_events
from pdreal.serve.fields import Fields, unavailable
from pdreal.serve.metrics import CONTENT_TYPE, gauges
from pdreal.serve.origin import is_loopback, refuse_other_origins
from pdreal.serve.service import Answer, Generation, Service
from pdreal.settings.host import LaunchError

HEADERS_S = 30.0
"""Maximum time in s in which a client must send headers, or its next request on the same connection."""
BODY_S = 60.0
_GONE_S = 60
"""If a client's machine acknowledges no data for this time in s, the client counts as gone and its request is
aborted."""
_PROBE_S = 15
_SHUTDOWN_S = 2.0
_RESTART_S = 600.0
"""Maximum time in s that a restart waits for the instance's requests to end."""


@asynccontextmanager
async def serving(service: Service, host: str, port: int) -> AsyncIterator[str]:
    """Context in which the server runs. Its value is the server's URL. Port 0 takes a free port. Raises LaunchError if
    the port is taken.
    """
    runner = web.AppRunner(
        application(service, is_local=is_loopback(host)),
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
    """Returns the body of a request. Raises RefusedError, or HTTPRequestEntityTooLarge if the body is too long."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise RefusedError(f"the body has Content-Encoding {encoding}: send it without compression")
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise RefusedError(f"the body did not come within {BODY_S:g} s", status=HTTPStatus.REQUEST_TIMEOUT) from None


def notice_if_gone(request: web.Request) -> None:
    """Sets the times of TCP keep-alive on the client's connection, so that a client whose machine vanishes is noticed
    within about _GONE_S s. Such a machine closes no connection.
    """
    connection = None if request.transport is None else request.transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_S * 1000)


class EventStream:
    """The answer to a request as a stream. The HTTP answer starts with the first event; until then the request can
    still be refused with an HTTP status.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._turn = asyncio.Lock()
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
        async with self._turn:  # of several choices
            if not self.has_begun:
                await self._response.prepare(self._request)
            await self._response.write(f"data: {data}\n\n".encode())


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_LARGE_BODY_BYTES = 1 << 16
"""Bodies from this size on are read in a thread of their own, so that running streams need not wait."""
_OPEN_TO_ALL = "/health"
_LOG = logging.getLogger("pdreal.serve")


def application(service: Service, *, is_local: bool = False) -> web.Application:
    """Makes the web application. is_local: only this machine reaches the server. Then requests from web pages of other
    origins are refused, unless the server has an API key, which every request must then send except to /health.
    """
    checks = [_key_check(service)]
    if is_local and not service.entrance.has_key:
        checks.append(refuse_other_origins)
    app = web.Application(middlewares=[_refusals, *checks], client_max_size=service.room.body_bytes)
    app.router.add_post("/v1/completions", _generates(service, Completions()))
    app.router.add_post("/v1/chat/completions", _generates(service, ChatCompletions()))
    app.router.add_route("*", "/generate", _generates(service, Generate()))
    state = ServerState(service)
    app.router.add_get("/v1/models", state.models)
    app.router.add_get("/health", state.health)
    app.router.add_get("/metrics", state.metrics)
    app.router.add_route("*", "/flush_cache", state.flush_cache)
    app.router.add_post("/instances/{instance}/restart", state.restart)
    return app


def _generates(service: Service, dialect: Dialect) -> Handler:
    def read(body: bytes) -> Generation:
        try:
            generation = dialect.read(Fields.parse(body), service)
        except UnicodeEncodeError as error:
            lone = error.object[error.start]
            raise RefusedError(f"the text has \\u{ord(lone):04x}, half of a surrogate pair") from None
        if not generation.prompt:
            raise RefusedError("the prompt is empty")
        service.room.check(len(generation.prompt), generation.settings.sampling.max_tokens)
        return generation

    async def handle(request: web.Request) -> web.StreamResponse:
        service.entrance.check_open()
        notice_if_gone(request)
        body = await read_body(request)
        generation = read(body) if len(body) < _LARGE_BODY_BYTES else await asyncio.to_thread(read, body)
        service.entrance.check_open(generation.settings.num_choices)  # it may have closed, or filled, meanwhile
        async with AsyncExitStack() as stack:
            choices = range(generation.settings.num_choices)
            answers = [await stack.enter_async_context(Answer(service, generation, index)) for index in choices]
            if generation.stream:
                return await _stream(request, answers, dialect)
            await asyncio.gather(*map(_to_the_end, answers))
            return web.json_response(dialect.whole(answers))

    return handle


async def _to_the_end(answer: Answer) -> None:
    async for _ in answer:
        pass


async def _stream(request: web.Request, answers: Sequence[Answer], dialect: Dialect) -> web.StreamResponse:
    stream = EventStream(request)

    async def send(answer: Answer) -> None:
        async for part in answer:
            await stream.send(dialect.part(answer, part))
        for event in last_events(dialect, answer):
            await stream.send(event)

    try:
        if len(answers) == 1:
            await send(answers[0])
        else:
            async with asyncio.TaskGroup() as group:
                for answer in answers:
                    group.create_task(send(answer))
        for event in closing_events(dialect, answers):
            await stream.send(event)
    except (RequestFailed, ExceptionGroup) as failed:
        error = failed.exceptions[0] if isinstance(failed, ExceptionGroup) else failed
        if not stream.has_begun or not isinstance(error, RequestFailed):
            raise error from None
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


class ServerState:
    """HTTP endpoints for models, health, metrics, caches and instances. They report on the server or change its state,
    and generate no tokens.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        about = {"object": "model", "created": int(time.time()), "owned_by": "pdreal"}
        self._models = {"object": "list", "data": [{"id": service.model_name, **about}]}

    async def models(self, _: web.Request) -> web.StreamResponse:
        return web.json_response(self._models)

    async def metrics(self, _: web.Request) -> web.StreamResponse:
        text = self._service.metrics.text(gauges(self._service.cluster.load(), self._service.page_size))
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def flush_cache(self, _: web.Request) -> web.StreamResponse:
        if num_live := self._service.cluster.num_live_requests:
            raise RefusedError(f"caches can be flushed only while no request runs; {num_live} run now")
        self._service.cluster.flush_cache()
        return web.Response(text="flushed\n")

    async def restart(self, request: web.Request) -> web.StreamResponse:
        """Restarts an instance, and answers when it serves again."""
        instance_id, cluster = request.match_info["instance"], self._service.cluster
        if instance_id not in cluster.instance_ids:
            message = f"there is no instance {instance_id}; there are {', '.join(cluster.instance_ids)}"
            raise RefusedError(message, status=HTTPStatus.NOT_FOUND)
        try:
            await cluster.restart(instance_id, _RESTART_S)
        except RestartError as why:
            raise RefusedError(str(why), status=HTTPStatus.CONFLICT) from None
        return web.Response(text=f"{instance_id} serves again\n")

    async def health(self, _: web.Request) -> web.StreamResponse:
        if self._service.entrance.is_closed:
            raise unavailable("the server stops")
        if self._service.cluster.failure is not None:
            raise unavailable(self._service.cluster.failure)
        if missing := self._service.cluster.missing_roles:
            raise unavailable(f"no {' and no '.join(missing)} instance is up")
        return web.Response()


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
            return f"the body has more than {request.client_max_size} bytes: the longest prompt that fits needs fewer"
    return error.reason
