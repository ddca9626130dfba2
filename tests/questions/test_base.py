"""The scenario that a question starts from."""

import json

import pytest

from pdsim.study.base import AskOptions, base_of
from pdsim.workload.client import ClosedLoop, OpenLoop
from pdsim.workload.prompts import ShareGpt
from pdsim.workload.traces import (
    AgenticMooncakeTrace,
    AppliedComputeTrace,
    AzureTrace,
    BailianTrace,
    BurstGptTrace,
    MooncakeTrace,
    RequestTable,
)

STARTER = {"client": {"use": "closed_loop", "concurrency": 64}}


def base(folder, *changes, path=None, **options):
    return base_of(path, AskOptions(**options), changes, folder=folder, starter=STARTER)


def test_the_starter_has_the_questions_own_settings_below_the_users(tmp_path):
    starter = {"workload.num_requests": 800, "prefill.instances": 4}
    made = base_of(None, AskOptions(), ("prefill.instances=3",), folder=tmp_path, starter=starter)
    assert (made.scenario.workload.num_requests, made.scenario.prefill.instances) == (800, 3)
    assert made.path == tmp_path / "scenario.yaml"


LENGTHS = {"input_length": 9, "output_length": 9, "hash_ids": [0]}
CALL = {"request_id": "a", **LENGTHS, "timestamp": 0}
BURSTGPT = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
TOOLS = {
    "num_turns": 0,
    "input_prompt_length": 9,
    "assistant_response_length": [],
    "tool_call_output_length": [],
    "tool_call_latency": [],
    "final_assistant_response_length": 9,
}


@pytest.mark.parametrize(
    ("name", "text", "workload"),
    [
        ("a.jsonl", json.dumps({"timestamp": 0, **LENGTHS}), MooncakeTrace),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,9,9\n", AzureTrace),
        ("b.csv", "arrival_s,in_tokens,out_tokens\n0,9,9\n", RequestTable),
        ("c.csv", BURSTGPT + "0,1,2,ChatGPT,9,9,18,Conversation log\n", BurstGptTrace),
        (
            "b.jsonl",
            json.dumps({"chat_id": 1, "parent_chat_id": -1, "turn": 1, "timestamp": 0, **LENGTHS}),
            BailianTrace,
        ),
        (
            "c.jsonl",
            "\n".join(map(json.dumps, (CALL, {**CALL, "request_id": "b", "wait_for": ["a"]}))),
            AgenticMooncakeTrace,
        ),
    ],
)
def test_a_trace_is_known_by_its_first_line(tmp_path, name, text, workload):
    (tmp_path / name).write_text(text)
    made = base(tmp_path, trace=tmp_path / name)
    assert isinstance(made.scenario.workload, workload)
    assert isinstance(made.scenario.client, OpenLoop)
    assert made.is_sample
    poisson = "client={use: open_loop, arrivals: {use: poisson, rate: 3/s}}"
    assert not base(tmp_path, poisson, trace=tmp_path / name).is_sample


@pytest.mark.parametrize(
    ("text", "pace"),
    [
        ("arrival_s,in_tokens,out_tokens\n0,9,9\n1,9,9\n", "at their own times"),
        ("in_tokens,out_tokens\n9,9\n9,9\n", "all at once"),
    ],
)
def test_requests_without_times_are_sent_at_once(tmp_path, text, pace):
    (tmp_path / "a.csv").write_text(text)
    assert base(tmp_path, "client=open_loop", trace=tmp_path / "a.csv").pace == pace
    assert base(tmp_path, "client=open_loop").pace == "all at once"
    turns = "workload={use: sessions, num_sessions: 2, num_turns: 2, input_tokens: 9, output_tokens: 9, think: 1 s}"
    assert base(tmp_path, "client=open_loop", turns).pace == "at their own times"
    assert base(tmp_path).pace == "64 at a time"
    assert base(tmp_path, "client={use: open_loop, arrivals: {use: poisson, rate: 3/s}}").pace == "3 a second"


@pytest.mark.parametrize(
    ("name", "text", "workload"),
    [
        (
            "a.json",
            json.dumps([{"conversations": [{"from": "human", "value": 80 * "x"}, {"from": "gpt", "value": 80 * "y"}]}]),
            ShareGpt,
        ),
        ("a.jsonl", json.dumps(TOOLS), AppliedComputeTrace),
    ],
)
@pytest.mark.filterwarnings("ignore::pdsim.workload.trace_file.InputWarning")
def test_a_trace_without_times_is_sent_as_the_scenario_says(tmp_path, name, text, workload):
    (tmp_path / name).write_text(text)
    made = base(tmp_path, trace=tmp_path / name)
    assert isinstance(made.scenario.workload, workload)
    assert made.scenario.client == ClosedLoop(64)
    kept = base(tmp_path, "client.concurrency=5", path=made.path, trace=tmp_path / name)
    assert kept.scenario.client == ClosedLoop(5)
