"""Failed requests: what is refused before a run could not finish in it, and what fails in a run is counted once."""

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.metrics.explanation.failures import failure_text, failures_in, failures_of
from pdsim.metrics.records import RequestRecord
from pdsim.scenario.building.cluster import build
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import ConfigError
from pdsim.sim.result import RunResult
from pdsim.sim.simulation import Simulation, simulate
from tests.support import examples, request, small

SECOND = 10**9


def simulate_unchecked(scenario: Scenario) -> RunResult:
    """The run of a scenario that may be refused."""
    with patch("pdsim.scenario.building.cluster.check_requests"):
        return Simulation(build(scenario)).run()


def is_refused(scenario: Scenario) -> bool:
    try:
        build(scenario)
    except ConfigError:
        return True
    return False


admissions = st.integers(0, 200).map(lambda n: {"use": "reserve_decode_tokens", "reserved_tokens": n}) | st.just(
    "reserve_max_output"
)


@given(
    pool=st.integers(20, 300),
    page=st.sampled_from([1, 4, 16]),
    admission=admissions,
    prompt=st.integers(1, 150),
    output=st.integers(1, 100),
)
@examples(60)
def test_a_request_is_refused_before_the_run_if_and_only_if_it_would_not_finish_alone(
    pool, page, admission, prompt, output
):
    scenario = small(request(0, prompt, output), page_size=page, decode__pool_tokens=pool, decode__admission=admission)
    result = simulate_unchecked(scenario)
    is_finished = [r.outcome for r in result.records.requests] == ["finished"]
    assert is_finished == (not is_refused(scenario))


@given(ring=st.integers(0, 8_000_000), prompts=st.lists(st.integers(1, 60), min_size=1, max_size=4))
@examples(60)
def test_a_ring_is_refused_if_and_only_if_every_request_would_fail_on_it(ring, prompts):
    specs = [request(i, prompt, 2, arrival_ns=i * SECOND) for i, prompt in enumerate(prompts)]
    scenario = small(*specs, prefill__tp=2, network__staging={"ring": f"{ring} B"})
    result = simulate_unchecked(scenario)
    failures = failures_in(result.summary())
    num_failed = sum(failure.num_requests for failure in failures)
    assert (num_failed == len(prompts)) == is_refused(scenario)
    assert {failure.relief for failure in failures} <= {"network.staging.ring"}


@given(
    slots=st.integers(1, 3),
    outputs=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    timeout_ms=st.integers(10, 600),
    fraction=st.sampled_from([0, 0.5]),
)
@examples(60)
def test_each_failed_request_is_counted_once_by_its_reason(slots, outputs, timeout_ms, fraction):
    faults = [{"abort_fraction": fraction, "within": "1 s"}] if fraction else []
    scenario = small(
        *(request(i, 8, output) for i, output in enumerate(outputs)),
        decode__max_running_requests=slots,
        decode__extra_slots=0,
        health={"bootstrap_timeout": f"{timeout_ms} ms", "max_retries": 0},
        faults=faults,
    )
    result = simulate(scenario)
    summary = result.summary()
    failures = failures_in(summary)
    assert sum(failure.num_requests for failure in failures) == summary["pdsim"]["failed"]
    records = {record.request_id: record for record in result.records.requests}
    for failure in failures:
        is_late = "max_running_requests" in failure.reason
        assert failure.relief == ("decode.max_running_requests" if is_late else "")
        assert failure.is_wanted == (failure.reason == "aborted by the client")
        assert records[failure.example].reason.replace("decode-0", "decode") == failure.reason
    assert bool(failure_text(summary)) == any(not failure.is_wanted for failure in failures)


@pytest.mark.parametrize("fault", [{"at": 0, "kill": "decode-0"}, {"at": 0, "link": "decode-0", "bandwidth_factor": 0}])
def test_what_faults_of_servers_bring_about_is_no_failed_run(fault):
    summary = simulate(small(request(0, 8, 2), faults=[fault], health={"max_retries": 0})).summary()
    assert summary["pdsim"]["failed"] == 1
    assert failure_text(summary) == ""


@pytest.mark.parametrize(
    ("reason", "is_wanted"),
    [
        ("decode-0 was lost", True),
        ("no transfer from prefill-0 to decode-0 within transfer_timeout 3 s", True),
        ("a prompt of 900 tokens does not fit the 576 tokens of decode-0", False),
    ],
)
def test_no_fault_makes_a_request_too_large(reason, is_wanted):
    """A scenario with faults asks for the failures that faults bring about, and for no other."""
    failed = RequestRecord(0, 900, 9, 0, outcome="failed", reason=reason)
    assert [failure.is_wanted for failure in failures_of([failed], has_faults=True)] == [is_wanted]
    assert [failure.is_wanted for failure in failures_of([failed], has_faults=False)] == [False]


def test_reasons_that_differ_in_their_instance_alone_are_one():
    specs = [request(i, 8, 40) for i in range(8)]
    changes = {"max_running_requests": 1, "extra_slots": 0, "instances": 2}
    scenario = small(
        *specs,
        **{f"decode__{name}": value for name, value in changes.items()},
        health={"bootstrap_timeout": "100 ms", "max_retries": 0},
    )
    (failure,) = failures_in(simulate(scenario).summary())
    assert failure.num_requests == 6
    assert failure.reason == "decode granted no pages within bootstrap_timeout 0.1 s: max_running_requests was reached"


def test_times_of_nothing_are_none():
    scenario = small(request(0, 8, 2), faults=[{"at": 0, "kill": "decode-0"}], health={"max_retries": 0})
    summary = simulate(scenario).summary()
    assert {value for name, value in summary.items() if name.endswith("_ms")} == {None}
    one_token = simulate(small(request(0, 8, 1))).summary()
    assert one_token["mean_tpot_ms"] is None
    assert one_token["mean_ttft_ms"] > 0
