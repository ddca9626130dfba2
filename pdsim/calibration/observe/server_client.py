"""A client of servers with OpenAI's API, which measures the times of streamed completions. Sends requests with
the standard library alone.
"""

import json
import re
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from itertools import combinations
from random import SystemRandom
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from pdsim.dataclass import dataclass
from pdsim.inputs import parse_json, shown
from pdsim.scenario.yaml_file import ConfigError

OPTIONAL_FIELDS: Mapping[str, Any] = {
    "ignore_eos": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
"""Fields of streamed requests that some servers with OpenAI's API refuse. The client then leaves out ignore_eos, and
stream_options too if the server still refuses the request.
"""
_INFO_PATHS = ("/get_server_info", "/server_info", "/version", "/props")
"""Paths under which servers describe themselves, in this order: SGLang's earlier releases, SGLang's newer releases,
vLLM, llama.cpp.
"""
_ENGINES = {
    "sglang:": "SGLang",
    "vllm:": "vLLM",
    "llamacpp:": "llama.cpp",
    "dynamo_": "Dynamo",
    "trtllm_": "TensorRT-LLM",
}
"""Names of engines, by the beginning of their metrics' names."""
_RUNNING = re.compile(
    r"^(?:sglang:num_running_reqs|vllm:num_requests_running|llamacpp:requests_processing)\S* (\S+)", re.MULTILINE
)
_SECRET = re.compile(r"key|secret|password|authorization|(^|_)token$", re.IGNORECASE)
_TRY_LATER = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_MOST_WAIT_S = 30.0
_SIZING_WORDS = 200
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class ServerError(Exception):
    """Raised if the server does not answer, or if its answer is not the expected one.

    status: HTTP status of the answer; 0: there is no answer, or an answer of status 200 is wrong. retry_after_s: time
    in s that the server asks to wait, at most 30; 1 if an error status comes without such a time; 0 if status is 0.
    """

    def __init__(self, message: str, status: int = 0, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def is_busy(self) -> bool:
        return self.status in _TRY_LATER

    @property
    def is_refusal(self) -> bool:
        """True if the request itself is refused, such as for a too long prompt: any 4xx status except 429."""
        return HTTPStatus.BAD_REQUEST <= self.status < HTTPStatus.INTERNAL_SERVER_ERROR and not self.is_busy


@dataclass
class Completion:
    """A streamed completion. Times are in ns of the monotonic clock."""

    sent_ns: int
    """Time at which the request was sent."""
    event_ns: list[int] = field(default_factory=list)
    """Times at which events with tokens arrived."""
    prompt_tokens: int = 0
    """Number of prompt tokens. If the server does not report it: estimated from the number of characters."""
    output_tokens: int = 0
    """Number of output tokens that the server reports. If the server reports none: number of events with tokens."""
    cached_tokens: int | None = None
    """Number of the prompt's tokens that the server had cached. None: the server does not report it."""

    @property
    def ttft_ns(self) -> int:
        return self.event_ns[0] - self.sent_ns

    @property
    def tokens_per_event(self) -> float:
        """Mean number of tokens per event. Above 1 if the server sends several tokens at once."""
        return max(1.0, self.output_tokens / len(self.event_ns))


OnEvent = Callable[[Completion], bool]
"""Called at every event that has tokens. If it returns False, the client ends the completion."""


class ServerClient:
    """A client of one model on a server. Each completion has a connection of its own. The connection is open before the
    completion's times begin to count.
    """

    def __init__(
        self, url: str, *, model: str | None = None, api_key: str | None = None, timeout_s: float = 120
    ) -> None:
        """url: address of the server. model: the server's name of the model; None: `describe` takes the first model
        that the server lists. api_key: sent as bearer token; None: user and password in the URL, if any, are sent as
        basic authentication. timeout_s: maximum wait in s for the connection, and for each further part of an answer.

        Raises ConfigError if `url` is no address of a server.
        """
        parts = _address(url)
        self._is_https, self._host, self._port = parts.scheme == "https", parts.hostname or "", parts.port
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        elif parts.username:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["Authorization"] = f"Basic {b64encode(login.encode()).decode()}"
        self._optional = dict(OPTIONAL_FIELDS)
        self._random = SystemRandom()
        self._chars_per_token = 0.0
        port = f":{parts.port}" if parts.port else ""
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"{parts.scheme}://{host}{port}{self._base}"
        """Address without credentials."""
        self.model = model or ""

    def describe(self) -> dict[str, Any]:
        """Returns what the server says about itself: url, model, server (owner of the model, or else the engine that
        the metrics show, or else "unknown"), tp (1 if not reported), version, metrics (True: the server reports some),
        and the answers without their secrets (served: on the model; told: by path).

        Raises ServerError if no server answers, if the server lacks the model, or if no model is named.
        """
        listed = self._json("GET", "/v1/models")
        models = [model for model in _list(listed, "data") if isinstance(model, dict) and "id" in model]
        names = [str(model["id"]) for model in models]
        if not self.model and names:
            self.model = names[0]
        if not self.model or (names and self.model not in names):
            raise ServerError(
                f"{self.url} serves {', '.join(names) or 'no model that it names'}; name one with --model"
            )
        served: dict[str, Any] = next((model for model in models if model["id"] == self.model), {})
        answers = {path: found for path in _INFO_PATHS if (found := self._optional_json(path))}
        metrics = self.metrics()
        by_metrics = next(
            (name for prefix, name in _ENGINES.items() if re.search(rf"^{prefix}", metrics, re.MULTILINE)), None
        )
        versions = (found.get(name) for found in answers.values() for name in ("version", "build_info"))
        return {
            "url": self.url,
            "model": self.model,
            "server": str(served.get("owned_by") or by_metrics or "unknown"),
            "tp": next((found["tp_size"] for found in answers.values() if isinstance(found.get("tp_size"), int)), 1),
            "version": next((str(version) for version in versions if version), ""),
            "served": _without_secrets(served),
            "told": _without_secrets(answers),
            "metrics": bool(metrics),
        }

    def metrics(self) -> str:
        """The server's metrics as Prometheus text. Empty: the server reports no metrics."""
        try:
            with self._answer("GET", "/metrics") as (answer, _):
                return answer.read().decode(errors="replace")
        except ServerError:
            return ""

    def num_running(self) -> float:
        """Number of running requests, by the server's metrics. 0 if the metrics do not have this number."""
        return sum(float(value) for value in _RUNNING.findall(self.metrics()))

    def round_trip_ns(self) -> int:
        """Requests the list of models, which needs no forward. Returns the time in ns until the full answer."""
        with self._answer("GET", "/v1/models") as (answer, sent_ns):
            answer.read()
            return time.perf_counter_ns() - sent_ns

    def learn_sizes(self) -> None:
        """Sends one request to find out how many characters of random text make a token. This request also warms up
        the server. Raises ServerError if the request fails, or if the server does not report the number of tokens.
        """
        text = self._words(_SIZING_WORDS * 6)
        usage = self._json("POST", "/v1/completions", self._body(text, 1, stream=False)).get("usage")
        num_tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if not isinstance(num_tokens, int) or num_tokens < 1:
            raise ServerError(f"{self.url} reports no usage.prompt_tokens: so the lengths of prompts are unknown")
        self._chars_per_token = len(text) / num_tokens

    def text(self, num_tokens: int) -> str:
        """Random words of about num_tokens tokens. No two texts begin alike. Call learn_sizes first."""
        return self._words(max(1, round(num_tokens * self._chars_per_token)))

    def complete(
        self, prompt: str, max_tokens: int, *, ready: Callable[[], Any] | None = None, on_event: OnEvent | None = None
    ) -> Completion:
        """Streams one completion. max_tokens: maximum number of output tokens. ready: called when the connection is
        open; it may wait for other requests. on_event: called at every event with tokens; if it returns False, the
        client ends the completion. None: the client never ends the completion early. Call learn_sizes first.

        Raises ServerError if the request fails, if the stream has an error, or if no token arrives.
        """
        body = self._body(prompt, max_tokens, stream=True)
        with self._answer("POST", "/v1/completions", body, ready) as (answer, sent_ns):
            completion = Completion(sent_ns)
            for now_ns, event in _events(answer):
                if self._take(event, now_ns, completion) and on_event is not None and not on_event(completion):
                    break
        if not completion.event_ns:
            raise ServerError(f"{self.url} streams no tokens")
        completion.output_tokens = completion.output_tokens or len(completion.event_ns)
        completion.prompt_tokens = completion.prompt_tokens or round(len(prompt) / self._chars_per_token)
        return completion

    def _take(self, event: Mapping[str, Any], now_ns: int, completion: Completion) -> bool:
        """Adds an event of the stream to the completion. Returns True if the event brings output tokens, False if it
        brings only counts or the end. now_ns: when the event arrived. Raises ServerError if the event is an error.
        """
        if "error" in event:
            raise ServerError(f"{self.url}: {_message(event)}")
        if isinstance(usage := event.get("usage"), dict):
            completion.prompt_tokens = usage.get("prompt_tokens") or 0
            completion.output_tokens = usage.get("completion_tokens") or 0
            if isinstance(details := usage.get("prompt_tokens_details"), dict):
                completion.cached_tokens = details.get("cached_tokens")
        choice = next(iter(event.get("choices") or ()), None)
        if choice is None or (choice.get("finish_reason") is not None and not choice.get("text")):
            return False
        completion.event_ns.append(now_ns)
        return True

    def _words(self, num_chars: int) -> str:
        words: list[str] = []
        while num_chars > 0:
            words.append("".join(self._random.choices(_LETTERS, k=self._random.randint(2, 9))))
            num_chars -= len(words[-1]) + 1
        return " ".join(words)

    def _body(self, prompt: str, max_tokens: int, *, stream: bool) -> dict[str, Any]:
        optional = self._optional if stream else {}
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": stream,
            **optional,
        }

    def require_streams(self) -> list[str]:
        """Checks with a short completion that the server streams completions. Each time the server refuses the request
        (status 400 or 422), the next of OPTIONAL_FIELDS is left out of this and all later streamed requests. Returns
        the names of the fields that are left out.

        Raises ServerError if the server refuses the request without these fields, or if the request fails in another
        way.
        """
        choices = [names for count in range(len(OPTIONAL_FIELDS) + 1) for names in combinations(OPTIONAL_FIELDS, count)]
        for left_out in choices:
            self._optional = {name: value for name, value in OPTIONAL_FIELDS.items() if name not in left_out}
            try:
                self.complete(self.text(16), 4)
            except ServerError as wrong:
                is_refused = wrong.status in {HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY}
                if not is_refused or left_out == choices[-1]:
                    raise
            else:
                break
        return list(left_out)

    @contextmanager
    def _answer(
        self, method: str, path: str, body: Any = None, ready: Callable[[], Any] | None = None
    ) -> Iterator[tuple[HTTPResponse, int]]:
        """Yields the answer of status 200, and the time in ns when the request was sent, for a `with` block. body: sent
        as JSON; None: nothing is sent. ready: called when the connection is open, before the request is sent. Raises
        ServerError if the connection fails, also within the block, or if the answer has another status.
        """
        if self._is_https:
            connection: HTTPConnection = HTTPSConnection(self._host, self._port, timeout=self._timeout_s)
        else:
            connection = HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        content = None if body is None else json.dumps(body).encode()
        try:
            connection.connect()
            if ready is not None:
                ready()
            sent_ns = time.perf_counter_ns()
            connection.request(method, f"{self._base}{path}", content, self._headers)
            with connection.getresponse() as answer:
                yield self._checked(answer), sent_ns
        except (OSError, HTTPException) as broken:
            raise ServerError(f"{self.url}{path}: {broken or type(broken).__name__}") from None
        finally:
            connection.close()

    def _json(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        with self._answer(method, path, body) as (answer, _):
            try:
                found = parse_json(answer.read().decode(), "its answer")
            except ValueError as broken:
                raise ServerError(f"{self.url}{path}: not JSON: {broken}") from None
        if not isinstance(found, dict):
            raise ServerError(f"{self.url}{path}: expected an object, found {type(found).__name__}")
        return found

    def _optional_json(self, path: str) -> dict[str, Any]:
        try:
            return self._json("GET", path)
        except ServerError:
            return {}

    def _checked(self, answer: HTTPResponse) -> HTTPResponse:
        if answer.status == HTTPStatus.OK:
            return answer
        text = answer.read().decode(errors="replace")
        try:
            message = _message(parse_json(text, "its answer"))
        except ValueError:
            message = text.strip()[:200]
        later = answer.getheader("Retry-After") or ""
        wait_s = min(float(later), _MOST_WAIT_S) if later.isdecimal() else 1.0
        raise ServerError(f"{self.url}: {answer.status} {answer.reason}: {message}", answer.status, wait_s)


def _events(answer: HTTPResponse) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields server-sent events, each with the time in ns of its arrival."""
    while line := answer.readline():
        now_ns = time.perf_counter_ns()
        data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
        if data == b"[DONE]":
            return
        if data:
            try:
                event = parse_json(data.decode(), "an event")
            except ValueError:
                raise ServerError(f"an event is not JSON: {data[:100]!r}") from None
            if isinstance(event, dict):
                yield now_ns, event


def _address(url: str) -> SplitResult:
    """The parts of a URL. Raises ConfigError if the text is no address of a server, for example because its port is too
    large or its IPv6 address is incomplete.
    """
    try:
        parts: SplitResult = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme in {"http", "https"} and parts.hostname and (parts.port is None or parts.port):
            return parts
    except ValueError:
        pass
    raise ConfigError(f"{shown(url)} is no address of a server, such as http://127.0.0.1:30000")


def _message(found: Any) -> str:
    error = found.get("error", found) if isinstance(found, dict) else found
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:200]


def _list(found: Mapping[str, Any], name: str) -> list[Any]:
    value = found.get(name)
    return value if isinstance(value, list) else []


def _without_secrets(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _without_secrets(value) for name, value in found.items() if not _SECRET.search(str(name))}
    return [_without_secrets(value) for value in found] if isinstance(found, list) else found
