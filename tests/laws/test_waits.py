"""Requests that wait for others, from a file to the end of the run."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.workload.client import sessions_of
from pdsim.workload.hash_ids import agentic_rows, write_mooncake
from pdsim.workload.request_spec import Streams
from pdsim.workload.traces import AgenticMooncakeTrace, AppliedComputeTrace
from tests.support import examples, run, small

pytestmark = pytest.mark.filterwarnings("ignore::pdsim.workload.trace_file.InputWarning")
"""Lines stand in any order here."""

BLOCK = 4


@st.composite
def rows(draw):
    """Earlier first; ids are told apart by their prompts, which are of one size each."""
    made = []
    for i in range(draw(st.integers(1, 8))):
        row = {"request_id": f"r{i}", "input_length": BLOCK * (i + 1), "output_length": draw(st.integers(1, 9))}
        row["hash_ids"] = list(range(i + 1))
        if awaited := draw(st.lists(st.sampled_from(made), max_size=3)) if made else []:
            row["wait_for"] = [one["request_id"] for one in awaited]
            row["delay"] = draw(st.integers(0, 60))
            row |= draw(st.sampled_from([{}, {"tool_wait_ms": 7.5}, {"timestamp": 3, "tool_wait_ms": None}]))
        else:
            row["timestamp"] = draw(st.integers(0, 400))
        made.append(row)
    return made


def read(reader, lines, **settings):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        write_mooncake(path, lines)
        return reader(path=path, **settings).requests(Streams(0))


def read_agentic(lines, **settings):
    return read(AgenticMooncakeTrace, lines, block_tokens=BLOCK, **settings)


def row_of(spec):
    return len(spec.prompt) // BLOCK - 1


@given(rows())
@examples(60)
def test_a_request_is_sent_its_pause_after_the_last_it_waits_for_has_ended(lines):
    specs = read_agentic(lines)
    by_row = {row_of(spec): spec.request_id for spec in specs}
    records = {record.request_id: record for record in run(small(*specs)).records.requests}
    assert len(records) == len(lines)
    for i, line in enumerate(lines):
        sent_ns = records[by_row[i]].arrival_ns
        if ends_ns := [records[by_row[int(name[1:])]].end_ns for name in line.get("wait_for", ())]:
            assert sent_ns == max(ends_ns) + (line["delay"] + (line.get("tool_wait_ms") or 0)) * 1e6
        else:
            assert sent_ns == line["timestamp"] * 1e6


@given(rows(), st.integers(1, 3))
@examples(60)
def test_a_closed_loop_keeps_so_many_sessions_open(lines, concurrency):
    specs = read_agentic(lines)
    client = {"use": "closed_loop", "concurrency": concurrency}
    records = {record.request_id: record for record in run(small(*specs, client=client)).records.requests}
    assert len(records) == len(specs)
    sessions = [[records[spec.request_id] for spec in session] for session in sessions_of(specs)]
    begins = [min(record.arrival_ns for record in session) for session in sessions]
    ends = sorted(max(record.end_ns for record in session) for session in sessions)
    assert begins[:concurrency] == [0] * min(concurrency, len(sessions))
    assert begins[concurrency:] == ends[: max(0, len(sessions) - concurrency)]


@given(rows(), st.randoms())
def test_lines_may_stand_in_any_order(lines, random):
    """Ties of arrival are those of the file, so requests are compared by what they are."""
    shuffled = random.sample(lines, len(lines))

    def told(specs):
        place = {spec.request_id: row_of(spec) for spec in specs}
        return sorted(
            (row_of(spec), spec.arrival_ns, len(spec.output), {place[one] for one in spec.after}) for spec in specs
        )

    assert told(read_agentic(shuffled)) == told(read_agentic(lines))
    for spec in read_agentic(shuffled):
        assert all(earlier < spec.request_id for earlier in spec.after)


@given(rows(), st.integers(1, 8))
def test_a_cut_trace_is_the_first_lines(lines, num):
    assert list(map(row_of, read_agentic(lines, num_requests=num))) == list(map(row_of, read_agentic(lines[:num])))


@given(rows())
def test_what_is_written_is_what_was_read(lines):
    specs = read_agentic(lines)
    sent_ns = {spec.request_id: spec.arrival_ns for spec in specs}
    again = read_agentic(agentic_rows(specs, sent_ns, block_tokens=BLOCK))
    assert [spec._replace(prompt=None, output=None) for spec in again] == [
        spec._replace(prompt=None, output=None) for spec in specs
    ]
    assert [len(spec.prompt) for spec in again] == [len(spec.prompt) for spec in specs]


@st.composite
def conversations(draw):
    num_turns = draw(st.integers(0, 4))
    lists = st.lists(st.integers(1, 50), min_size=num_turns, max_size=num_turns)
    return {
        "num_turns": num_turns,
        "input_prompt_length": draw(st.integers(1, 99)),
        "assistant_response_length": draw(lists),
        "tool_call_output_length": draw(st.lists(st.integers(0, 50), min_size=num_turns, max_size=num_turns)),
        "tool_call_latency": [one / 4 for one in draw(lists)],
        "final_assistant_response_length": draw(st.integers(1, 99)),
    }


@given(st.lists(conversations(), min_size=1, max_size=4))
def test_a_prompt_is_the_conversation_before_it(lines):
    sessions = sessions_of(read(AppliedComputeTrace, lines))
    assert len(sessions) == len(lines)
    for line, turns in zip(lines, sessions, strict=True):
        assert len(turns) == line["num_turns"] + 1
        answers = [*line["assistant_response_length"], line["final_assistant_response_length"]]
        assert [len(turn.output) for turn in turns] == answers
        assert [turn.think_ns / 1e9 for turn in turns[1:]] == line["tool_call_latency"]
        assert len(turns[-1].prompt) == (
            line["input_prompt_length"] + sum(line["assistant_response_length"]) + sum(line["tool_call_output_length"])
        )
        for before, turn, given_by_tool in zip(turns, turns[1:], line["tool_call_output_length"], strict=False):
            said = before.prompt.then(before.output)
            assert turn.after == (before.request_id,)
            assert turn.prompt.common_prefix(0, said, 0) == len(said) == len(turn.prompt) - given_by_tool
    for turns in sessions[1:]:
        assert turns[0].prompt.common_prefix(0, sessions[0][0].prompt, 0) == 0
