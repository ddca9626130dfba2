"""The front end before real processes: OpenAI's own client gets a single process's tokens; nothing stays behind."""

import asyncio

import pytest

aiohttp = pytest.importorskip("aiohttp")

from pdreal.launcher import Launcher
from pdreal.serve.http import serving
from pdreal.serve.server import Address, serve, service_of
from pdreal.serve.service import Entrance
from pdreal.serve.tokenizer import Tokenizer
from pdreal.settings.options import Options
from pdreal.settings.scenario import served_scenario

from tests.real import clusters

TOKENIZER = Tokenizer(512)
TEXT = "shared prefixes are cached"
POOL = 1024


def test_clients_that_stay_and_clients_that_go():
    """One cluster for all of it: a start costs seconds."""
    options = Options(check_kv=True)
    pools = {"prefill__pool_tokens": POOL, "decode__pool_tokens": POOL, "decode__admission__reserved_tokens": 64}
    scenario = served_scenario(clusters.scenario(**pools), options)

    async def main() -> list[str]:
        launcher = Launcher(scenario, options)
        await launcher.start()
        try:
            async with serving(service_of(scenario, options, launcher, "tiny", Entrance()), "127.0.0.1", 0) as url:
                await complete(url)
                await asyncio.gather(*(leave_early(url, 40 * i) for i in range(1, 7)), stream(url))
                await refuse(url)
                assert launcher.num_live_requests == 0
                await flush(url)
                await complete(url)
                assert await health(url) == (200, "")
                launcher.kill("decode-0")
                while not launcher.missing_roles:  # noqa: ASYNC110  the launcher tells nobody
                    await asyncio.sleep(0.02)
                status, why = await health(url)
                assert status == 503
                assert "no decode instance is up" in why
        finally:
            leaks = await launcher.stop()
        return leaks

    assert asyncio.run(main()) == []


def openai_client(url):
    return pytest.importorskip("openai").AsyncOpenAI(base_url=f"{url}/v1", api_key="none")


async def complete(url):
    async with openai_client(url) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        prompt = TOKENIZER.encode(TEXT)
        for sent, is_cached in ((TEXT, False), (prompt, True)):
            answer = await client.completions.create(model="tiny", prompt=sent, max_tokens=9)
            assert clusters.is_greedy(prompt, TOKENIZER.encode(answer.choices[0].text))
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 9)
            assert answer.usage.prompt_tokens_details.cached_tokens == is_cached * (len(prompt) - 1) // 4 * 4


async def stream(url):
    prompt = TOKENIZER.chat([("user", TEXT)])
    async with openai_client(url) as client:
        parts = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": TEXT}],
            max_completion_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
        events = [part async for part in parts]
    text = "".join(event.choices[0].delta.content for event in events if event.choices)
    assert clusters.is_greedy(prompt, TOKENIZER.encode(text))
    assert events[-1].usage.completion_tokens == 12


async def leave_early(url, num_prompt_tokens):
    """After the first token, in the middle of as many as fit."""
    body = {"prompt": [7] * num_prompt_tokens, "max_tokens": 500, "stream": True}
    async with aiohttp.ClientSession(url) as client, client.post("/v1/completions", json=body) as response:
        assert response.status == 200
        await response.content.readline()
        response.close()


async def refuse(url):
    async with openai_client(url) as client:
        with pytest.raises(pytest.importorskip("openai").BadRequestError, match="the prompt has 2000 tokens"):
            await client.completions.create(model="tiny", prompt=[5] * 2000, max_tokens=1)


async def health(url):
    async with aiohttp.ClientSession(url) as client, client.get("/health") as response:
        return response.status, await response.text()


async def flush(url):
    async with aiohttp.ClientSession(url) as client, client.post("/flush_cache") as response:
        assert response.status == 200


def test_a_server_ends_with_its_cluster(monkeypatch):
    """Without health, its only instance does not come back. Who waits for it is told why."""
    server = {"gpu": "h100", "pool_tokens": POOL, "max_running_requests": 8, "chunked_prefill_tokens": 64}
    options, made, answers = Options(), [], []
    scenario = served_scenario(clusters.scenario(prefill=None, decode=None, aggregated=server), options)
    monkeypatch.setattr("pdreal.serve.server.Launcher", lambda *given: made.append(Launcher(*given)) or made[0])

    async def ask(url):
        body = {"prompt": [7], "max_tokens": 500, "stream": True}
        async with aiohttp.ClientSession(url) as client, client.post("/v1/completions", json=body) as response:
            await response.content.readline()
            made[0].kill("aggregated-0")
            answers.append((await response.text()).split("\n\n"))

    async def main():
        async with asyncio.timeout(60):
            asking = []
            given = Address("127.0.0.1", 0), "tiny", Entrance()
            problems = await serve(
                scenario, options, *given, announce=lambda url: asking.append(asyncio.create_task(ask(url)))
            )
            await asking[0]
            return problems

    assert asyncio.run(main()) == ["the cluster cannot continue: aggregated-0 was lost: killed by SIGKILL"]
    *_, error, done, _ = answers[0]
    assert "the request failed: aggregated-0 was lost: killed by SIGKILL" in error
    assert done == "data: [DONE]"
