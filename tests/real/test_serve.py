"""The front end over HTTP: what clients get for good requests and bad ones, and that nothing of either stays behind."""

import asyncio
import gzip
import json
import socket
from contextlib import asynccontextmanager
from itertools import pairwise
from threading import get_ident

import pytest
from hypothesis import given
from hypothesis import strategies as st

aiohttp = pytest.importorskip("aiohttp")

from pdreal.serve import http
from pdreal.serve.dialects import _content
from pdreal.serve.fields import Fields
from pdreal.serve.http import serving
from pdreal.serve.metrics import Meter, Metrics
from pdreal.serve.origin import is_loopback
from pdreal.serve.tokenizer import StopTexts, Tokenizer
from pdreal.settings.host import LaunchError
from pdreal.settings.scenario import Room

from pdsim.formats.pages import read_page
from tests.real.scripted_cluster import NUM_CACHED_TOKENS, VOCAB_SIZE, ScriptedCluster, scripted_service, true_tokens

TOKENIZER = Tokenizer(VOCAB_SIZE)
HELLO = TOKENIZER.encode("hello")
JSON = {"Content-Type": "application/json"}


@asynccontextmanager
async def running(**entrance):
    """A client of a server, and the cluster behind it, which must be empty in the end."""
    cluster = ScriptedCluster()
    service = scripted_service(cluster, **entrance)
    async with serving(service, "127.0.0.1", 0) as url, aiohttp.ClientSession(url) as client:
        yield client, cluster, service
        assert not cluster.under_way


async def post(client, path, body):
    async with client.post(path, json=body) as response:
        return response.status, await response.json()


async def events(client, path, body):
    """The events of a stream; the last must be [DONE]."""
    async with client.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        *lines, done, rest = (await response.text()).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def usage(num_prompt_tokens, num_output_tokens):
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": NUM_CACHED_TOKENS},
    }


def run(scenario, **entrance):
    async def main():
        async with asyncio.timeout(20), running(**entrance) as (client, cluster, service):
            await scenario(client, cluster, service)

    asyncio.run(main())


@pytest.mark.parametrize(
    "prompt", ["hello", ["hello"], HELLO, [HELLO]], ids=["text", "list of a text", "tokens", "list of tokens"]
)
def test_a_completion_in_one_piece(prompt):
    async def scenario(client, cluster, service):
        status, answer = await post(client, "/v1/completions", {"prompt": prompt, "max_tokens": 3})
        assert status == 200
        text = TOKENIZER.decode(true_tokens(HELLO, 3))
        assert answer["choices"] == [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}]
        assert answer["usage"] == usage(5, 3)

    run(scenario)


def test_a_stream_of_completions_has_usage_only_when_asked():
    async def scenario(client, cluster, service):
        body = {"prompt": HELLO, "max_tokens": 4}
        plain = await events(client, "/v1/completions", body)
        assert all("usage" not in event for event in plain)
        assert TOKENIZER.encode("".join(e["choices"][0]["text"] for e in plain)) == true_tokens(HELLO, 4)
        reasons = [event["choices"][0]["finish_reason"] for event in plain]
        assert reasons[-1] == "length"
        assert set(reasons[:-1]) <= {None}

        *parts, last = await events(client, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
        assert last["choices"] == []
        assert last["usage"] == usage(5, 4)
        assert all("usage" not in event for event in parts)

        options = {"continuous_usage_stats": True}
        parts = await events(client, "/v1/completions", {**body, "stream_options": options})
        assert parts[-1]["usage"]["completion_tokens"] == 4

    run(scenario)


def test_chat():
    async def scenario(client, cluster, service):
        messages = [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]},
        ]
        prompt = TOKENIZER.encode("system: be brief\nuser: hello\nassistant:")
        body = {"model": "any", "messages": messages, "max_completion_tokens": 3, "max_tokens": 5}
        text = TOKENIZER.decode(true_tokens(prompt, 3))
        _, answer = await post(client, "/v1/chat/completions", body)
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": text}
        assert answer["usage"]["prompt_tokens"] == len(prompt)

        parts = await events(client, "/v1/chat/completions", body)
        deltas = [event["choices"][0]["delta"] for event in parts]
        assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        assert "".join(delta["content"] for delta in deltas) == text

    run(scenario)


@pytest.mark.parametrize("prompt", [{"text": "hello"}, {"input_ids": HELLO}], ids=["text", "input_ids"])
def test_sglang_generate_sends_all_so_far(prompt):
    async def scenario(client, cluster, service):
        expected = true_tokens(HELLO, 4)
        body = {**prompt, "sampling_params": {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}}
        status, answer = await post(client, "/generate", body)
        assert status == 200
        assert answer["output_ids"] == expected
        assert answer["text"] == TOKENIZER.decode(expected)
        assert answer["meta_info"]["prompt_tokens"] == 5
        assert answer["meta_info"]["cached_tokens"] == NUM_CACHED_TOKENS
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
        for event in (parts := await events(client, "/generate", body)):
            count = event["meta_info"]["completion_tokens"]
            assert event["output_ids"] == expected[:count]
            assert event["text"] == TOKENIZER.decode(expected[:count])
        assert parts[-1]["meta_info"]["finish_reason"]["type"] == "length"

    run(scenario)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_a_sequence_that_ends_early_says_stop(path):
    async def scenario(client, cluster, service):
        limits = {"max_tokens": 9, "sampling_params": {"max_new_tokens": 9}}
        bodies = {
            "/v1/completions": {"prompt": [4], **limits},
            "/v1/chat/completions": {"messages": [{"content": "<0x04>"}], **limits},
            "/generate": {"input_ids": [4], **limits},
        }
        last = (await events(client, path, bodies[path]))[-1]
        if path == "/generate":
            assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": 0}
        else:
            assert last["choices"][0]["finish_reason"] == "stop"
        _, whole = await post(client, path, bodies[path])
        assert '"stop"' in json.dumps(whole)

    run(scenario)


def chat(content):
    return {"messages": [{"role": "user", "content": content}]}


REFUSED = [
    ("/v1/completions", b"{", "body is not JSON"),
    ("/v1/completions", b"\xff", "body is not JSON"),
    ("/v1/completions", b"[" * 60_000, "body is not JSON"),
    ("/v1/completions", b"[]", "must be a JSON object, not a list"),
    ("/v1/completions", {}, "prompt is empty"),
    ("/v1/completions", {"prompt": ""}, "prompt is empty"),
    ("/v1/completions", {"prompt": 7}, "prompt must be a string, not a number"),
    ("/v1/completions", {"prompt": [1.5]}, "prompt must be a list of token ids; it has a number"),
    ("/v1/completions", {"prompt": [True]}, "prompt must be a list of token ids; it has a boolean"),
    ("/v1/completions", {"prompt": ["a", "b"]}, "prompt has 2 prompts; send one prompt per request"),
    ("/v1/completions", {"prompt": [[1], [2]]}, "prompt has 2 prompts; send one prompt per request"),
    ("/v1/completions", {"prompt": [512]}, "prompt has token 512; the model's tokens are 0 to 511"),
    ("/v1/completions", {"prompt": [-1]}, "prompt has token -1"),
    ("/v1/completions", {"prompt": "a" * 101}, "101 tokens and asks for up to 16 more; there is room for 100"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 150}, "for 150 with the output"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens must be at least 1, not 0"),
    ("/v1/completions", {"prompt": "a", "max_tokens": "9"}, "max_tokens must be an integer, not a string"),
    ("/v1/completions", {"prompt": "a", "max_tokens": True}, "max_tokens must be an integer, not a boolean"),
    ("/v1/completions", {"prompt": "a", "n": 129}, "n must be at most 128, not 129"),
    ("/v1/completions", {"prompt": "a", "best_of": 4}, "best_of must equal n, 1"),
    ("/v1/completions", {"prompt": "a", "echo": True}, "leave it out or send false"),
    ("/v1/completions", {"prompt": "a", "logprobs": 21}, "available for 0 to 20 tokens, not for 21"),
    (
        "/v1/completions",
        {"prompt": "a", "stop": ["x", 3]},
        "stop must be a string or a list of strings; it has",
    ),
    ("/v1/completions", {"prompt": "a", "seed": "x"}, "seed must be an integer, not a string"),
    ("/v1/completions", {"prompt": "a", "stream": "yes"}, "stream must be true or false, not a string"),
    ("/v1/completions", {"prompt": "a", "stream_options": []}, "stream_options must be an object, not a list"),
    ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": 1}}, "stream_options.include_usage must"),
    ("/v1/completions", rb'{"prompt": "\ud800"}', r"the text has \ud800, half of a surrogate pair"),
    ("/v1/completions", {"prompt": f"<{9:9<5000}>", "max_tokens": 1}, "the prompt has 5002 tokens"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 10**400}, "asks for up to 1000000"),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "body is not JSON: Exceeds the limit"),
    ("/v1/completions", {"prompt": "a", "temperature": -3}, "temperature must be from 0 to 1000000.0, not -3"),
    ("/v1/completions", {"prompt": "a", "temperature": float("nan")}, "body is not JSON: NaN is no number"),
    ("/v1/completions", b'{"prompt": "a", "temperature": 1e999}', "1e999"),
    ("/v1/completions", {"prompt": "a", "top_p": float("inf")}, "body is not JSON: Infinity is no number"),
    ("/v1/completions", {"prompt": "a", "top_p": 1.5}, "top_p must be from 0 to 1, not 1.5"),
    ("/v1/completions", {"prompt": "a", "top_k": "all"}, "top_k must be a number, not a string"),
    ("/v1/completions", {"prompt": "a", "guided_regex": "x"}, "guided_regex is not supported"),
    ("/v1/chat/completions", rb'{"messages": [{"role": "\udc00", "content": "a"}]}', r"the text has \udc00"),
    ("/v1/chat/completions", {}, "messages must be a list of messages"),
    ("/v1/chat/completions", {"messages": []}, "messages must be a list of messages, at least one"),
    ("/v1/chat/completions", {"messages": ["hi"]}, "messages[0] must be an object"),
    ("/v1/chat/completions", chat(5), "messages[0].content must be a string, not a number"),
    ("/v1/chat/completions", chat([{"type": "image_url"}]), "messages[0].content has a part that is not text"),
    ("/v1/chat/completions", {**chat("hi"), "tools": [{"type": "function"}]}, "tools is not supported"),
    ("/v1/chat/completions", {**chat("hi"), "max_completion_tokens": -1}, "max_completion_tokens must be at least 1"),
    ("/generate", {}, "needs text or input_ids, and not both"),
    ("/generate", {"text": "a", "input_ids": [1]}, "needs text or input_ids, and not both"),
    ("/generate", {"text": ["a", "b"]}, "text must be a string, not a list"),
    ("/generate", {"input_ids": "a"}, "input_ids must be a list of token ids, not a string"),
    ("/generate", {"text": "a", "sampling_params": 1}, "sampling_params must be an object"),
    ("/generate", {"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n must be at least 1, not 0"),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens must"),
    ("/generate", {"text": "a", "return_logprob": 1}, "return_logprob must be true or false, not a number"),
    ("/generate", {"text": "a", "sampling_params": {"min_p": -1}}, "sampling_params.min_p must be from 0 to 1"),
    (
        "/generate",
        {"text": "a", "sampling_params": {"stop": 5}},
        "sampling_params.stop must be a string",
    ),
]


@pytest.mark.parametrize(("path", "body", "message"), REFUSED)
def test_bad_requests_are_refused_with_what_is_wrong(path, body, message):
    async def scenario(client, cluster, service):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with client.post(path, data=data, headers=JSON) as response:
            assert response.status == 400
            error = (await response.json())["error"]
        assert message in error["message"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "bad_request")
        assert service.metrics.num_requests == 0

    run(scenario)


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/v1/engines", 404, "there is no /v1/engines; there are /flush_cache, /generate, /health"),
        ("POST", "/", 404, "there is no /"),
        ("GET", "/v1/completions", 405, "/v1/completions takes POST, not GET"),
        ("DELETE", "/v1/models", 405, "/v1/models takes GET or HEAD, not DELETE"),
    ],
)
def test_unknown_routes_and_methods(method, path, status, message):
    async def scenario(client, cluster, service):
        async with client.request(method, path) as response:
            assert response.status == status
            assert message in (await response.json())["error"]["message"]

    run(scenario)


def test_a_body_beyond_what_fits():
    async def scenario(client, cluster, service):
        limit = service.room.body_bytes
        async with client.post("/v1/completions", json={"prompt": "a" * limit}) as response:
            assert response.status == 413
            assert f"more than {limit} bytes" in (await response.json())["error"]["message"]

    run(scenario)


@given(
    st.lists(st.integers(0, 151_935), max_size=20).map(lambda tokens: 50 * tokens),
    st.sampled_from([None, 2]),
    st.booleans(),
)
def test_no_body_of_a_prompt_that_fits_is_too_large(tokens, indent, is_escaped):
    """Whether it is text or token ids, and however its JSON is written."""
    tokenizer, limit = Tokenizer(151_936), Room(len(tokens), len(tokens) + 1).body_bytes
    assert len(json.dumps({"prompt": tokens}, indent=indent)) <= limit
    text = json.dumps({"prompt": tokenizer.decode(tokens)}, indent=indent)
    if is_escaped:
        text = text.replace("<", r"\u003c").replace(">", r"\u003e")
    assert tokenizer.encode(json.loads(text)["prompt"]) == tokens
    assert len(text) <= limit


def test_no_body_of_a_prompt_in_parts_is_too_large():
    """Each part has one token, with an id as long as an id can be."""
    num_tokens = 5000
    message = {"role": "user", "content": [{"type": "text", "text": "<999999998>"}] * num_tokens}
    text = json.dumps({"messages": [message]}).replace("<", r"\u003c").replace(">", r"\u003e")
    assert len(Tokenizer(10**9).encode(_content(Fields(message)))) == num_tokens
    assert len(text) <= Room(num_tokens, num_tokens + 1).body_bytes


def test_a_large_body_is_read_beside_the_loop(monkeypatch):
    threads = []
    parse = Fields.parse
    monkeypatch.setattr(Fields, "parse", lambda body: threads.append(get_ident()) or parse(body))

    async def scenario(client, cluster, service):
        for size in (1, 1 << 16):
            status, _ = await post(client, "/v1/completions", {"prompt": "a", "user": "x" * size})
            assert status == 200
        assert [thread == get_ident() for thread in threads] == [True, False]

    run(scenario)


def test_a_body_that_is_compressed_is_refused():
    async def scenario(client, cluster, service):
        for body in (b'{"prompt": "a"}', gzip.compress(b'{"prompt": "a"}')):
            headers = {**JSON, "Content-Encoding": "gzip"}
            async with client.post("/v1/completions", data=body, headers=headers) as response:
                assert response.status == 400
                assert "send it without compression" in (await response.json())["error"]["message"]

    run(scenario)


@pytest.mark.parametrize(
    ("sent", "answer"),
    [(b"", b""), (b"POST /v1/completions HTTP/1.1\r\nHost:", b""), (b"", b"408 Request Timeout")],
    ids=["nothing", "half of the headers", "half of the body"],
)
def test_a_client_that_sends_no_more_is_left(sent, answer, monkeypatch):
    monkeypatch.setattr(http, "HEADERS_S", 0.1)
    monkeypatch.setattr(http, "BODY_S", 0.1)
    if answer:
        head = b"Host: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: 20\r\n"
        sent = b"POST /v1/completions HTTP/1.1\r\n" + head + b"\r\n{"

    async def scenario(client, cluster, service):
        reader, writer = await asyncio.open_connection("127.0.0.1", client._base_url.port)
        writer.write(sent)
        assert answer in await reader.readline()
        writer.close()

    run(scenario)


def test_a_client_whose_machine_vanished_is_noticed(monkeypatch):
    options, notice_if_gone = [], http.notice_if_gone

    def watched(request):
        notice_if_gone(request)
        connection = request.transport.get_extra_info("socket")
        options.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        options.append(connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))

    monkeypatch.setattr(http, "notice_if_gone", watched)

    async def scenario(client, cluster, service):
        await post(client, "/v1/completions", {"prompt": "a"})
        assert options == [60_000, 1]

    run(scenario)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("gpu-7", False),
    ],
)
def test_only_loopback_is_private(host, expected):
    assert is_loopback(host) is expected


def test_only_the_key_opens():
    async def scenario(client, cluster, service):
        for headers, status in [
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "Bearer s3crét".encode().decode("latin-1")}, 401),
            ({"Authorization": "Bearer secret"}, 200),
        ]:
            for path in ("/v1/models", "/metrics"):
                async with client.get(path, headers=headers) as response:
                    assert response.status == status
                    if status == 401:
                        assert response.headers["WWW-Authenticate"] == "Bearer"
                        assert "needs its API key" in (await response.json())["error"]["message"]
            async with client.get("/health", headers=headers) as response:
                assert response.status == 200

    run(scenario, api_key="secret")


def test_too_many_that_wait_are_sent_away_for_a_while():
    """Those with a first token do not wait."""

    async def scenario(client, cluster, service):
        served = await client.post("/v1/completions", json={"prompt": [5], "stream": True})
        await served.content.readline()
        waiting = [asyncio.create_task(post(client, "/v1/completions", {"prompt": [1]})) for _ in range(2)]
        for _ in range(3):
            await cluster.submitted.get()
        async with client.post("/v1/completions", json={"prompt": "a"}) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            message = (await response.json())["error"]["message"]
            assert message == "2 answers wait for their first token, and at most 2 may: try again later"
        waiting[0].cancel()
        await cluster.aborted.get()
        status, _ = await post(client, "/v1/completions", {"prompt": "a"})
        assert status == 200
        waiting[1].cancel()
        served.close()
        for _ in range(2):
            await cluster.aborted.get()

    run(scenario, max_waiting_requests=2)


def test_all_answers_of_a_request_count_as_waiting():
    async def scenario(client, cluster, service):
        waiting = asyncio.create_task(post(client, "/v1/completions", {"prompt": [1], "n": 2}))
        for _ in range(2):
            await cluster.submitted.get()
        answers = [await post(client, "/v1/completions", {"prompt": "a", "n": n}) for n in (1, 2, 4)]
        assert [status for status, _ in answers] == [200, 503, 400]
        messages = [answer["error"]["message"] for _, answer in answers[1:]]
        assert messages[0].startswith("2 answers wait for their first token, and at most 3 may")
        assert messages[1].startswith("n must be at most 3, not 4")
        waiting.cancel()
        for _ in range(2):
            await cluster.aborted.get()

    run(scenario, max_waiting_requests=3)


def test_who_is_served_as_the_server_stops_is_told():
    async def scenario(client, cluster, service):
        stream = await client.post("/v1/completions", json={"prompt": [5], "stream": True})
        await stream.content.readline()
        waiting = asyncio.create_task(post(client, "/v1/completions", {"prompt": [1]}))
        for _ in range(2):
            await cluster.submitted.get()
        hurry = asyncio.Event()
        closing = asyncio.create_task(service.entrance.close(60, hurry))
        await asyncio.sleep(0)
        status, late = await post(client, "/v1/completions", {"prompt": "a"})
        assert (status, late["error"]["message"]) == (503, "the server stops")
        async with client.get("/health") as response:
            assert response.status == 503
        assert service.entrance.num_inside == 2
        hurry.set()
        await closing
        *_, error, done, _ = (await stream.text()).split("\n\n")
        message = json.loads(error.removeprefix("data: "))["error"]["message"]
        assert (message, done) == ("the request failed: the server stops", "data: [DONE]")
        status, failed = await waiting
        assert (status, failed["error"]["message"]) == (503, message)

    run(scenario)


def test_a_server_that_stops_waits_for_who_is_served():
    async def scenario(client, cluster, service):
        serving = asyncio.create_task(post(client, "/v1/completions", {"prompt": "a", "max_tokens": 100}))
        await cluster.submitted.get()
        await service.entrance.close(60, asyncio.Event())
        status, answer = await serving
        assert (status, answer["usage"]["completion_tokens"]) == (200, 100)

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_a_stop_text_ends_an_answer_and_is_not_part_of_it(path, stream):
    """It lies across two tokens, and takes its request's pages back at once."""

    async def scenario(client, cluster, service):
        prompt = TOKENIZER.chat([("user", "hello")]) if "chat" in path else HELLO
        text = TOKENIZER.decode(true_tokens(prompt, 8))
        stop = text[-6:-3]
        body = {"max_tokens": 50, "stop": ["not there", stop], "messages": [{"role": "user", "content": "hello"}]}
        body |= {"prompt": "hello", "text": "hello", "sampling_params": {"max_new_tokens": 50, "stop": stop}}
        said = text[: text.index(stop)]
        if stream:
            parts = await events(client, path, body)
            if path == "/generate":
                assert parts[-1]["text"] == said
                assert parts[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
            else:
                choices = [part["choices"][0] for part in parts]
                assert "".join(c.get("text", c.get("delta", {}).get("content")) for c in choices) == said
                assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
        else:
            _, answer = await post(client, path, body)
            choice = answer if path == "/generate" else answer["choices"][0]
            assert choice.get("text", choice.get("message", {}).get("content")) == said
        assert await cluster.aborted.get() == 0

    run(scenario)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_texts_are_found_however_the_text_is_cut(text, stops, data):
    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=6))})
    found, sent = StopTexts(stops), ""
    for begin, end in pairwise(cuts):
        part, matched = found.add(text[begin:end])
        sent += part
        if matched is not None:
            assert sent + matched == text[: len(sent) + len(matched)]
            break
    else:
        sent += found.rest()
        assert sent == text
    assert not any(stop in sent for stop in stops)


def test_several_choices_have_seeds_of_their_own():
    async def scenario(client, cluster, service):
        body = {"prompt": "hello", "max_tokens": 3, "n": 3, "seed": 5, "temperature": 1}
        _, answer = await post(client, "/v1/completions", body)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert answer["usage"]["completion_tokens"] == 9
        seeds = [cluster._requests[i].sampling.seed for i in range(3)]
        assert seeds[0] == 5
        assert len(set(seeds)) == 3
        parts = await events(client, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
        assert parts[-1]["usage"]["completion_tokens"] == 9
        for index in range(3):
            texts = [e["choices"][0]["text"] for e in parts[:-1] if e["choices"][0]["index"] == index]
            assert "".join(texts) == answer["choices"][index]["text"]

    run(scenario)


def test_one_choice_that_fails_takes_the_others_along():
    async def scenario(client, cluster, service):
        status, _ = await post(client, "/v1/completions", {"prompt": [2], "n": 2})
        assert status == 503

    run(scenario)


def test_what_asks_for_nothing_is_accepted():
    async def scenario(client, cluster, service):
        harmless = {"n": 1, "best_of": 1, "logprobs": None, "stop": None, "temperature": 0.7, "top_p": 0.9, "seed": 3}
        body = {"prompt": "a", "repetition_penalty": 1.0, "logit_bias": {}, "user": "me", "what_is_this": 1, **harmless}
        status, _ = await post(client, "/v1/completions", body)
        assert status == 200

    run(scenario)


def test_a_request_that_fails_before_its_first_token_has_a_status():
    async def scenario(client, cluster, service):
        for stream in (True, False):
            status, answer = await post(client, "/v1/completions", {"prompt": [2], "stream": stream})
            assert status == 503
            assert answer["error"]["message"] == "the request failed: decode-0 is down"
            assert answer["error"]["type"] == "server_error"
        assert service.metrics.num_aborted_requests == 2
        assert cluster.aborted.empty()

    run(scenario)


def test_a_request_that_fails_later_says_so_in_its_stream():
    async def scenario(client, cluster, service):
        parts = await events(client, "/v1/completions", {"prompt": [3]})
        assert parts[-1]["error"]["message"] == "the request failed: decode-0 is down"
        assert "choices" in parts[0]

    run(scenario)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_before_the_first_token_aborts_its_request(stream):
    async def scenario(client, cluster, service):
        with pytest.raises(TimeoutError):
            await client.post(
                "/v1/completions",
                json={"prompt": [1], "stream": stream},
                timeout=aiohttp.ClientTimeout(total=0.2),
            )
        assert await cluster.aborted.get() == 0
        assert service.metrics.num_aborted_requests == 1

    run(scenario)


def test_a_client_that_goes_away_in_the_middle_aborts_its_request():
    async def scenario(client, cluster, service):
        async with client.post("/v1/completions", json={"prompt": [5], "stream": True}) as response:
            await response.content.readline()
            response.close()
        assert await cluster.aborted.get() == 0

    run(scenario)


def test_flush_cache_only_while_idle():
    async def scenario(client, cluster, service):
        waiting = asyncio.create_task(post(client, "/v1/completions", {"prompt": [1]}))
        await cluster.submitted.get()
        async with client.post("/flush_cache") as response:
            assert response.status == 400
            assert "1 run now" in await response.text()
        waiting.cancel()
        await cluster.aborted.get()
        async with client.post("/flush_cache?timeout=5") as response:
            assert response.status == 200
        assert cluster.num_flushed == 1

    run(scenario)


def test_a_port_that_is_taken_is_named():
    async def scenario(client, cluster, service):
        with pytest.raises(LaunchError, match=r"cannot listen at 127\.0\.0\.1:\d+: "):
            async with serving(service, "127.0.0.1", client._base_url.port):
                pass

    run(scenario)


def test_tokens_that_come_at_once_share_the_time_since_the_last(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr("pdreal.serve.metrics.time.monotonic", lambda: now_s)
    metrics = Metrics("tiny")
    meter = Meter(metrics, 5)
    for at_s, num_tokens in ((1.0, 1), (1.36, 4), (1.9, 1)):
        now_s = at_s
        meter.add_tokens(num_tokens, 0)
    lines = list(metrics.between_tokens_s.lines("itl", ""))
    assert 'itl_bucket{,le="0.1"} 4' in lines
    assert 'itl_bucket{,le="0.6"} 5' in lines
    assert metrics.between_tokens_s._sum == pytest.approx(0.9)


def test_models_health_and_metrics(tmp_path):
    """`pdsim observe` reads the page as any page of SGLang."""

    async def scenario(client, cluster, service):
        async with client.get("/v1/models") as response:
            assert (await response.json())["data"][0]["id"] == "tiny"
        async with client.get("/health") as response:
            assert response.status == 200
        cluster.failure = "prefill-0 was lost"
        async with client.get("/health") as response:
            assert response.status == 503
        cluster.failure = None
        cluster.missing_roles = ["decode", "prefill"]
        async with client.get("/health") as response:
            assert response.status == 503
            assert "no decode and no prefill instance is up" in await response.text()
        await post(client, "/v1/completions", {"prompt": HELLO, "max_tokens": 3})
        async with client.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        for name, value in {"num_requests": 1, "prompt_tokens": 5, "generation_tokens": 3}.items():
            assert f'sglang:{name}_total{{model_name="tiny"}} {value}' in lines
        decode = 'model_name="tiny",engine_type="decode",instance="decode-0"'
        for name, value in {"num_running_reqs": 6, "num_decode_prealloc_queue_reqs": 3, "token_usage": 1.0}.items():
            assert f"sglang:{name}{{{decode}}} {value}" in lines
        assert lines.count("# TYPE sglang:num_running_reqs gauge") == 1
        assert 'sglang:time_to_first_token_seconds_bucket{model_name="tiny",le="+Inf"} 1' in lines
        assert 'sglang:e2e_request_latency_seconds_count{model_name="tiny"} 1' in lines
        (tmp_path / "page.txt").write_text("\n".join(lines))

    run(scenario)
    values = read_page(tmp_path / "page.txt").values
    of_server = {"running": 12, "waiting": 8, "pool_tokens": 16 * 16, "requests": 1, "prompt_tokens": 5}
    of_request = {"output_tokens": 3, "hit_tokens": 2, "hit_share": 2 / 5, "ttft_count": 1, "tpot_count": 1}
    assert {name: values[name] for name in {**of_server, **of_request}} == {**of_server, **of_request}
