"""Record which workers SGLang's own gateway and vLLM's own router choose: python record_gateway.py SITE

SITE: a folder with both, as pip install --target SITE sglang-router==0.3.2 vllm-router==0.1.17 makes. The workers are
servers of this process that answer when the load says so. Needs no GPU and no model.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from gateway_loads import LOADS, NUM_WORKERS, Load, events

LOGS = Path(__file__).with_name("logs")
HOST, PORT, METRICS_PORT, FIRST_WORKER_PORT = "127.0.0.1", 19090, 19099, 19100
SETTLING_S, CHECKED_S, READY_S = 0.02, 3.0, 10.0
"""Waits after an event, after a change of a worker's health, and for the gateway."""
OK = b"HTTP/1.1 200 OK\r\n"


class Workers:
    """Workers of one load. They note which of them got a request, and hold its answer back."""

    def __init__(self) -> None:
        self.down: set[int] = set()
        self.got: defaultdict[int, dict[str, int]] = defaultdict(dict)
        """Workers of each request, by role."""
        self.begun: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.gone: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    async def start(self, role: str, index: int, port: int) -> None:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while head := await reader.readuntil(b"\r\n\r\n"):
                    await self._answer(role, index, head.decode(), reader, writer)
            except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
                writer.close()

        await asyncio.start_server(connected, HOST, port)

    async def _answer(
        self, role: str, index: int, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        request, *lines = head.lower().split("\r\n")
        if not request.endswith("http/1.1"):
            raise ConnectionError(f"{request}: the gateway asks whether the worker speaks another protocol")
        headers = dict(line.split(": ", 1) for line in lines if line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = request.split()[1]
        if path.startswith("/health") and index in self.down and role != "decode":
            writer.write(b"HTTP/1.1 500 Down\r\ncontent-length: 0\r\n\r\n")
        elif not path.startswith("/generate"):
            writer.write(_with_length(b'{"model_path": "m", "status": "ok"}'))
        else:
            await self._generate(role, index, int(json.loads(body)["text"]), writer)
        await writer.drain()

    async def _generate(self, role: str, index: int, number: int, writer: asyncio.StreamWriter) -> None:
        self.got[number][role] = index
        await self.begun[number].wait()
        if role == "prefill":
            writer.write(_with_length(b"{}"))
            return
        writer.write(OK + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(_chunk(b'data: {"text": "a"}\n\n'))
        await writer.drain()
        await self.gone[number].wait()
        writer.write(_chunk(b"data: [DONE]\n\n") + _chunk(b""))


def _with_length(body: bytes) -> bytes:
    return OK + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def sent(number: int, session: int, header: str) -> bytes:
    """Sends a request, and returns all that the gateway answers. header: name of the header with the session."""
    reader, writer = await asyncio.open_connection(HOST, PORT)
    body = json.dumps({"text": str(number), "stream": True}).encode()
    lines = ["POST /generate HTTP/1.1", f"host: {HOST}", "content-type: application/json", "connection: close"]
    lines += [f"content-length: {len(body)}", *([f"{header}: s{session}"] if session >= 0 else [])]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)
    return await reader.read()


def gateway(load: Load, site: str, log: int) -> "subprocess.Popen[bytes]":
    urls = [f"http://{HOST}:{FIRST_WORKER_PORT + i}" for i in range(2 * NUM_WORKERS if load.is_pair else NUM_WORKERS)]
    module = "vllm_router" if load.is_vllm else "sglang_router"
    policy = [load.mode] if load.is_vllm else ["manual", "--assignment-mode", load.mode]
    command = [sys.executable, "-m", f"{module}.launch_router", "--host", HOST, "--port", str(PORT)]
    command += ["--prometheus-port", str(METRICS_PORT), "--policy", *policy]
    command += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
    command += ["--health-success-threshold", "1"]
    if load.is_pair:
        command += ["--pd-disaggregation"]
        command += [word for url in urls[:NUM_WORKERS] for word in ("--prefill", url, "none")]
        command += [word for url in urls[NUM_WORKERS:] for word in ("--decode", url)]
    else:
        command += ["--worker-urls", *urls]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": site}, stdout=log, stderr=log)  # noqa: S603


async def choices(name: str, site: str) -> list[str]:
    """One line for each request: number and workers."""
    load, workers = LOADS[name], Workers()
    roles = ("prefill", "decode") if load.is_pair else ("aggregated",)
    for place, role in enumerate(roles):
        for index in range(NUM_WORKERS):
            await workers.start(role, index, FIRST_WORKER_PORT + place * NUM_WORKERS + index)
    answers = []
    with tempfile.TemporaryFile() as log:
        process = gateway(load, site, log.fileno())
        try:
            await asyncio.sleep(READY_S)
            for what, number, session in events(name):
                if what == "route":
                    header = "x-session-id" if load.is_vllm else "x-smg-routing-key"
                    answers.append(asyncio.create_task(sent(number, session, header)))
                elif what in ("begins", "gone"):
                    (workers.begun if what == "begins" else workers.gone)[number].set()
                else:
                    workers.down ^= {number}
                await asyncio.sleep(CHECKED_S if what in ("down", "up") else SETTLING_S)
            for number in range(load.num_requests):
                workers.begun[number].set()
                workers.gone[number].set()
            await asyncio.wait(answers)
        finally:
            process.terminate()
            process.wait()
    return [
        " ".join(map(str, [number, *(workers.got[number][role] for role in roles)]))
        for number in range(load.num_requests)
    ]


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    for load_name in names or LOADS:
        lines = asyncio.run(choices(load_name, folder))
        (LOGS / f"{load_name}.txt").write_text("\n".join([*lines, ""]))
