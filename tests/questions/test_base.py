"""From flags to the scenario that a question starts from."""

import pytest

from pdsim.study.questions.asked import Asked
from pdsim.study.questions.base import base_of
from pdsim.workload.agentic_traces import AgenticMooncakeTrace, AppliedComputeTrace
from pdsim.workload.clients import ClosedLoop, OpenLoop
from pdsim.workload.sharegpt import ShareGpt
from pdsim.workload.synthetic import PrefixPool
from pdsim.workload.traces import AzureTrace, BailianTrace, BurstGptTrace, MooncakeTrace, RequestTable


def base(tmp_path, *changes, **flags):
    return base_of(Asked(**flags), tmp_path, changes, {})


def test_flags_describe_cluster_and_load(tmp_path):
    made = base(
        tmp_path, "page_size=16", gpus=6, prefix_tokens=100, prefixes=3, input_tokens="10-20", rate=2.5
    ).scenario
    assert (made.prefill.instances, made.decode.instances, made.page_size) == (3, 3, 16)
    assert isinstance(made.workload, PrefixPool)
    assert (made.workload.num_prefixes, made.workload.input_tokens.high) == (3, 20)
    assert made.client.arrivals.rate_per_s == 2.5


@pytest.mark.parametrize(
    ("model", "gpu", "tp"), [("llama-3.1-8b", "h100", 1), ("llama-3.1-70b", "h200", 2), ("deepseek-r1", "h200", 8)]
)
def test_a_server_has_as_few_gpus_as_the_model_needs(tmp_path, model, gpu, tp):
    assert base(tmp_path, model=model, gpu=gpu, gpus=16).scenario.prefill.tp == tp


@pytest.mark.parametrize(
    ("name", "text", "workload"),
    [
        ("a.jsonl", '{"timestamp": 0, "input_length": 9, "output_length": 9, "hash_ids": [0]}\n', MooncakeTrace),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", AzureTrace),
        ("b.csv", "arrival_s,in_tokens,out_tokens\n", RequestTable),
        ("c.csv", "Timestamp,Session ID,Request tokens,Response tokens\n", BurstGptTrace),
        ("b.jsonl", '{"chat_id": 1, "timestamp": 0, "hash_ids": [0]}\n', BailianTrace),
        ("c.jsonl", '{"hash_ids": [0]}\n{"hash_ids": [0], "wait_for": ["a"]}\n', AgenticMooncakeTrace),
    ],
)
def test_a_trace_is_known_by_its_first_line(tmp_path, name, text, workload):
    (tmp_path / name).write_text(text)
    made = base(tmp_path, trace=tmp_path / name)
    assert isinstance(made.scenario.workload, workload)
    assert isinstance(made.scenario.client, OpenLoop)
    assert made.is_sample
    assert not base(tmp_path, trace=tmp_path / name, rate=3.0).is_sample


@pytest.mark.parametrize(
    ("name", "text", "workload"),
    [
        ("a.json", '[{"conversations": []}]', ShareGpt),
        ("a.jsonl", '{"num_turns": 0, "tool_call_latency": []}\n', AppliedComputeTrace),
    ],
)
def test_a_trace_without_times_is_sent_as_generated_loads_are(tmp_path, name, text, workload):
    (tmp_path / name).write_text(text)
    made = base(tmp_path, trace=tmp_path / name)
    assert isinstance(made.scenario.workload, workload)
    assert made.scenario.client == ClosedLoop(64)
    kept = base_of(Asked(scenario=made.path, trace=tmp_path / name), tmp_path, ("client.concurrency=5",), {})
    assert kept.scenario.client == ClosedLoop(5)


def test_a_scenario_keeps_what_no_flag_changes(tmp_path):
    path = base(tmp_path, "decode.radix_cache=true").path
    made = base_of(Asked(scenario=path, concurrency=7, requests=9), tmp_path, ("seed=4",), {}).scenario
    assert made.decode.radix_cache
    assert made.client == ClosedLoop(7)
    assert (made.workload.num_requests, made.seed) == (9, 4)
