"""Hostile calls: commands over damaged files, odd values and odd flags end with 0, 1 or 2, and never with a traceback.

`pytest -m nightly tests/nightly`; HOSTILE_CALLS: examples of each law; HOSTILE_LIMIT_S: how long a call may take.
"""

import io
import json
import os
import signal
import warnings
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdsim.cli import main
from tests.cli.test_bad_input import GOOD

pytestmark = pytest.mark.nightly
NUM_CALLS = int(os.environ.get("HOSTILE_CALLS", "300"))
LIMIT_S = int(os.environ.get("HOSTILE_LIMIT_S", "60"))
many = settings(
    max_examples=NUM_CALLS,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@contextmanager
def time_limit():
    """Raises TimeoutError in what takes longer than LIMIT_S."""

    def stop(*_):
        raise TimeoutError(f"no end within {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def call(*words):
    """Exit code of a command in this process. What it raises is a traceback of its user."""
    said = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(said), warnings.catch_warnings(), time_limit():
        warnings.simplefilter("ignore")
        try:
            main(list(map(str, words)))
        except SystemExit as ended:
            code = ended.code or 0
        else:
            code = 0
    assert code in (0, 1, 2), (words, code)
    assert "Traceback" not in said.getvalue()
    assert code == 0 or said.getvalue().strip(), f"{words}: exit code {code} without a word"
    assert len(said.getvalue()) < 10_000, f"{words}: a message of {len(said.getvalue())} characters"
    return code


ODD = st.sampled_from(
    [
        "null",
        "true",
        "[]",
        "{}",
        "''",
        "-1",
        "0",
        "0.5",
        "1e300",
        "-1e300",
        ".inf",
        ".nan",
        "1e999",
        "'1e999'",
        "99999999999999999999",
        "1" * 400,
        "1" * 5000,
        "0x" + "f" * 5000,
        "x",
        "'\\ud800'",
        "[1, 2]",
        "{use: x}",
        "{use: normal, mean: 1, stddev: 1e300}",
        "1e300 h",
        "1e-300 GB/s",
        "1 B",
        "5 ms",
        "1e-9 ns",
        "{a: {b: {c: 1}}}",
        "[" * 500,
        "2020-13-45",
        "/dev/zero",
        "/",
        ".",
        "..",
        "!!python/object:os.system x",
        "&a [*a]",
        "~",
        "1_0",
        "2026-01-01",
    ]
)
FIELDS = st.sampled_from(
    [
        "model",
        "page_size",
        "seed",
        "name",
        "engine",
        "priorities",
        "faults",
        "health",
        "router",
        "client",
        "elastic",
        "prefill",
        "prefill.tp",
        "prefill.pp",
        "prefill.dp",
        "prefill.gpu",
        "prefill.instances",
        "prefill.pool_tokens",
        "prefill.chunked_prefill_tokens",
        "prefill.mem_fraction",
        "prefill.layer_groups",
        "decode",
        "decode.tp",
        "decode.pool_tokens",
        "decode.max_running_requests",
        "decode.admission",
        "decode.admission.reserved_tokens",
        "decode.radix_cache",
        "decode.speculative_draft_tokens",
        "decode.speculative_accept_length",
        "decode.host_cache",
        "network.bandwidth",
        "network.message_latency",
        "network.transport",
        "network.staging",
        "network.gpus_per_nic",
        "network.handover",
        "cost",
        "cost.host.slowdown",
        "cost.graph_sizes",
        "cost.prefill",
        "cost.decode",
        "cost.profile",
        "workload",
        "workload.num_requests",
        "workload.input_tokens",
        "workload.output_tokens",
        "workload.path",
        "client.arrivals",
        "client.arrivals.rate",
        "client.concurrency",
        "front_end",
        "weight_dtype",
        "kv_dtype",
        "context_tokens",
        "aggregated",
        "aggregated.gpu",
        "storage",
        "health.heartbeat_interval",
        "retries",
        "bootstrap_timeout",
    ]
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a scenario, a run and a trace."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "s.yaml").write_text(GOOD)
    assert call("run", folder / "s.yaml", "--out", folder / "run", "--no-ranges") == 0
    rows = [{"timestamp": 9 * i, "input_length": 600, "output_length": 3, "hash_ids": [i, i + 100]} for i in range(4)]
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@many
@given(changes=st.lists(st.tuples(FIELDS, ODD), min_size=1, max_size=2))
def test_odd_values_of_fields(place, changes):
    words = [word for field, value in changes for word in ("--set", f"{field}={value}")]
    call("run", place / "s.yaml", "--no-ranges", *words)


def damaged(data: bytes, kind: str, at: float, piece: bytes) -> bytes:
    place = int(at * len(data))
    if kind == "cut":
        return data[:place]
    if kind == "insert":
        return data[:place] + piece + data[place:]
    if kind == "replace":
        return data[:place] + piece + data[place + len(piece) :]
    lines = data.splitlines(keepends=True)
    del lines[int(at * len(lines)) : int(at * len(lines)) + 1]
    return b"".join(lines)


PIECES = st.one_of(
    st.binary(max_size=8),
    st.sampled_from(
        [
            b"[" * 20_000,
            b"1" * 5000,
            b"Infinity",
            b"NaN",
            b"1e999",
            b"null",
            b"true",
            b"-1",
            b'"x"',
            b"{}",
            b"[]",
            b"\xff\xfe",
            b"\0",
            b",",
            b"0.5",
        ]
    ),
)
DAMAGE = st.tuples(st.sampled_from(["cut", "insert", "replace", "line"]), st.floats(0, 1), PIECES)
FILES = ["summary.json", "requests.parquet", "steps.parquet", "levels.parquet", "journal.jsonl.zst", "scenario.yaml"]


@many
@given(
    name=st.sampled_from(FILES),
    damage=DAMAGE,
    words=st.sampled_from(
        [("explain",), ("explain", "--tail", "ttft"), ("compare",), ("report", "-o", "r.html"), ("replay",)]
    ),
)
def test_damaged_run_folders(place, name, damage, words):
    with TemporaryDirectory() as folder:
        run = copytree(place / "run", Path(folder) / "run")
        (run / name).write_bytes(damaged((run / name).read_bytes(), *damage))
        command, *flags = [str(Path(folder) / word) if word == "r.html" else word for word in words]
        call(command, run, *((place / "run",) if command == "compare" else ()), *flags)


@pytest.fixture(scope="module")
def fields_of_summary(place):
    summary = json.loads((place / "run" / "summary.json").read_text())
    return [(name,) for name in summary] + [("pdsim", name) for name in summary["pdsim"]]


MISSING = object()
ANYTHING = st.sampled_from(
    [MISSING, None, True, -1, 0, 10**30, 1e300, "x", [], {}, [[1]], {"a": 1}, ["x"], [5], {"mean_ttft_ms": "x"}]
)


@many
@given(data=st.data(), value=ANYTHING, command=st.sampled_from(["explain", "compare", "report", "replay"]))
def test_foreign_fields_of_a_summary(place, fields_of_summary, data, value, command):
    path = data.draw(st.sampled_from(fields_of_summary))
    with TemporaryDirectory() as folder:
        run = copytree(place / "run", Path(folder) / "run")
        summary = json.loads((run / "summary.json").read_text())
        section = summary if len(path) == 1 else summary["pdsim"]
        section[path[-1]] = value
        if value is MISSING:
            del section[path[-1]]
        (run / "summary.json").write_text(json.dumps(summary))
        more = {"compare": (place / "run",), "report": ("-o", Path(folder) / "r.html")}.get(command, ())
        call(command, run, *more)


@many
@given(
    damage=DAMAGE, kind=st.sampled_from(["mooncake_trace", "request_table", "bailian_trace", "azure_trace", "sharegpt"])
)
def test_damaged_traces(place, damage, kind):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_bytes(damaged((place / "trace.jsonl").read_bytes(), *damage))
        call("run", place / "s.yaml", "--no-ranges", "--set", f"workload={{use: {kind}, path: {path}}}")


SWEEP = "scenario: s.yaml\nslos: {chat: ttft < 2 s for 99 %}\ngrid: {page_size: [4, 8], prefill.instances: [1, 2]}\n"
MATRIX = "scenario: s.yaml\nruns: real\nvariants: {one: {}, two: {page_size: 8}}\n"
SMALL = ("--max-gpus", "2", "--slo", "ttft p99 < 5 s", "--gpu", "h100=2.5")
READERS = [
    ("run", "--no-ranges"),
    ("sweep",),
    ("plan", *SMALL),
    ("launch", "--engine", "sglang"),
    ("launch", "--engine", "vllm", "--kubernetes"),
    ("validate",),
    ("compare",),
    ("calibrate",),
    ("observe",),
    ("ask", "pd-or-not"),
    ("report",),
]


@many
@given(text=st.sampled_from([GOOD, SWEEP, MATRIX]), damage=DAMAGE, words=st.sampled_from(READERS))
def test_damaged_yaml_files(text, damage, words):
    with TemporaryDirectory() as folder:
        (Path(folder) / "s.yaml").write_text(GOOD)
        path = Path(folder) / "hostile.yaml"
        path.write_bytes(damaged(text.encode(), *damage))
        before = {child.name for child in Path(folder).iterdir()}
        with chdir(folder):
            call(*words, path)
        assert before <= {child.name for child in Path(folder).iterdir()}


FLAGS = st.sampled_from(
    [
        "--slo",
        "--gpu",
        "--max-gpus",
        "--set",
        "--seed",
        "--rate",
        "--isl",
        "--osl",
        "--concurrency",
        "--requests",
        "--model",
        "--out",
        "--try",
        "--workers",
        "--tail",
        "--request",
        "--engine",
        "--json",
        "--details",
        "--profile",
    ]
)
ODD_WORDS = st.sampled_from(
    [
        "",
        "-1",
        "0",
        "1e9",
        "1e999",
        "nan",
        "x",
        "h100",
        "h100=",
        "h100=-1",
        "=",
        "page_size=",
        "a.b.c=1",
        "/",
        "/dev/null",
        "ttft < 1",
        "ttft p99 < -1 s",
        "p200 < 1 s",
        "3/s",
        "-3/s",
        "1e400/s",
        "prefill.tp=[1",
        "\\udc80",
        "--",
        "9" * 400,
    ]
)


@many
@given(command=st.sampled_from(READERS), flags=st.lists(st.tuples(FLAGS, ODD_WORDS), min_size=1, max_size=2))
def test_odd_flags(place, command, flags):
    with TemporaryDirectory() as folder, chdir(folder):
        call(command[0], place / "s.yaml", *(word for pair in flags for word in pair))
