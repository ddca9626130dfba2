"""A tab of a browser, controlled over the DevTools protocol."""

import asyncio
import re
import subprocess
from contextlib import asynccontextmanager

import aiohttp

from tests.report.browser import CHROMIUM

_OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


class Tab:
    def __init__(self, socket):
        self._socket = socket
        self._number = 0

    async def call(self, method, **arguments):
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": arguments})
        while True:
            answer = await self._socket.receive_json()
            if answer.get("id") == self._number:
                return answer["result"]

    async def run(self, script):
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, script, unlike=None):
        """Runs a script again and again until its value is true and not `unlike`. Returns the value. Raises
        AssertionError after 20 s.
        """
        for _ in range(200):
            value = await self.run(script)
            if value and value != unlike:
                return value
            await asyncio.sleep(0.1)
        raise AssertionError(f"{script} stays {value!r}")


@asynccontextmanager
async def tab(url, width, folder):
    options = [*_OPTIONS, "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    process = await asyncio.create_subprocess_exec(CHROMIUM, *options, stderr=subprocess.PIPE)
    try:
        while not (found := re.search(rb"ws://[^/]+:(\d+)/", await process.stderr.readline())):
            pass
        port = int(found[1])
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                page = next(one for one in await answer.json() if one["type"] == "page")
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                made = Tab(socket)
                size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
                await made.call("Emulation.setDeviceMetricsOverride", **size)
                await made.call("Page.navigate", url=url)
                await made.until("document.readyState === 'complete' && location.href !== 'about:blank'")
                yield made
    finally:
        process.terminate()
        await process.wait()
