"""Run the loads on real servers of SGLang, on a CPU, and keep what their schedulers decided.

usage: python record.py SITE [LOAD ...]

It needs Python 3.12 with torch 2.11, and folders SITE, separated by colons, with sglang 0.5.12.post1, sglang_router
0.3.2, nixl and what they import.
"""

import gzip
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from loads import LOADS, VOCABULARY, Load, Role, Servers

HERE = Path(__file__).parent
URL = "http://127.0.0.1:{}"
ROUTER_PORT = int(os.environ.get("PORT", "33000"))
"""It, and the next forty."""
FIRST_PORT = {"aggregated": ROUTER_PORT, "prefill": ROUTER_PORT + 10, "decode": ROUTER_PORT + 20}
BOOTSTRAP_PORT = ROUTER_PORT + 30
START_SECONDS = 400


def make_model(folder: Path) -> None:
    """Two layers of Qwen3's shape, and a tokenizer with a word for each id."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))


class Bench:
    """Starts servers, and sends loads to them."""

    def __init__(self, site: str, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        make_model(self.model)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
            "PYTHONPATH": os.pathsep.join([str(HERE / "server"), site]),
            "CUDA_VISIBLE_DEVICES": "",
            "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
            "HF_HUB_OFFLINE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "UCX_TLS": "tcp,self,sm",
        }

    @contextmanager
    def process(self, name: str, arguments: list[str], **extra: str) -> Iterator[Path]:
        output = self.folder / f"{name}.txt"
        with output.open("w") as out:
            child = subprocess.Popen(
                [sys.executable, *arguments],
                env={**self.environment, **extra},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield output
        finally:
            os.killpg(child.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                child.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    @contextmanager
    def servers(self, servers: Servers) -> Iterator[dict[str, int]]:
        """Ports of all instances, by name; they are ready."""
        roles: list[tuple[str, Role]] = [("aggregated", servers.prefill)]
        if servers.decode is not None:
            roles = [("prefill", servers.prefill), ("decode", servers.decode)]
        ports: dict[str, int] = {}
        with ExitStack() as stack:
            outputs = []
            for role, settings in roles:
                for i in range(servers.num_each):
                    name = f"{role}-{i}"
                    ports[name] = FIRST_PORT[role] + i
                    arguments = self._server(servers, role, settings, ports[name], BOOTSTRAP_PORT + i)
                    decisions = str(self.folder / name)
                    Path(f"{decisions}.jsonl").write_text("")
                    outputs.append(
                        stack.enter_context(self.process(name, arguments, DECISIONS=decisions, OMP_NUM_THREADS="1"))
                    )
            for output in outputs:
                _wait_for("fired up and ready", output)
            yield ports

    @contextmanager
    def router(self, servers: Servers, ports: dict[str, int]) -> Iterator[None]:
        """A router before pairs. An aggregated server has its port."""
        with ExitStack() as stack:
            if not servers.is_aggregated:
                stack.enter_context(self.process("router", self._router(ports)))
                _wait_for_port(ROUTER_PORT)
            _warm_up(ROUTER_PORT, ports)
            yield

    def _server(self, servers: Servers, role: str, settings: Role, port: int, bootstrap_port: int) -> list[str]:
        arguments = ["-m", "sglang.launch_server", "--model-path", str(self.model), "--load-format", "dummy"]
        arguments += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
        arguments += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        arguments += ["--grammar-backend", "none", "--disable-overlap-schedule", "--disable-piecewise-cuda-graph"]
        arguments += ["--mem-fraction-static", "0.1", "--skip-server-warmup", "--random-seed", "1"]
        arguments += ["--page-size", str(servers.page_size), *settings.arguments(role)]
        if role != "aggregated":
            arguments += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "nixl"]
        if role == "prefill":
            arguments += ["--disaggregation-bootstrap-port", str(bootstrap_port)]
        return arguments

    def _router(self, ports: dict[str, int]) -> list[str]:
        arguments = ["-m", "sglang_router.launch_router", "--pd-disaggregation", "--policy", "round_robin"]
        for name, port in ports.items():
            role, i = name.split("-")
            arguments += [f"--{role}", URL.format(port)]
            if role == "prefill":
                arguments.append(str(BOOTSTRAP_PORT + int(i)))
        arguments += ["--host", "127.0.0.1", "--port", str(ROUTER_PORT), "--prometheus-port", str(ROUTER_PORT + 1)]
        return [*arguments, "--log-level", "warn"]

    def run(self, load: Load, ports: dict[str, int]) -> Iterator[str]:
        """Rows of the log: requests, then what each instance did with them."""
        for port in ports.values():
            _post(port, "/flush_cache", {})
        time.sleep(2)
        before = {name: len(self._decisions(name)) for name in ports}
        requests = load.requests(random.Random(7))
        times = _send(ROUTER_PORT, requests)
        time.sleep(2.5)
        for i, request in enumerate(requests):
            sent_s, end_s = times[i]
            yield _row("request", f"r{i}", round(sent_s, 4), round(end_s, 4), request.max_new_tokens)
        for port in ports.values():
            _post(port, "/flush_cache", {})
        time.sleep(1)
        for name in ports:
            for line in self._decisions(name)[before[name] :]:
                yield _row(name, *json.loads(line))

    def _decisions(self, name: str) -> list[str]:
        return (self.folder / f"{name}.jsonl").read_text().splitlines()


def _row(*values: Any) -> str:
    return json.dumps(values, separators=(",", ":"))


def _wait_for(text: str, output: Path) -> None:
    for _ in range(START_SECONDS):
        if text in (written := output.read_text()):
            return
        if "Received sigquit" in written:
            break
        time.sleep(1)
    sys.exit(f"{output}: not ready\n{output.read_text()[-3000:]}")


def _wait_for_port(port: int) -> None:
    for _ in range(60):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)


def _warm_up(port: int, ports: dict[str, int]) -> None:
    """Until every pair has met: a router takes some time to see its servers."""
    num_served = 0
    for i in range(600):
        try:
            _generate(port, f"warm{i}", [5 + i] * 4, 2, [])
        except OSError:
            time.sleep(0.5)
        else:
            num_served += 1
            if num_served == 4 * len(ports):
                return
    raise RuntimeError("the router does not serve")


def _post(port: int, path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    request = urllib.request.Request(URL.format(port) + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return bytes(response.read())


def _generate(port: int, rid: str, prompt: list[int], max_new_tokens: int, stops: list[int]) -> None:
    sampling = {"max_new_tokens": max_new_tokens, "temperature": 0, "stop_token_ids": stops}
    _post(port, "/generate", {"input_ids": prompt, "rid": rid, "sampling_params": sampling})


def _send(port: int, requests: list[Any]) -> list[tuple[float, float]]:
    """When each was sent and answered. All are of one client, in order."""
    times = [(0.0, 0.0)] * len(requests)
    start = time.perf_counter()

    def one(i: int) -> None:
        request, sent_s = requests[i], time.perf_counter() - start
        try:
            _generate(port, f"r{i}", request.prompt, request.max_new_tokens, request.stop_token_ids)
        except OSError as error:
            print(f"r{i}: {error}", file=sys.stderr)
        times[i] = (sent_s, time.perf_counter() - start)

    threads = []
    for i, request in enumerate(requests):
        time.sleep(max(0.0, start + request.at_s - time.perf_counter()))
        threads.append(threading.Thread(target=one, args=(i,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return times


def main() -> None:
    site, names = sys.argv[1], sys.argv[2:] or list(LOADS)
    (HERE / "logs").mkdir(exist_ok=True)
    sys.path[:0] = site.split(os.pathsep)
    by_servers: dict[Servers, list[str]] = {}
    for name in names:
        by_servers.setdefault(LOADS[name].servers, []).append(name)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(site, Path(folder))
        for servers, group in by_servers.items():
            with bench.servers(servers) as ports:
                for name in group:
                    started = time.time()
                    with bench.router(servers, ports):
                        rows = list(bench.run(LOADS[name], ports))
                    with (HERE / "logs" / f"{name}.jsonl.gz").open("wb") as out:
                        out.write(gzip.compress("\n".join(rows).encode(), mtime=0))
                    print(f"{name}: {len(rows)} rows in {time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
