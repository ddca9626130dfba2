"""Components by name: what a file says becomes an object, and back."""

from pathlib import Path

import pytest

from pdsim.cost.model import CostSettings
from pdsim.cost.settings import Affine
from pdsim.policy.pages import ReserveDecodeTokens
from pdsim.policy.prefill import FirstComeFirstServed
from pdsim.policy.protocols import AdmissionPolicy, PrefillPolicy, RoutingPolicy
from pdsim.scenario.sections.component import BUILT_IN, build_component, describe_component
from pdsim.workload.client import Client, ClosedLoop, OpenLoop, Poisson
from pdsim.workload.lengths import Fixed, Lengths, Uniform
from pdsim.workload.request_spec import Workload
from pdsim.workload.synthetic import RandomLengths, Sessions
from pdsim.workload.traces import MooncakeTrace
from tests.support import Given, small

HERE = Path("/somewhere")

NEEDS = {
    "random_lengths": {"num_requests": 3, "input_tokens": 10, "output_tokens": {"use": "uniform", "low": 1, "high": 4}},
    "prefix_pool": {"num_requests": 3, "num_prefixes": 2, "prefix_tokens": 5, "input_tokens": 1, "output_tokens": 1},
    "sessions": {"num_sessions": 2, "num_turns": 2, "input_tokens": 3, "output_tokens": 4, "think": "1500 ns"},
    "mooncake_trace": {"path": "t.jsonl", "num_requests": 5, "speedup": 0.5},
    "azure_trace": {"path": "t.csv"},
    "bailian_trace": {"path": "t.jsonl"},
    "burstgpt_trace": {"path": "t.csv"},
    "agentic_mooncake_trace": {"path": "t.jsonl", "block_tokens": 64},
    "applied_compute_trace": {"path": "t.jsonl", "num_requests": 5},
    "sharegpt": {"path": "t.json", "tokens_per_character": 0.3},
    "request_table": {"path": "/t.csv.gz", "time_unit": "s"},
    "chat_trace": {"path": "t.jsonl", "output_tokens": 9},
    "weka_trace": {"path": "t.jsonl", "num_sessions": 9, "lanes": 3},
    "closed_loop": {"concurrency": 3},
    "open_loop": {"arrivals": {"use": "gamma", "rate": "90/min", "burstiness": 0.5}},
    "poisson": {"rate": "4/s"},
    "gamma": {"rate": "4/s"},
    "constant": {"rate": "0.3/s"},
    "bursts": {"rate": "4/s", "burst": "2 s"},
    "profile": {"rate": "4/s", "levels": [1, 2.5], "level": "1 h", "smooth": True},
    "fixed": {"tokens": 3},
    "uniform": {"low": 3, "high": 4},
    "normal": {"mean": 4.5, "stddev": 1},
    "lognormal": {"mean": 400, "stddev": 300, "most": 900},
    "gamma_lengths": {"mean": 400, "stddev": 300},
    "exponential": {"mean": 40},
    "empirical": {"path": "lengths.csv"},
    "mixed": {"parts": [10, {"use": "exponential", "mean": 40}], "shares": [1, 3]},
    "kill": {"at": "1 s", "kill": "prefill-0", "restart_after": "30 s"},
    "link": {"at": "1 s", "link": "prefill-0", "bandwidth_factor": 0.5},
    "abort": {"at": "1 s", "abort": 3},
    "abort_fraction": {"abort_fraction": 0.1, "within": "1 s"},
    "queue_limit": {"max_queued_requests": 8},
    "prefix_based": {"non_cached_tokens": 512},
    "forecast": {"prefill_token_rate": "20000/s", "decode_requests": 32},
    "busy_threshold": {"threshold": 4},
    "throughput_planner": {"prefill_token": "30 us", "decode_kv_token": "0.25 ns", "max_kv_tokens": 400000},
    "affine": {"decode_base": "10 ms", "decode_per_context_token": "0.25 ns"},
    "table": {"decode": {1: "10 ms"}},
}
"""Settings of built-in components: what they need, and where units and other components stand inside."""

ALL = [(seam, name) for seam, names in BUILT_IN.items() for name in names]


@pytest.mark.parametrize(("seam", "name"), ALL, ids=[name for _, name in ALL])
def test_every_built_in_component_is_described_as_it_is_built(seam, name):
    made = build_component(seam, {"use": name, **NEEDS.get(name, {})}, HERE)
    described = describe_component(made)
    assert (described if isinstance(described, str) else described["use"]) == name
    assert build_component(seam, described, Path("/elsewhere")) == made


def test_a_name_alone_is_a_component_with_its_defaults():
    assert build_component(PrefillPolicy, "fcfs", HERE) == FirstComeFirstServed()
    assert describe_component(FirstComeFirstServed()) == "fcfs"


def test_units_are_of_the_field():
    made = build_component(Workload, {"use": "sessions", **NEEDS["sessions"], "think": "1.5 s"}, HERE)
    assert isinstance(made, Sessions)
    assert made.think_ns == 1_500_000_000
    assert isinstance(made.think_ns, int)
    assert describe_component(made)["think"] == "1500 ms"
    costs = build_component(CostSettings, {"use": "affine", "decode_per_context_token": "0.25 ns"}, HERE)
    assert costs == Affine(decode_per_context_token_ns=0.25)


def test_components_stand_inside_components():
    open_loop = {"use": "open_loop", "arrivals": {"use": "poisson", "rate": "90/min"}}
    assert build_component(Client, open_loop, HERE) == OpenLoop(Poisson(1.5))
    made = build_component(Workload, {"use": "random_lengths", **NEEDS["random_lengths"]}, HERE)
    assert made == RandomLengths(num_requests=3, input_tokens=Fixed(10), output_tokens=Uniform(1, 4))


def test_a_number_is_a_fixed_length():
    assert build_component(Lengths, 7, HERE) == Fixed(7)
    with pytest.raises(ValueError, match="found True"):
        build_component(Lengths, True, HERE)


def test_paths_are_relative_to_the_file():
    made = build_component(Workload, {"use": "mooncake_trace", "path": "t.jsonl"}, HERE)
    assert made == MooncakeTrace(path=HERE / "t.jsonl")
    assert describe_component(made)["path"] == str(HERE / "t.jsonl")


def test_a_component_of_ones_own_goes_by_its_import_path():
    assert build_component(Workload, "tests.support:Given", HERE) == Given()
    assert describe_component(Given()) == {"use": "tests.support:Given", "specs": ()}


def test_objects_stand_for_themselves_where_they_fit():
    client = ClosedLoop(3)
    assert build_component(Client, client, HERE) is client
    with pytest.raises(ValueError, match="ClosedLoop is no RoutingPolicy: it has no method pick"):
        build_component(RoutingPolicy, client, HERE)
    with pytest.raises(ValueError, match="is none of OpenLoop, ClosedLoop"):
        build_component(Client, FirstComeFirstServed(), HERE)


def test_what_is_no_component():
    with pytest.raises(ValueError, match="expected a name or a mapping with `use`, found 3"):
        build_component(AdmissionPolicy, 3, HERE)
    with pytest.raises(ValueError, match="expected a name or a mapping with `use`"):
        build_component(Workload, {"num_requests": 3}, HERE)


def test_settings_without_a_name_change_the_default():
    scenario = small(decode__admission={"reserved_tokens": 7})
    assert scenario.decode.admission == ReserveDecodeTokens(reserved_tokens=7)
