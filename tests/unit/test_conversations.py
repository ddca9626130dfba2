"""Traces of agents and of conversations, as their tools write them."""

import json

import pytest

from pdsim.workload.prompts import ShareGpt
from pdsim.workload.request_spec import Streams
from pdsim.workload.trace_file import TraceError
from pdsim.workload.traces import AgenticMooncakeTrace, AppliedComputeTrace, MooncakeTrace


def node(name, *awaited, **more):
    waits = {"wait_for": list(awaited)} if awaited else {"timestamp": 0}
    return {"request_id": name, "input_length": 9, "output_length": 2, "hash_ids": [0], **waits, **more}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


AGENT = [
    {**node("plan", timestamp=100, branches=["look"], prefix_reset=True), "session_id": "main"},
    {**node("look", "plan", timestamp=300, delay=40, prefix_reset=True), "session_id": "child"},
    {**node("answer", "plan", "look", timestamp=900, delay=20, tool_wait_ms=500, tool_events=[]), "session_id": "main"},
]


def test_a_main_agent_waits_for_its_child(tmp_path):
    specs = AgenticMooncakeTrace(path=write(tmp_path / "t.jsonl", AGENT), speedup=2.0).requests(Streams(0))
    assert [spec.after for spec in specs] == [(), (0,), (0, 1)]
    assert [spec.think_ns / 1e6 for spec in specs] == [0, 40, 520]
    assert [spec.arrival_ns / 1e6 for spec in specs] == [50, 150, 450]


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        (
            [node("plan"), node("b", "plam")],
            "line 2: wait_for is 'plam', expected the request_id of a line; did you mean",
        ),
        ([node("a"), node("a")], "line 2: request_id is 'a', expected an id that no earlier line has"),
        (
            [node("a", "a")],
            "line 1: wait_for is ['a'], expected no waiting in a circle: a waits for a",
        ),
        (
            [node("r"), node("a", "b"), node("b", "r", "a")],
            "line 3: wait_for is ['r', 'a'], expected no waiting in a circle: b waits for a waits for b",
        ),
        ([node("a"), node("b", wait_for="a")], "line 2: wait_for is 'a', expected a list of request ids"),
        ([{"schema": "x", "version": 1}], "line 1: no field 'request_id'; the line has schema, version"),
        ([node("a", timestamp=None)], "line 1: no field 'timestamp'"),
        ([node("a"), node("b", "a", delay=-1)], "line 2: delay is -1, expected a time, 0 or later"),
    ],
)
def test_broken_waits_say_where_and_what(tmp_path, rows, complaint):
    path = write(tmp_path / "t.jsonl", rows)
    with pytest.raises(TraceError) as error:
        AgenticMooncakeTrace(path=path).requests(Streams(0))
    assert str(path) in str(error.value)
    assert complaint in str(error.value)


def test_a_plain_mooncake_trace_does_not_drop_waits(tmp_path):
    with pytest.raises(
        TraceError, match=r"line 2: wait_for is \['plan'\], expected none: agentic_mooncake_trace reads"
    ):
        MooncakeTrace(path=write(tmp_path / "t.jsonl", AGENT)).requests(Streams(0))


TOOLS = {
    "num_turns": 2,
    "input_prompt_length": 32,
    "assistant_response_length": [16, 20],
    "tool_call_output_length": [8, 12],
    "tool_call_latency": [1.5, 0.0],
    "final_assistant_response_length": 64,
}


def test_applied_computes_conversations(tmp_path):
    path = write(tmp_path / "t.jsonl", [TOOLS, TOOLS])
    specs = AppliedComputeTrace(path=path, num_requests=4).requests(Streams(0))
    assert [len(spec.prompt) for spec in specs] == [32, 56, 88, 32]
    assert [len(spec.output) for spec in specs] == [16, 20, 64, 16]
    assert [spec.after for spec in specs] == [(), (0,), (1,), ()]
    assert [spec.think_ns / 1e9 for spec in specs] == [0, 1.5, 0, 0]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tool_call_latency": None}, f"no field 'tool_call_latency'; the line has {', '.join(TOOLS)}"),
        ({"tool_call_latency": [1]}, "tool_call_latency is [1], expected a list of 2"),
        ({"assistant_response_length": [16, 0]}, "assistant_response_length[1] is 0, expected at least 1"),
        ({"tool_call_latency": [1, "x"]}, "tool_call_latency[1] is 'x', expected a time"),
    ],
)
def test_a_broken_conversation_says_where_and_what(tmp_path, change, complaint):
    path = write(tmp_path / "t.jsonl", [TOOLS, TOOLS | change])
    with pytest.raises(TraceError) as error:
        AppliedComputeTrace(path=path).requests(Streams(0))
    assert str(error.value).removeprefix(f"{path}, line 2: ") == complaint


def turns(*lengths):
    return {"id": "x", "conversations": [{"from": "human", "value": "x" * length} for length in lengths]}


@pytest.mark.filterwarnings("ignore::pdsim.workload.trace_file.InputWarning")
def test_sharegpt_is_first_turns_and_a_rule_of_thumb(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps([turns(400, 40, 4000), turns(400), turns(4, 400), turns(80, 120)], indent=1))
    specs = ShareGpt(path=path).requests(Streams(0))
    assert [(len(spec.prompt), len(spec.output)) for spec in specs] == [(100, 10), (20, 30)]
    assert specs[0].prompt.common_prefix(0, specs[1].prompt, 0) == 0
    specs = ShareGpt(path=path, tokens_per_character=0.5, num_requests=2).requests(Streams(0))
    assert [(len(spec.prompt), len(spec.output)) for spec in specs] == [(200, 20), (2, 200)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[{"conversations": [\n{', "line 2: not JSON"),
        ('{"conversations": []}', "no requests in it"),
        ("[3]", "record 1: expected a JSON object, found '3'"),
        ('[{"conversation": []}]', "record 1: no field 'conversations'; the line has conversation"),
        ('[{"conversations": 3}]', "record 1: conversations is 3, expected a list of turns"),
        (
            '[{"conversations": [{"from": "human"}]}]',
            "record 1: conversations is \"{'from': 'human'}\", expected turns",
        ),
        ("[]", "no requests in it"),
    ],
)
def test_broken_conversations_say_where_and_what(tmp_path, text, complaint):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(TraceError) as error:
        ShareGpt(path=tmp_path / "t.json").requests(Streams(0))
    assert str(error.value).startswith(str(tmp_path / "t.json"))
    assert complaint in str(error.value)
