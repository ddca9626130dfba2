"""Damaged traces, run folders and journals: one message that names the place, exit code 2, never a wrong answer."""

import gzip
import json
from shutil import copytree

import pyarrow as pa
import pytest
from pyarrow import parquet

from pdsim.cli import main
from pdsim.metrics import journal_file
from pdsim.metrics.journal_file import read_journal
from pdsim.metrics.run_folder import JOURNAL
from tests.cli.test_bad_input import GOOD

SOON = {"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]}


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(GOOD)
    return path


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    (folder / "s.yaml").write_text(GOOD)
    with pytest.raises(SystemExit) as ended:
        main(["run", str(folder / "s.yaml"), "--out", str(folder / "run"), "--no-ranges", "--json"])
    assert not ended.value.code
    return folder / "run"


def refusal(capsys, *words):
    """The message of a command that refuses its input."""
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, words)))
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert len(said) < 2000
    return said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[" * 100_000, "line 2: JSON is nested too deeply"),
        ('{"timestamp": %s}' % ("1" * 5000), "line 2: a number of more than 4300 digits"),
        ('{"timestamp": 0, "input_length": Infinity}', "line 2: Infinity is no finite number"),
        ('{"timestamp": 0, "input_length": 1e999}', "line 2: input_length is inf, expected a whole number of tokens"),
        (json.dumps({**SOON, "input_length": 3.7}), "line 2: input_length is 3.7, expected a whole number of tokens"),
        (json.dumps({**SOON, "input_length": True}), "line 2: input_length is True, expected a whole number of tokens"),
        (json.dumps({**SOON, "hash_ids": [True]}), "line 2: hash_ids is [True], expected whole numbers"),
        (
            json.dumps({**SOON, "input_length": 1500, "hash_ids": [1, 1, 1]}),
            "line 2: hash_ids is [1, 1, 1], expected no id twice",
        ),
        (json.dumps({**SOON, "timestamp": 1e300}), "line 2: timestamp is 1e+300, expected at most 4000000000 s"),
    ],
)
def test_a_line_of_a_trace(capsys, scenario, tmp_path, line, said):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(SOON)}\n{line}\n")
    change = f"workload={{use: mooncake_trace, path: {path}}}"
    assert f"{path}, {said}" in refusal(capsys, "run", scenario, "--set", change)


def test_a_message_that_quotes_a_damaged_file_is_at_most_a_page(capsys, scenario, tmp_path):
    path = tmp_path / "trace.jsonl"
    line = {"[" * 20_000: 1, **SOON}
    del line["output_length"]
    path.write_text(json.dumps(line) + "\n")
    said = refusal(capsys, "run", scenario, "--set", f"workload={{use: mooncake_trace, path: {path}}}")
    assert "line 1: no field" in said
    assert "characters]" in said


def test_a_trace_whose_compressed_bytes_are_damaged(capsys, scenario, tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    data = bytearray(gzip.compress((json.dumps(SOON) + "\n").encode() * 1000))
    data[12:20] = b"\xff" * 8
    path.write_bytes(data)
    change = f"workload={{use: mooncake_trace, path: {path}}}"
    assert f"{path}: cannot be read as text" in refusal(capsys, "run", scenario, "--set", change)


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.5,9,3\n2023-11-16 18:17:01.5,9,3\n"


@pytest.mark.filterwarnings("ignore:.*not in order of time")
def test_azures_trace_begins_with_its_least_time(scenario, tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    with pytest.raises(SystemExit) as ended:
        main(
            ["run", str(scenario), "--set", f"workload={{use: azure_trace, path: {path}}}", "--set", "client=open_loop"]
        )
    assert not ended.value.code


def test_azures_fraction_is_of_digits(capsys, scenario, tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE.replace("03.5", "03.-5"))
    change = f"workload={{use: azure_trace, path: {path}}}"
    assert "line 2: TIMESTAMP is '2023-11-16 18:17:03.-5'" in refusal(capsys, "run", scenario, "--set", change)


TABLES = [
    ("requests", "arrival_ns", ["a"] * 3, "column arrival_ns is of type string, expected int"),
    ("requests", "arrival_ns", [None, 1, 2], "column arrival_ns is null in 1 rows, expected int"),
    ("requests", "first_token_ns", ["x"] * 3, "column first_token_ns is of type string, expected int or null"),
    ("requests", "outcome", ["lost"] * 3, "column outcome has 'lost', expected failed or finished or unfinished"),
    ("steps", "kind", ["bogus"], "column kind has 'bogus', expected decode or encode or prefill"),
]


@pytest.mark.parametrize(("table", "column", "values", "said"), TABLES)
@pytest.mark.parametrize("words", [("explain",), ("report",), ("compare",)])
def test_a_column_of_a_foreign_type(capsys, whole_run, tmp_path, words, table, column, values, said):
    folder = copytree(whole_run, tmp_path / "run")
    path = folder / f"{table}.parquet"
    stored = parquet.read_table(path)
    values = pa.array((values * len(stored))[: len(stored)])
    parquet.write_table(stored.set_column(stored.column_names.index(column), column, values), path)
    more = (whole_run,) if words == ("compare",) else ("-o", tmp_path / "r.html") if words == ("report",) else ()
    assert f"{path}: {said}" in refusal(capsys, *words, folder, *more)


@pytest.mark.parametrize("name", ["time_ns", "decode-0"])
def test_a_table_whose_text_is_no_utf8(capsys, whole_run, tmp_path, name):
    folder = copytree(whole_run, tmp_path / "run")
    path = folder / "levels.parquet"
    data = path.read_bytes()
    assert name.encode() in data
    path.write_bytes(data.replace(name.encode(), b"\x80" + name[1:].encode()))
    assert f"{path}: " in refusal(capsys, "explain", folder)


SUMMARIES = [
    ({"completed": "x"}, "completed is 'x', expected a whole number"),
    ({"completed": None}, "completed is None, expected a whole number"),
    ({"completed": True}, "completed is True, expected a whole number"),
    ({"pdsim": []}, "pdsim is [], expected an object"),
    ({"mean_ttft_ms": "slow"}, "mean_ttft_ms is 'slow', expected a number"),
    ({"tag": 5}, "tag is 5, expected a text"),
    ({"duration": None}, "duration is None, expected a number"),
    ({"total_output_tokens": []}, "total_output_tokens is [], expected a number"),
]
OWN = [
    ({"prefill_cache_hit_rate": [[1]]}, "pdsim.prefill_cache_hit_rate is [[1]], expected a number"),
    ({"warnings": 5}, "pdsim.warnings is 5, expected a list of texts"),
    ({"interval": {"mean_ttft_ms": "x"}}, "pdsim.interval is {'mean_ttft_ms': 'x'}, expected an object"),
    ({"unfinished": [[1]]}, "pdsim.unfinished is [[1]], expected a number"),
    ({"interval": {"mean_ttft_ms": [1, None]}}, "pdsim.interval is {'mean_ttft_ms': [1, None]}, expected an object"),
    ({"failures": 5}, "pdsim.failures is 5, expected a list of objects"),
]


@pytest.mark.parametrize(("changed", "said"), SUMMARIES + OWN)
@pytest.mark.parametrize("words", [("explain",), ("report",), ("compare",), ("replay",)])
def test_a_field_of_a_foreign_type(capsys, whole_run, tmp_path, words, changed, said):
    folder = copytree(whole_run, tmp_path / "run")
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    (summary["pdsim"] if (changed, said) in OWN else summary).update(changed)
    path.write_text(json.dumps(summary))
    more = (whole_run,) if words == ("compare",) else ("-o", tmp_path / "r.html") if words == ("report",) else ()
    assert f"{path}: {said}" in refusal(capsys, *words, folder, *more)


def lines_of(folder):
    with pa.input_stream(str(folder / JOURNAL), compression="zstd") as file:
        return file.read().splitlines(keepends=True)


def test_a_journal_lacks_no_line_unseen(capsys, whole_run, tmp_path, monkeypatch):
    """A law: whichever line is taken away, the journal is refused."""
    monkeypatch.setattr(journal_file, "_ENTRIES_AT_ONCE", 2)
    folder = tmp_path / "run"
    with pytest.raises(SystemExit):
        main(["run", str(whole_run.parent / "s.yaml"), "--out", str(folder), "--no-ranges", "--json"])
    lines = lines_of(folder)
    assert list(read_journal(folder)) == list(read_journal(whole_run))
    assert len(lines) > 20
    for i in range(len(lines)):
        with pa.output_stream(str(folder / JOURNAL), compression="zstd") as file:
            file.write(b"".join(lines[:i] + lines[i + 1 :]))
        with pytest.raises(ValueError, match=r"not the journal of this run|cut short"):
            list(read_journal(folder))


def block(num_args):
    """A block of one call, Finished(5) to the router."""
    calls = {"instance_id": ["router"], "call": ["on_message"], "now_ns": [7], "num_args": num_args}
    calls |= {"num_returned": [0], "objects": [0]}
    return json.dumps({"objects": [["Finished", {"request_id": [5]}]], "calls": calls}).encode()


@pytest.mark.parametrize(
    "line",
    [
        *(b"[" * 100_000, b"1" * 5000, b"[1, 2, 3, 4]", b'["router", "x", [], 5]', b"{}", b"[[]]", b'{"a":' * 100_000),
        b'{"objects": [["Nothing", {}]], "calls": {}}',
        b'{"objects": [["Finished", {"request_id": [1], "other": [2]}]], "calls": {}}',
        block([1]).replace(b'"objects": [0]', b'"objects": [1]'),
        block([1]).replace(b"on_message", b"on_anything"),
        block([1]).replace(b"7", b"null"),
        block([0]),
        block([10**12]),
        block([-1]),
        block(["x"]),
    ],
    ids=range(16),
)
def test_a_line_that_is_no_call(capsys, whole_run, tmp_path, line):
    folder = copytree(whole_run, tmp_path / "run")
    with pa.output_stream(str(folder / JOURNAL), compression="zstd") as file:
        file.write(b"".join([*lines_of(whole_run)[:5], line + b"\n"]))
    assert f"{folder / JOURNAL}: damaged, or " in refusal(capsys, "replay", folder)


def test_a_run_of_an_earlier_release_says_that_calls_may_be_missing(capsys, whole_run, tmp_path):
    folder = copytree(whole_run, tmp_path / "run")
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    del summary["pdsim"]["journal"]
    path.write_text(json.dumps(summary))
    with pytest.raises(SystemExit):
        main(["replay", str(folder)])
    assert "does not count the calls, and some may be missing" in capsys.readouterr().out


CHANGES = [
    ("cost.host.slowdown=.inf", "cost.host.slowdown: Input should be a finite number"),
    ("faults=[{at: 1e300 h, kill: prefill-0}]", "a duration is 0 or from"),
    ("network.message_latency=1e9 h", "network.message_latency: a duration is 0 or from 1e-09 ns to 100000 h"),
    ("network.bandwidth=1e-300 GB/s", "network.bandwidth: a bandwidth is 0 or from 1 B/s to 1000000 TB/s"),
    ("client={use: open_loop, arrivals: {use: poisson, rate: 1e-300/s}}", "a rate is 0 or from"),
    (
        "workload.input_tokens={use: normal, mean: 9, stddev: 1e300}",
        "workload.input_tokens.stddev: expected a number from",
    ),
    ("decode.pool_tokens=99999999999999999999", "decode.pool_tokens: expected a number from -9.2e+18 to 9.2e+18"),
    ("page_size=" + "1" * 400, "page_size: expected a number from -9.2e+18 to 9.2e+18"),
    ("page_size=" + "1" * 5000, "not YAML: Exceeds the limit"),
    ("context_tokens=1000000000", "context_tokens: Input should be less than or equal to 100000000"),
    ("cost={use: affine}", "the cost has no times, so every step would take 0 ns"),
    ("cost={use: table}", "the cost has no times, so every step would take 0 ns"),
    ("cost={profile: /dev/zero}", "/dev/zero is a device or a pipe, not a file"),
]


@pytest.mark.parametrize(("change", "said"), CHANGES, ids=[change[:60] for change, _ in CHANGES])
def test_a_number_at_the_edge(capsys, scenario, change, said):
    assert said in refusal(capsys, "run", scenario, "--set", change)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "s.yaml", "--max-gpus", "1000000000"], "Must be <= 1024"),
        (["plan", "s.yaml", "--slo", "ttft p1.2.3 < 1 s"], "p1.2.3"),
        (["sweep", "s.yaml", "--ranges", "-1"], "Must be >= 0"),
        (["calibrate", "rows.csv", "-o", "p.yaml", "--host-slowdown", "inf"], "Must be <= 1000"),
        (["observe", "http://x:99999999", "-o", "seen"], "is no address of a server"),
        (["observe", "http://[::1", "-o", "seen"], "is no address of a server"),
    ],
)
def test_a_flag_at_the_edge(capsys, scenario, monkeypatch, words, said):
    monkeypatch.chdir(scenario.parent)
    assert said in refusal(capsys, *words)


MEASURED = "scenario: s.yaml\nsource: a test\narms: {one: {runs: [{mean_ttft_ms: 5}]}}\n"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("{one: {runs: [{mean_ttft_ms: 5}]}}", "[]", "arms, a mapping of names to what was measured"),
        ("[{mean_ttft_ms: 5}]", "x", "runs: expected a list, found 'x'"),
        ("mean_ttft_ms: 5", "mean_ttft_ms: x", "runs[0]: mean_ttft_ms: expected a number, found 'x'"),
        ("mean_ttft_ms: 5", "bogus: 5", "measures bogus, which is no number of a summary"),
        ("a test", "a test\nseeds: 5", "seeds: expected a list of whole numbers from 0 on, found 5"),
        ("a test", "a test\nseeds: [1, -1]", "seeds: expected a list of whole numbers from 0 on, found [1, -1]"),
    ],
)
def test_a_damaged_case(capsys, scenario, old, new, said):
    (scenario.parent / "measured.yaml").write_text(MEASURED.replace(old, new))
    assert said in refusal(capsys, "validate", scenario.parent)


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, '{"mean_ttft_ms": ' + "1" * 4000 + "}"])
def test_a_damaged_result_of_another_tool(capsys, scenario, tmp_path, text):
    path = tmp_path / "result.json"
    path.write_text(text)
    assert f"{path}" in refusal(capsys, "compare", path, scenario)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"hidden_size": ' + "1" * 5000 + "}", '{"hidden_size": Infinity}'])
def test_a_damaged_checkpoint(capsys, tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert f"{path}: " in refusal(capsys, "--catalog", tmp_path / "own", "catalog", "add", path, "--name", "mine")


@pytest.mark.parametrize("name", ["rows.csv.gz", "t.csv.gz"])
def test_a_damaged_archive_is_one_clear_error(tmp_path, capsys, name):
    """Its header is whole, and what follows is not."""
    whole = gzip.compress(b"kind,new_tokens,time_us\n" * 50)
    path = tmp_path / name
    path.write_bytes(whole[:12] + bytes(255 - byte for byte in whole[12:-8]) + whole[-8:])
    init = ["init", tmp_path / "s.yaml", "--trace", path]
    said = refusal(capsys, *(["calibrate", path, "-o", tmp_path / "p.yaml"] if name.startswith("rows") else init))
    assert f"{path}" in said
    assert "cannot be read as text" in said
