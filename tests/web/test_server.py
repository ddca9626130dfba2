"""The page in a real browser, and what the server refuses."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from subprocess import PIPE
from threading import Event

import pytest

from tests.report.browser import CHROMIUM

aiohttp = pytest.importorskip("aiohttp", reason="the web extra is not installed")

from aiohttp.test_utils import TestClient, TestServer  # noqa: E402

from pdsim.web.server import BoardServer  # noqa: E402
from tests.web.tab import tab  # noqa: E402


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    command = [sys.executable, "-m", "pdsim", "serve", "--port", "0", "--gpu", "h200=3", "--num-requests", "60"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path_factory.mktemp("web"))
    found = re.match(r"(http://127\.0\.0\.1:\d+) ", process.stdout.readline())
    assert found
    yield found[1]
    process.send_signal(signal.SIGINT)
    process.stdout.close()
    assert process.wait(20) == 0


def requests(*wanted):
    """Status and text of each."""

    async def ask():
        async with aiohttp.ClientSession() as session:
            answers = []
            for method, url, options in wanted:
                async with session.request(method, url, **options) as answer:
                    answers.append((answer.status, await answer.text()))
            return answers

    return asyncio.run(ask())


def test_pages_of_other_sites_are_refused(address):
    (other, _), (form, _), (wrong, text) = requests(
        ("GET", f"{address}/controls", {"headers": {"Host": "evil.example"}}),
        ("POST", f"{address}/answer", {"data": "{}", "headers": {"Content-Type": "text/plain"}}),
        ("POST", f"{address}/answer", {"json": {}}),
    )
    assert (other, form, wrong) == (403, 415, 422)
    assert "no cluster" in text


JSON = {"Content-Type": "application/json"}
BODIES = ["null", "[]", '{"a', "[" * 100_000, f'{{"load": {"1" * 5000}}}', "{\\xff}", "", "3", '"x"']


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body[:8])
def test_a_body_that_is_no_json_object_is_the_clients_mistake(address, body):
    ((status, text),) = requests(("POST", f"{address}/answer", {"data": body.encode(), "headers": JSON}))
    assert (status, text.startswith("send a JSON object")) == (400, True)


@pytest.mark.parametrize("charset", ["utf-16", "utf-32", "no-such-charset"])
def test_a_body_of_another_charset_is_the_clients_mistake(address, charset):
    headers = {"Content-Type": f"application/json; charset={charset}"}
    ((status, _),) = requests(("POST", f"{address}/answer", {"data": b"{}x", "headers": headers}))
    assert status == 400


@pytest.mark.parametrize("host", ["127.0.0.1:99999999", "[::1", "localhost:x"])
def test_a_host_that_is_no_address_is_the_clients_mistake(address, host):
    ((status, _),) = requests(("GET", f"{address}/controls", {"headers": {"Host": host}}))
    assert status in (400, 403)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt install chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_sliding_changes_what_is_read(address, width, tmp_path):
    async def slide():
        async with tab(f"{address}/", width, tmp_path) as page:
            first = await page.until("document.getElementById('verdict').textContent")
            await page.run("document.getElementById('keep').click()")
            await page.run(_chosen("prefill.instances", 4))
            then = await page.until("document.getElementById('verdict').textContent", unlike=first)
            text = await page.run("document.body.innerText")
            overflow = await page.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            return first, then, text, overflow

    first, then, text, overflow = asyncio.run(slide())
    assert first.startswith("2P2D of TP1 on h200 ")
    assert then.startswith("4P2D of TP1 on h200 ")
    assert overflow == 0
    for words in ("Where the time of a request goes", "pdsim run", "TTFT p99 < 2 s"):
        assert words in text
    assert "llama-3.1-8b, 2P2D of TP1 on h200, 60 made-up requests" in text, "kept to compare"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt install chromium")
def test_a_model_that_does_not_fit_leaves_no_answer(address, tmp_path):
    """Not even the one before. What was kept stays, and the next choice is answered."""

    async def choose():
        async with tab(f"{address}/", 1280, tmp_path) as page:
            before = await page.until("document.getElementById('verdict').textContent")
            await page.run("document.getElementById('keep').click()")
            texts = []
            for model in ("llama-3.1-405b", "qwen3-8b"):
                await page.run(_chosen("model", model))
                await page.until("document.getElementById('status').textContent !== 'computing'")
                texts.append(await page.run("document.getElementById('answer').innerText"))
            return before, texts

    before, (text, then) = asyncio.run(choose())
    assert text.startswith("No answer. prefill: llama-3.1-405b")
    assert before not in text
    assert "pdsim run" not in text
    assert "llama-3.1-8b, 2P2D of TP1 on h200" in text
    assert "2P2D of TP1 on h200 meets the SLO" in then


def _chosen(name, value):
    return (
        f"form.elements['{name}'].value = '{value}';"
        f"form.elements['{name}'].dispatchEvent(new Event('input', {{bubbles: true}}))"
    )


def test_of_questions_that_wait_the_newest_alone_is_answered():
    answered, may_end = [], Event()

    class SlowBoard:
        def answer(self, chosen):
            answered.append(chosen["number"])
            assert may_end.wait(60)
            return chosen

    async def ask():
        server = BoardServer(SlowBoard())
        async with TestClient(TestServer(server.app)) as client:
            asked = []
            for number in (1, 2, 3):
                asked.append(asyncio.create_task(client.post("/answer", json={"number": number})))
                while server._newest < number or not answered:  # noqa: ASYNC110  the server has no event for it
                    await asyncio.sleep(0.001)
            may_end.set()
            return [(await one).status for one in asked]

    assert asyncio.run(ask()) == [200, 409, 200]
    assert answered == [1, 3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_ends_leaves_no_folder(number, tmp_path):
    command = [sys.executable, "-m", "pdsim", "serve", "--port", "0", "--gpu", "h200=3"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, env=environment) as server:
        assert server.stdout.readline().startswith("http://127.0.0.1:")
        assert [folder.name.startswith("pdsim-serve-") for folder in tmp_path.iterdir()] == [True]
        server.send_signal(number)
        assert (server.wait(60), server.stderr.read()) == (0, "")
    assert not list(tmp_path.iterdir())


def test_a_port_that_is_taken_is_said(address):
    port = address.rpartition(":")[2]
    command = [sys.executable, "-m", "pdsim", "serve", "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=60, check=False)
    assert done.returncode == 2
    assert f"--port {port}: " in done.stderr
