"""Rows of any known fields, in any order and among foreign ones: requests, or one error that names file and line."""

import csv
import json
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdsim.workload import trace_fields as names
from pdsim.workload.agent_plays import WekaTrace
from pdsim.workload.prompts import PROMPTS, ChatTrace, ShareGpt
from pdsim.workload.request_spec import Streams
from pdsim.workload.trace_file import InputWarning, TraceError, json_lines
from pdsim.workload.trace_kind import trace_kind
from pdsim.workload.traces import AgenticMooncakeTrace, AppliedComputeTrace, MooncakeTrace, RequestTable

KNOWN = sorted({name for quantity in names.QUANTITIES for name in quantity.names} | set(PROMPTS))
OTHERS = [
    "model",
    "prefix_id",
    "prefix_tokens",
    "wait_for",
    "request_id",
    "requests",
    "type",
    "metrics",
    "conversations",
]
TEXTS = st.text(max_size=9)
SMALL = st.dictionaries(st.sampled_from([*KNOWN, "value", "role", "content"]), st.integers(0, 900) | TEXTS, max_size=3)
NUMBERS = st.integers(-2, 2000) | st.floats(-1, 1e12)
LISTS = st.lists(st.integers(0, 5), max_size=4) | st.lists(SMALL, max_size=2)
VALUES = st.none() | st.booleans() | NUMBERS | TEXTS | LISTS | SMALL | st.just("2023-11-16 18:17:03.9799600")
ROWS = st.lists(st.dictionaries(st.sampled_from([*KNOWN, *OTHERS]), VALUES, max_size=8), min_size=1, max_size=4)
CELLS = st.sampled_from(["", "3", "0.5", "x", "-1", "1e9", "2023-11-16T18:17:03Z"])
READERS = (MooncakeTrace, RequestTable, ChatTrace, WekaTrace, ShareGpt, AgenticMooncakeTrace, AppliedComputeTrace)


def read_or_refused(read, path):
    """Requests, or an error of one line that begins with the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InputWarning)
        try:
            return read()
        except TraceError as wrong:
            said = str(wrong)
    assert said.startswith(str(path))
    assert "\n" not in said
    return []


def check(specs):
    for spec in specs:
        assert len(spec.prompt) >= 1
        assert len(spec.output) == spec.max_output_tokens >= 1
        assert spec.arrival_ns >= 0
        assert spec.think_ns >= 0
        assert all(0 <= one < len(specs) and one != spec.request_id for one in spec.after)


@settings(max_examples=150)
@given(rows=ROWS, as_list=st.booleans())
def test_json_is_read_or_refused(tmp_path_factory, rows, as_list):
    path = tmp_path_factory.mktemp("t") / "t.jsonl"
    path.write_text(json.dumps(rows) if as_list else "\n".join(map(json.dumps, rows)))
    read_or_refused(lambda: trace_kind(path), path)
    for reader in READERS:
        check(read_or_refused(lambda kind=reader: kind(path=path).requests(Streams(0)), path))


FINITE = st.floats(allow_nan=False, allow_infinity=False)
JSON = VALUES | st.integers() | FINITE | st.text(max_size=9) | st.lists(FINITE, max_size=3)


@settings(max_examples=50)
@given(rows=st.lists(st.dictionaries(TEXTS, JSON, min_size=1, max_size=4), max_size=3), is_ascii=st.booleans())
def test_json_lines_are_what_json_reads(tmp_path_factory, rows, is_ascii):
    path = tmp_path_factory.mktemp("t") / "t.jsonl"
    path.write_bytes("\n".join(json.dumps(row, ensure_ascii=is_ascii) for row in rows).encode())
    assert [repr(line.fields) for line in json_lines(path)] == list(map(repr, rows))


def test_json_lines_may_have_half_of_a_surrogate_pair_and_many_levels(tmp_path):
    path, deep = tmp_path / "t.jsonl", "[" * 300 + "]" * 300
    path.write_text(f'{{"text": "\\ud800", "deep": {deep}}}\n')
    (line,) = json_lines(path)
    assert line.fields == {"text": "\ud800", "deep": json.loads(deep)}


@settings(max_examples=60)
@given(
    columns=st.lists(st.sampled_from([*KNOWN, "model"]), unique=True, min_size=1, max_size=6),
    cells=st.lists(st.lists(CELLS, min_size=6, max_size=6), max_size=4),
    delimiter=st.sampled_from(",;\t|"),
)
def test_tables_are_read_or_refused(tmp_path_factory, columns, cells, delimiter):
    path = tmp_path_factory.mktemp("t") / "t.csv"
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([columns, *(row[: len(columns)] for row in cells)])
    read_or_refused(lambda: trace_kind(path), path)
    check(read_or_refused(lambda: RequestTable(path=path).requests(Streams(0)), path))


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(name, "out_tokens") for name in names.INPUT.names] + [("in_tokens", name) for name in names.OUTPUT.names],
)
def test_each_name_of_a_length_is_read(tmp_path, inputs, outputs):
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"model": "x", outputs: 7, inputs: 900}) + "\n" for _ in range(2)))
    (first, second) = RequestTable(path=path).requests(Streams(0))
    assert (len(first.prompt), len(first.output)) == (900, 7)
    assert first.prompt.common_prefix(0, second.prompt, 0) == 0


@pytest.mark.filterwarnings("ignore::pdsim.workload.trace_file.InputWarning")
@pytest.mark.parametrize("name", sorted(names.ARRIVAL.names))
def test_each_name_of_a_time_has_its_unit(tmp_path, name):
    path, unit_ns = tmp_path / "t.jsonl", names.ARRIVAL.names[name]
    rows = [{"input_tokens": 9, "output_tokens": 9, name: at} for at in (1.5, 2.5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = RequestTable(path=path, time_unit="s").requests(Streams(0))
    assert second.arrival_ns - first.arrival_ns == round(2.5 * (unit_ns or 1e9)) - round(1.5 * (unit_ns or 1e9))
