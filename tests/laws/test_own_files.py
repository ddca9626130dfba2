"""No command changes a file outside its own output, whatever names, links and paths its input has."""

import json
import os
from contextlib import chdir, redirect_stderr
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdsim.cli import main, matrix
from pdsim.metrics.run_folder import RUN_FILES, SUMMARY

SCENARIO = """
name: {name}
model: llama-3.1-8b
prefill: {{gpu: h100}}
decode: {{gpu: h100}}
workload: {{use: random_lengths, num_requests: 2, input_tokens: 64, output_tokens: 2}}
client: {{use: closed_loop, concurrency: 1}}
"""
NAMES = st.sampled_from(["alice", ".", "..", "a.part", ".hidden", "a b", "$(touch x)", "logs", "summary.json"])
FOLDERS = st.sampled_from(["runs", ".", "..", "../home", "link", "link/inside", "ABSOLUTE", "runs/../..", "home"])
PRECIOUS = st.sets(st.sampled_from(["thesis.txt", SUMMARY, "requests.parquet", "catalog/notes.txt", "logs/app.log"]))


def exit_code(*words) -> int:
    try:
        main([str(word) for word in words])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def contents(root: Path) -> dict[str, bytes | str]:
    """Bytes of files and targets of links, by path."""
    paths = [Path(place) / name for place, folders, files in os.walk(root) for name in (*folders, *files)]
    return {
        str(path.relative_to(root)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in paths
        if path.is_symlink() or path.is_file()
    }


def fill(folder: Path, names) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("precious")


class FakeRun:
    """pdreal as far as files go: it writes a summary into --out."""

    returncode, pid = 0, 0

    def __init__(self, command, **_):
        self._out = Path(command[command.index("--out") + 1])

    def communicate(self, timeout):
        summary = {"completed": 1, "request_throughput": 1.0, "mean_ttft_ms": 1.0, "mean_tpot_ms": 1.0}
        (self._out / SUMMARY).write_text(json.dumps(summary))
        return json.dumps(summary), None

    def poll(self):
        return 0


@given(runs=FOLDERS, variant=NAMES, theirs=PRECIOUS, beside=PRECIOUS)
@example(runs="../home", variant="alice", theirs={"thesis.txt"}, beside=set())
@example(runs="runs", variant="alice", theirs={"thesis.txt"}, beside=set())
@example(runs=".", variant="..", theirs={"thesis.txt"}, beside=set())
@example(runs="link", variant="alice", theirs={"thesis.txt"}, beside=set())
def test_validate_replaces_nothing_but_run_folders(runs, variant, theirs, beside):
    with TemporaryDirectory() as name:
        root = Path(name)
        folder, home = root / "matrix", root / "home"
        folder.mkdir()
        (folder / "link").symlink_to(home)
        for victim in (home / "alice", folder / "runs" / "alice", folder / "home" / "alice"):
            fill(victim, theirs - {SUMMARY})
        fill(home, beside)
        fill(folder / ".alice.part", beside - {SUMMARY})
        (folder / "s.yaml").write_text(SCENARIO.format(name="s"))
        real = {"scenario": "s.yaml", "runs": str(home) if runs == "ABSOLUTE" else runs, "variants": {variant: []}}
        (folder / "matrix.yaml").write_text(json.dumps(real))
        before = contents(root)
        with mock.patch.object(matrix.subprocess, "Popen", FakeRun):
            exit_code("validate", folder, "--real-only")
        after = contents(root)
        changed = {path for path in before if after.get(path) != before[path]}
        assert all(Path(path).name in RUN_FILES for path in changed), changed
        made = {path for path in after if path not in before}
        assert all(path.startswith("matrix/") for path in made), made


@given(name=NAMES, force=st.booleans(), link=st.sampled_from([None, "summary.json", "journal.jsonl.zst", "catalog"]))
@settings(max_examples=18)
@example(name="..", force=True, link=None)
@example(name="s", force=True, link="summary.json")
def test_runs_and_comparisons_stay_in_their_folder(name, force, link):
    with TemporaryDirectory() as temporary:
        root = Path(temporary)
        fill(root, ["thesis.txt", "summary.json", "journal.jsonl.zst", "home/models/x.yaml"])
        (root / "s.yaml").write_text(SCENARIO.format(name=json.dumps(name)))
        (root / "out" / "s").mkdir(parents=True)
        if link is not None:
            target = root / ("home" if link == "catalog" else link)
            (root / "out" / link).symlink_to(target)
            (root / "out" / "s" / link).symlink_to(target)
        before = contents(root)
        flags = ["--force"] if force else []
        exit_code("run", root / "s.yaml", "--no-ranges", "--json", "--out", root / "out", *flags)
        exit_code("compare", root / "s.yaml", "--json", "--out", root / "out", *flags)
        after = contents(root)
        assert {path: after.get(path) for path in before} == before
        assert all(path.startswith("out/") for path in after.keys() - before.keys())


INTO_FOLDERS = [
    ("run", "s.yaml", "--no-ranges"),
    ("run", "s.yaml", "--no-ranges", "--force"),
    ("compare", "s.yaml"),
    ("compare", "s.yaml", "--force"),
    ("launch", "s.yaml"),
    ("launch", "s.yaml", "--engine", "kubernetes"),
    ("sweep", "sweep.yaml", "--engine", "here"),
    ("plan", "s.yaml", "--max-gpus", "2", "--seeds", "1", "--jobs", "1"),
    ("ask", "routing", "s.yaml", "--seeds", "1", "--jobs", "1"),
    ("observe", "http://127.0.0.1:9"),
]
THEIRS = [
    "thesis.txt",
    "scenario.yaml",
    SUMMARY,
    "plan.json",
    "log.jsonl",
    "sweep.json",
    "load.sh",
    "data/points/x.json",
]


@pytest.mark.parametrize("words", INTO_FOLDERS, ids=" ".join)
@given(
    theirs=st.sets(st.sampled_from([*THEIRS, "requests.parquet", "rows.csv", ".hidden", "logs/app.log"]), min_size=1)
)
@example(theirs={"scenario.yaml"})
@settings(max_examples=4)
def test_no_command_writes_into_a_folder_of_another(words, theirs):
    with TemporaryDirectory() as temporary, chdir(temporary):
        Path("s.yaml").write_text(SCENARIO.format(name="s"))
        Path("sweep.yaml").write_text("scenario: s.yaml\ngrid: {client.concurrency: [1]}\n")
        fill(Path("out"), theirs)
        before = contents(Path())
        said = StringIO()
        with redirect_stderr(said):
            assert exit_code(*words, "--json", "--out", "out") == 2
        assert "out: has " in said.getvalue()
        assert "name a new folder, or an empty one" in said.getvalue()
        assert contents(Path()) == before


@pytest.mark.parametrize("words", INTO_FOLDERS[:-1], ids=" ".join)
def test_commands_write_into_a_folder_of_their_own_again(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(SCENARIO.format(name="s"))
    Path("sweep.yaml").write_text("scenario: s.yaml\ngrid: {client.concurrency: [1]}\n")
    Path("out").mkdir()
    asks_for_force = words[0] in ("run", "compare") and "--force" not in words
    plans = {"plan": (0, 1)}.get(words[0], (0,))
    assert exit_code(*words, "--json", "--out", "out") in plans
    Path("out", "mine.txt").write_text("mine, in a folder of pdsim")
    assert exit_code(*words, "--json", "--out", "out") in ((2,) if asks_for_force else plans)
    assert Path("out", "mine.txt").read_text() == "mine, in a folder of pdsim"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("report", "s.yaml", "-o", "s.yaml"), "s.yaml: is read by this command"),
        (("report", "s.yaml", "-o", "link"), "link: is read by this command"),
        (("report", "s.yaml", "-o", "thesis.txt"), "thesis.txt: is there and does not begin with '<!doctype html'"),
        (("export", "s.yaml", "--to", "vllm", "-o", "thesis.txt"), "thesis.txt: is there and does not begin with '{'"),
        (("export", "s.yaml", "--to", "perfetto", "-o", "thesis.txt"), "thesis.txt: is there and does not begin with"),
        (("calibrate", "s.yaml", "-o", "thesis.txt"), "thesis.txt: is there and does not begin with 'name:'"),
        (("scale", "s.yaml", "--from", "h100", "--to", "h200", "-o", "thesis.txt"), "does not begin with 'name:'"),
        (("report", "run", "-o", "run/summary.json"), "summary.json: is a file of a run"),
        (("export", "s.yaml", "--to", "vllm", "-o", "s.yaml"), "s.yaml: is read by this command"),
        (("export", "run", "--to", "vllm", "-o", "run/requests.parquet"), "requests.parquet: is a file of a run"),
        (("calibrate", "thesis.txt", "-o", "thesis.txt"), "thesis.txt: is read by this command"),
        (("scale", "thesis.txt", "--from", "h100", "--to", "h200", "-o", "thesis.txt"), "is read by this command"),
    ],
)
def test_no_file_that_is_read_or_of_another_kind_is_replaced(tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(SCENARIO.format(name="s"))
    Path("link").symlink_to("s.yaml")
    Path("thesis.txt").write_text("precious")
    fill(Path("run"), [SUMMARY, "requests.parquet"])
    before = contents(tmp_path)
    assert exit_code(*words) == 2
    assert says in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_a_report_replaces_an_earlier_one(tmp_path):
    (tmp_path / "s.yaml").write_text(SCENARIO.format(name="s"))
    for _ in range(2):
        assert exit_code("report", tmp_path / "s.yaml", "-o", tmp_path / "r.html") == 0
