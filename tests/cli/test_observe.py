"""`pdsim observe` against a stub of a server: what is sent, and odd answers. tests/real has a server that computes."""

import csv
import json
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from heapq import heappop, heappush
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.calibration.observe import observation
from pdsim.calibration.observe.probes import (
    Load,
    ObservationBudget,
    Probe,
    loads,
    mean_stages_ms,
    one_round,
    planned,
    play,
    totals,
)
from pdsim.calibration.observe.server_client import ServerError
from pdsim.cli import main
from pdsim.scenario.yaml_file import to_yaml

STEP_S = 0.001
PROMPT_TOKEN_S = 1e-5


class Stub(BaseHTTPRequestHandler):
    """Streams a token each step. Options of the server say what is odd about it."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        answers = {"/v1/models": {"data": [{"id": "org/Qwen3-8B"}]}, **self.server.pages}
        page = answers.get(self.path)
        page = page(self.server) if callable(page) else page
        self.answer(404 if page is None else 200, page or {"error": {"message": "no such page"}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.bodies.append(body)
            server.headers.append(dict(self.headers))
            server.running += 1
            server.most = max(server.most, server.running)
        self.counts = True
        try:
            self.complete(body)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            self.over()

    def over(self):
        """Told before the end is sent: whoever has that may send the next request at once."""
        with self.server.lock:
            self.server.running -= self.counts
        self.counts = False

    def complete(self, body):
        odd = self.server.odd(body)
        if odd is not None:
            self.over()
            self.answer(*odd)
            return
        tokens = len(body["prompt"]) // 4
        usage = {"prompt_tokens": tokens, "completion_tokens": body["max_tokens"]}
        if not body["stream"] or not self.server.streams:
            self.over()
            self.answer(200, {"choices": [{"text": "a"}], "usage": usage})
            return
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        time.sleep(PROMPT_TOKEN_S * tokens)
        with self.server.lock:
            self.server.prompts_s.append(PROMPT_TOKEN_S * tokens)
        for i in range(body["max_tokens"]):
            time.sleep(STEP_S)
            self.event(
                {"choices": [{"text": "a", "finish_reason": None}], "usage": usage | {"completion_tokens": i + 1}}
            )
        self.over()
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, event):
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def answer(self, status, page):
        told = page.encode() if isinstance(page, str) else json.dumps(page).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, *_):
        pass


@contextmanager
def stub(odd=lambda body: None, pages=None, streams=True):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    server.daemon_threads = True
    server.odd, server.pages, server.streams = odd, pages or {}, streams
    server.lock, server.running, server.most, server.bodies, server.headers = threading.Lock(), 0, 0, [], []
    server.prompts_s = []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


SMALL = ("--concurrency", "3", "--requests", "60", "--longest-prompt", "256")
LARGER = ("--concurrency", "4", "--requests", "160", "--longest-prompt", "1024")
"""Enough shapes to fit."""


def observe(server, tmp_path, *flags, small=SMALL):
    """Exit code of a small observation."""
    url = f"http://user:hidden@127.0.0.1:{server.server_port}/v1"
    return run("observe", url, "-o", str(tmp_path / "out"), *small, *flags)


def rows(tmp_path):
    with (tmp_path / "out" / "rows.csv").open() as file:
        return list(csv.DictReader(file))


def test_rows_say_where_they_come_from_and_nothing_secret(tmp_path, capsys):
    info = {
        "/get_server_info": {"version": "0.5.9", "api_key": "hidden", "tp_size": 2, "nested": [{"hf_token": "hidden"}]}
    }
    with stub(pages=info | {"/metrics": 'sglang:num_running_reqs{a="b"} 2.0\n'}) as server:
        assert observe(server, tmp_path, "--gpu", "h200") == 0
    captured = capsys.readouterr()
    assert "2 requests of other clients" in captured.err
    assert "SGLang 0.5.9" in captured.out
    found = rows(tmp_path)
    assert {(row["device"], row["model"], row["engine"]) for row in found} == {("h200", "qwen3-8b", "SGLang 0.5.9")}
    assert Counter(row["kind"] for row in found).keys() == {"round_trip", "ttft", "decode", "stall", "burst"}
    written = "".join(path.read_text() for path in (tmp_path / "out").iterdir())
    assert "hidden" not in written + captured.out
    assert '"tp_size": 2' in written
    prompts = [body["prompt"] for body in server.bodies]
    assert len({prompt[:12] for prompt in prompts}) > len(prompts) - 5, "only the shared prefixes begin alike"


def test_it_keeps_to_its_budget(tmp_path):
    with stub(pages={"/metrics": vllm_metrics}) as server:
        assert observe(server, tmp_path) == 0
    assert len(server.bodies) <= 60
    assert server.most <= 3, "streams that were ended are over before the next probe"
    arms = json.loads((tmp_path / "out" / "load.json").read_text())["arms"]
    assert [arm["name"] for arm in arms] == ["c1", "c3"]


@given(st.builds(ObservationBudget, st.just(1.0), st.integers(20, 300), st.integers(1, 40), st.integers(64, 20_000)))
def test_no_plan_exceeds_its_budget(budget):
    probes = list(planned(budget))
    sent = sum(probe.num_requests for probe in probes) + sum(len(load.lengths) for load in loads(budget))
    assert 0 < sent <= budget.num_requests
    for probe in one_round(budget):
        assert probe.prompt_tokens <= budget.longest_prompt
        assert probe.num_requests <= budget.concurrency or probe.kind == "prefix"


def test_no_single_prompt_has_a_multiple_of_64_tokens():
    lengths = [
        probe.prompt_tokens for probe in one_round(ObservationBudget(longest_prompt=2**25)) if probe.kind == "ttft"
    ]
    assert 311_743 in lengths, "one less than 64 x 4871"
    assert [tokens for tokens in lengths if tokens % 64 == 0] == []


class OneOfThree:
    """A server that refuses the third connection. Two requests wait for it."""

    url = "http://127.0.0.1:1"

    def text(self, num_tokens):
        self.number = getattr(self, "number", 0) + 1
        return str(self.number)

    def complete(self, prompt, max_tokens, *, ready, on_event=None):
        if prompt == "3":
            raise ServerError("the connection was refused", 429, 7.0)
        ready()


def test_requests_at_once_fail_with_the_cause():
    with pytest.raises(ServerError, match="the connection was refused") as failed:
        list(observation.observe(OneOfThree(), Probe("burst", 3, 64, 2, "")))
    assert (failed.value.is_busy, failed.value.retry_after_s) == (True, 7.0)


class Broken(OneOfThree):
    """A server whose third answer the client cannot read."""

    def complete(self, prompt, max_tokens, *, ready, on_event=None):
        if prompt == "3":
            raise ValueError("no number")
        ready()


def test_requests_at_once_do_not_wait_for_one_with_another_error():
    with pytest.raises(ValueError, match="no number"):
        list(observation.observe(Broken(), Probe("burst", 3, 64, 2, "")))


class Silent:
    """A server that is asked for its metrics only."""

    def metrics(self):
        return "vllm:request_prefill_time_seconds_sum 1.0\nvllm:request_prefill_time_seconds_count 1.0\n"


def test_a_load_for_which_no_time_is_left_has_no_request():
    played = play(Silent(), Load("c2", 2, ((64, 16),)), end_s=0.0)
    assert played == {"name": "c2", "concurrency": 2, "stages": {}, "requests": []}


def test_time_may_be_up_between_two_loads(tmp_path, capsys, monkeypatch):
    """Reading the server's metrics takes what was left."""

    def late(server, load, end_s):
        return play(server, load, end_s if load.name == "c1" else 0.0)

    monkeypatch.setattr(observation, "play", late)
    with stub(pages={"/metrics": vllm_metrics}) as server:
        assert observe(server, tmp_path) == 0
    assert "time is up before load c3" in capsys.readouterr().err
    assert [arm["name"] for arm in json.loads((tmp_path / "out" / "load.json").read_text())["arms"]] == ["c1"]


def test_a_dry_run_sends_nothing(tmp_path, capsys):
    with stub() as server:
        assert observe(server, tmp_path, "--dry-run") == 0
    assert server.bodies == []
    assert "nothing was sent" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def too_long(body):
    return (400, {"error": {"message": "the prompt is too long"}}) if len(body["prompt"]) > 4 * 150 else None


def no_extras(body):
    return (400, {"error": {"message": "Unrecognized request argument"}}) if "ignore_eos" in body else None


def test_what_a_server_refuses_is_left_out(tmp_path, capsys):
    with stub(odd=no_extras) as server:
        assert observe(server, tmp_path) == 0
    assert "leave out ignore_eos, which" in capsys.readouterr().err
    assert len(rows(tmp_path)) > 20
    assert "stream_options" in server.bodies[-1]


def test_only_what_a_server_refuses_is_left_out(tmp_path, capsys):
    refusal = (422, {"error": "extra fields not permitted"})
    with stub(odd=lambda body: refusal if "stream_options" in body else None) as server:
        assert observe(server, tmp_path) == 0
    assert "leave out stream_options, which the server refuses" in capsys.readouterr().err
    assert server.bodies[-1]["ignore_eos"] is True


def test_prompts_that_are_too_long_end_the_lengths(tmp_path, capsys):
    with stub(odd=lambda body: too_long(body) if body["stream"] else None) as server:
        assert observe(server, tmp_path) == 0
    assert "too long" in capsys.readouterr().err
    assert max(int(row["new_tokens"]) for row in rows(tmp_path) if row["kind"] == "ttft") <= 150


def test_a_busy_server_is_left_in_peace(tmp_path, capsys):
    seen = []

    def busy(body):
        seen.append(body)
        return (429, {"error": "later"}) if len(seen) > 12 else None

    with stub(odd=busy) as server:
        assert observe(server, tmp_path) == 0
    assert "ended early" in capsys.readouterr().err
    assert len(rows(tmp_path)) >= 10
    assert len(server.bodies) < 30


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"streams": False}, "streams no tokens"),
        ({"odd": lambda _: (500, "oh")}, "500 Internal Server Error: oh"),
        ({"odd": lambda _: (200, {"choices": []})}, "reports no usage.prompt_tokens"),
        ({"pages": {"/v1/models": {"data": []}}}, "name one with --model"),
        ({"pages": {"/v1/models": "<html>"}}, "not JSON"),
    ],
)
def test_servers_that_cannot_be_observed(tmp_path, capsys, options, said):
    with stub(**options) as server:
        assert observe(server, tmp_path) == 2
    assert said in capsys.readouterr().err


def test_no_server(tmp_path, capsys):
    with suppress(SystemExit):
        main(["observe", "127.0.0.1:1", "-o", str(tmp_path)])
    assert "refused" in capsys.readouterr().err


def test_interrupted_it_keeps_what_it_has(tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(observation, "play", interrupted)
    with stub() as server:
        assert observe(server, tmp_path) == 130
    assert "interrupted" in capsys.readouterr().err
    assert len(rows(tmp_path)) > 20


def sglang_metrics(server):
    name, labels = "sglang:per_stage_req_latency_seconds", '{stage="prefill_forward",tp_rank="0"}'
    told = f"{name}_sum{labels} {sum(server.prompts_s)}\n{name}_count{labels} {len(server.prompts_s)}\n"
    return f'{told}sglang:num_running_reqs{{engine_type="unified"}} {server.running}\n'


def vllm_metrics(server):
    total, count = sum(server.prompts_s), len(server.prompts_s)
    name = "vllm:request_prefill_time_seconds"
    told = f'{name}_sum{{engine="0"}} {total}\n{name}_count{{engine="0"}} {count}\n'
    return f"{told}vllm:num_requests_running {server.running}\n"


SERVER = {
    "model": "qwen3-8b",
    "aggregated": {"gpu": "h200"},
    "workload": {"use": "random_lengths", "num_requests": 1, "input_tokens": 1, "output_tokens": 1},
}


def loads_with_stages(folder):
    """Runs of a load, whose stages must be those of the stub's metrics."""
    arms = json.loads((folder / "load.json").read_text())["arms"]
    for arm in arms:
        sent_ms = [PROMPT_TOKEN_S * 1e3 * one["prompt_tokens"] for one in arm["requests"]]
        assert arm["stages"] == {"mean_prefill_forward_ms": pytest.approx(sum(sent_ms) / len(sent_ms))}
    return arms


def test_its_load_has_the_stages_of_vllms_metrics(tmp_path):
    with stub(pages={"/metrics": vllm_metrics}) as server:
        assert observe(server, tmp_path) == 0
    assert [arm["name"] for arm in loads_with_stages(tmp_path / "out")] == ["c1", "c3"]


def give_times_of_an_idle_machine(folder):
    """Replaces the measured times of an observation, which other work on the machine prolongs, by those of the stub."""
    lines = rows(folder.parent)
    for row in lines:
        ttft_s = PROMPT_TOKEN_S * (int(row["new_tokens"] or 0) // int(row["prompts"] or 1)) + STEP_S
        row["time_us"] = 1e6 * {"decode": STEP_S, "ttft": ttft_s, "burst": ttft_s}.get(row["kind"], 1e-6)
    with (folder / "rows.csv").open("w") as file:
        table = csv.DictWriter(file, lines[0].keys())
        table.writeheader()
        table.writerows(lines)
    load = json.loads((folder / "load.json").read_text())
    for arm in load["arms"]:
        free_s = [0.0] * arm["concurrency"]
        for one in arm["requests"]:
            one["sent_s"] = heappop(free_s)
            first_s = one["sent_s"] + PROMPT_TOKEN_S * one["prompt_tokens"]
            one["event_s"] = [first_s + STEP_S * (i + 1) for i in range(one["output_tokens"])]
            heappush(free_s, one["event_s"][-1])
    (folder / "load.json").write_text(json.dumps(load))


def test_its_load_is_validated_stage_by_stage(tmp_path, capsys):
    (tmp_path / "server.yaml").write_text(to_yaml(SERVER))
    with stub(pages={"/metrics": sglang_metrics}) as server:
        assert observe(server, tmp_path, small=LARGER) == 0
    profile, folder = str(tmp_path / "profile.yaml"), tmp_path / "out"
    measured = loads_with_stages(folder)
    give_times_of_an_idle_machine(folder)
    assert run("calibrate", f"{folder}/rows.csv", "-o", profile) == 0
    assert "a client cannot measure" in capsys.readouterr().err
    words = ("validate", str(tmp_path / "server.yaml"), "--observed", str(folder), "--profile", profile)
    assert run(*words, "--json") == 0
    arms = json.loads(capsys.readouterr().out)
    assert [arm["arm"] for arm in arms] == ["c2", "c4"]
    for arm, played in zip(arms, measured, strict=True):
        stage = arm["metrics"]["mean_prefill_forward_ms"]
        assert stage["measured"] == played["stages"]["mean_prefill_forward_ms"]
        for name in ("output_throughput", "mean_tpot_ms", "mean_itl_ms"):  # the stub decodes beside prefill
            assert abs(arm["metrics"][name]["error"]) < 0.25, name
    assert run(*words) == 0
    assert "where the time goes" in capsys.readouterr().out


def test_stages_that_others_shared_are_left_out():
    before = totals("vllm:request_queue_time_seconds_sum 1.0\nvllm:request_queue_time_seconds_count 2\n")
    name = "vllm:request_queue_time_seconds"
    engines = [f'{name}_sum{{engine="{i}"}} 2.0\n{name}_count{{engine="{i}"}} 3\n' for i in (0, 1)]
    one, both = totals(engines[0]), totals("".join(engines))
    assert mean_stages_ms(before, one, 1) == {"mean_prefill_waiting_ms": 1000.0}
    assert mean_stages_ms(before, both, 4) == {"mean_prefill_waiting_ms": 750.0}
    assert mean_stages_ms(before, both, 3) == {}


@pytest.mark.parametrize("flag", ["--minutes", "--requests", "--concurrency", "--longest-prompt", "--tp"])
def test_budgets_of_nothing_are_refused(capsys, flag):
    assert run("observe", "127.0.0.1:1", "--dry-run", flag, "0") == 2
    assert f"for {flag}. Must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (None, "pdsim observe writes it"),
        ("[", "load.json is no load"),
        ({"arms": []}, "ended before its load"),
        ({"arms": 3}, "is no load"),
        ({"arms": [{"name": "c1", "requests": []}]}, "lacks 'concurrency'"),
        ({"arms": [{"name": "c1", "concurrency": 0, "requests": []}]}, "arms[0].concurrency: expected a whole number"),
        ({"arms": [{"name": "c1", "concurrency": 1, "requests": []}]}, "arms[0].requests: number: expected"),
        (
            {
                "arms": [
                    {
                        "name": "c1",
                        "concurrency": 1,
                        "requests": [{"prompt_tokens": 1, "output_tokens": 1, "sent_s": 1, "event_s": [0]}],
                    }
                ]
            },
            "arms[0].requests[0].event_s: expected times in s from sent_s on, found [0]",
        ),
    ],
)
def test_loads_that_cannot_be_read(tmp_path, capsys, load, said):
    (tmp_path / "server.yaml").write_text(to_yaml(SERVER))
    if load is not None:
        (tmp_path / "load.json").write_text(load if isinstance(load, str) else json.dumps(load))
    assert run("validate", str(tmp_path / "server.yaml"), "--observed", str(tmp_path)) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def run(*words):
    try:
        main(list(words))
    except SystemExit as ended:
        return ended.code or 0
    return 0
