"""Saved pages of metrics: one name for each number, whoever serves; two pages tell what happened in between."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.cli import main
from pdsim.formats.pages import QUANTITIES, between, read_page, summary_of
from pdsim.scenario.yaml_file import ConfigError

VLLM = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2
vllm:num_requests_running{engine="1",model_name="m"} 1
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:kv_cache_usage_perc{engine="0"} 0.4
vllm:kv_cache_usage_perc{engine="1"} 0.44
vllm:prefix_cache_hits_total{engine="0"} 12
vllm:prefix_cache_queries_total{engine="0"} 1e2
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1
vllm:request_success_total{finished_reason="stop"} 3
vllm:request_success_total{finished_reason="length"} 2
vllm:time_to_first_token_seconds_sum 2.5
vllm:time_to_first_token_seconds_count 5
process_start_time_seconds 1.7e9
"""
SGLANG = """
sglang:num_running_reqs{model_name="m",tp_rank="0",dp_rank="0"} 4
sglang:num_running_reqs{model_name="m",tp_rank="1",dp_rank="0"} 4
sglang:num_running_reqs{model_name="m",tp_rank="0",dp_rank="1"} 3
sglang:num_queue_reqs{tp_rank="0"} 1
sglang:token_usage 0.25
sglang:cache_hit_rate 0.5
sglang:max_total_num_tokens 16000
sglang:gen_throughput NaN
"""
DYNAMO = """
dynamo_frontend_inflight_requests{model="m"} 5
dynamo_frontend_queued_requests{model="m"} 2
dynamo_frontend_requests_total{model="m",status="success"} 9
dynamo_frontend_time_to_first_token_seconds_sum{model="m"} 1
dynamo_frontend_time_to_first_token_seconds_count{model="m"} 4
"""


def page(tmp_path, text, name="page.txt"):
    (tmp_path / name).write_text(text)
    return read_page(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            VLLM,
            {"running": 3, "waiting": 7, "cache_usage": 0.42, "hit_share": 0.12, "pool_tokens": 16_000, "requests": 5},
        ),
        (SGLANG, {"running": 7, "waiting": 1, "cache_usage": 0.25, "hit_share": 0.5, "pool_tokens": 16_000}),
        (DYNAMO, {"running": 5, "waiting": 2, "requests": 9}),
        (
            json.dumps({"model_path": "m", "page_size": 16, "internal_states": [{"max_total_num_tokens": 16_000}]}),
            {"pool_tokens": 16_000, "page_tokens": 16},
        ),
    ],
)
def test_numbers_have_one_name(tmp_path, text, found):
    values = page(tmp_path, text).values
    assert {name: values.get(name) for name in found} == pytest.approx(found)


def test_two_pages_tell_rates_and_means(tmp_path):
    later = VLLM.replace('"stop"} 3', '"stop"} 13').replace("_sum 2.5", "_sum 4.5").replace("_count 5", "_count 15")
    first, last = page(tmp_path, VLLM), page(tmp_path, later, "later.txt")
    found = summary_of(between(first, last, 5))
    assert found == pytest.approx({"request_throughput": 2.0, "mean_ttft_ms": 200.0})
    with pytest.raises(ConfigError, match="give the earlier page first"):
        between(last, first, 5)


@pytest.mark.parametrize("text", ["", "up 1\n", "hello\n", "{}", "[1]", "{"])
def test_what_is_no_page_is_one_message(tmp_path, text):
    with pytest.raises(ValueError, match=r"page\.txt") as error:
        page(tmp_path, text)
    assert "\n" not in str(error.value)


def test_parts_by_priority_are_no_others(tmp_path):
    text = "".join(f'sglang:num_queue_reqs{{priority="{each}"}} {count}\n' for each, count in (("", 5), (1, 2), (2, 3)))
    assert page(tmp_path, text).values["waiting"] == 5


def test_a_worker_of_dynamo_counts_what_it_generates(tmp_path):
    name = "dynamo_component_inflight_requests"
    text = f'{name}{{dynamo_endpoint="generate"}} 12\n{name}{{dynamo_endpoint="load_metrics"}} 40\n'
    assert page(tmp_path, text).values == {"running": 12}


@pytest.mark.parametrize("name", ["ray_vllm_num_requests_running", "ray_vllm:num_requests_running"])
def test_names_that_ray_writes(tmp_path, name):
    assert page(tmp_path, f"{name} 3\n").values == {"running": 3}


@pytest.mark.parametrize(
    ("loads", "values"),
    [
        (
            {"loads": [{"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": use} for use in (0.25, 0.75)]},
            {"running": 6, "waiting": 2, "cache_usage": 0.5},
        ),
        ([{"dp_rank": rank, "num_reqs": 9, "num_waiting_reqs": 2} for rank in range(2)], {"running": 14, "waiting": 4}),
    ],
)
def test_loads_of_ranks_are_added(tmp_path, loads, values):
    assert page(tmp_path, json.dumps(loads)).values == values


NAMES = st.sampled_from(sorted({name for quantity in QUANTITIES.values() for name in quantity.names}))
NUMBERS = st.integers(0, 10**6) | st.sampled_from(["NaN", "+Inf", "x", "1e400"])


@given(samples=st.lists(st.tuples(NAMES | st.text("ab:_", min_size=1), NUMBERS), max_size=8))
def test_any_samples_are_read_or_refused(tmp_path_factory, samples):
    path = tmp_path_factory.mktemp("p") / "p.txt"
    path.write_text("".join(f'{name}{{a="b"}} {value}\n' for name, value in samples))
    try:
        found = read_page(path)
    except ConfigError:
        return
    assert all(isinstance(value, float) for value in found.values.values())


def test_observe_reads_files_and_compares(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(VLLM)
    (tmp_path / "b.txt").write_text(VLLM.replace('"stop"} 3', '"stop"} 13'))
    load = {"use": "random_lengths", "num_requests": 5, "input_tokens": 9, "output_tokens": 9}
    scenario = {"model": "qwen3-0.6b", "aggregated": {"gpu": "h100", "pool_tokens": 16_000}, "workload": load}
    (tmp_path / "s.yaml").write_text(json.dumps(scenario))
    with pytest.raises(SystemExit) as ended:
        main(["observe", "a.txt", "b.txt", "--seconds", "4", "--scenario", "s.yaml", "--json"])
    assert not ended.value.code
    said = json.loads(capsys.readouterr().out)
    assert said["observed"]["request_throughput"] == 2.5
    assert said["simulated"]["pool_tokens"] == said["observed"]["pool_tokens"] == 16_000
    with pytest.raises(SystemExit) as ended:
        main(["observe", "nowhere.txt", "b.txt"])
    assert ended.value.code == 2
