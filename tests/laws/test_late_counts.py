"""Laws of a router whose loads count streams: requests whose prompt is computed and whose client receives tokens."""

import pytest
from hypothesis import given

from pdsim.core.messages import Arrival, Finished, FirstToken, PrefillDone, Send
from pdsim.core.routing.role_router import RoleRouter
from pdsim.core.routing.router import Router
from pdsim.core.sequence import Spans
from pdsim.policy.routing import LeastLoaded
from pdsim.scenario.yaml_file import ConfigError
from tests.strategies import fault_schedules, scenarios
from tests.support import request, run, run_both_ways, small, small_aggregated


def counting_streams(scenario):
    return scenario.model_copy(update={"router": scenario.router.model_copy(update={"counts": "streams"})})


@given(scenarios())
def test_many_steps_at_once_are_single_steps(scenario):
    run_both_ways(counting_streams(scenario))


@given(fault_schedules(scenarios()))
def test_no_load_is_left_when_things_go_wrong(scenario):
    assert run(counting_streams(scenario)).result.stall == []


def router():
    roles = (RoleRouter([f"{role}-{i}" for i in range(2)], LeastLoaded(), role) for role in ("prefill", "decode"))
    prefill, decode = roles
    return Router(prefill=prefill, decode=decode, counts_streams=True)


def sent_to(router, i):
    commands = router.on_message(Arrival(i, Spans.of(i, 10), 4), 0)
    return {command.to for command in commands if isinstance(command, Send)}


def loads_of(router):
    return {load.instance_id: load.num_requests for role in router.roles.values() for load in role.loads}


@pytest.mark.parametrize("order", [(PrefillDone, FirstToken), (FirstToken, PrefillDone)])
def test_a_request_counts_at_both_instances_from_its_stream_to_its_end(order):
    first = router()
    assert sent_to(first, 0) == sent_to(first, 1) == {"prefill-0", "decode-0"}  # nobody is counted yet
    first.on_message(order[0](0), 1)
    assert not any(loads_of(first).values())
    first.on_message(order[1](0), 2)
    assert loads_of(first) == {"prefill-0": 1, "prefill-1": 0, "decode-0": 1, "decode-1": 0}
    assert sent_to(first, 2) == {"prefill-1", "decode-1"}
    first.on_message(Finished(0), 3)
    assert not any(loads_of(first).values())


def test_a_burst_goes_to_one_instance():
    """Eight requests at once, whose first token comes later: with routed requests the least loaded takes turns."""
    specs = [request(i, 40, 4) for i in range(8)]
    changes = {"prefill__instances": 4, "router": {"use": "least_loaded"}}
    found = {}
    for counts in ("routed", "streams"):
        scenario = small(*specs, **changes)
        scenario = counting_streams(scenario) if counts == "streams" else scenario
        found[counts] = [one.prefill_id for one in run(scenario).records.requests]
    assert sorted(found["routed"]) == sorted([f"prefill-{i}" for i in range(4)] * 2)
    assert found["streams"] == ["prefill-0"] * 8


def test_other_gateways_do_not_count_so():
    with pytest.raises(ConfigError, match="for prefill and decode servers only"):
        small_aggregated(request(0, 4, 4), router={"counts": "streams"})
