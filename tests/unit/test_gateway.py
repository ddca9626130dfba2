"""SGLang's gateway holds the first token until prefill has answered, unless the scenario says that there is none."""

import pytest

from pdsim.scenario.building.sizing import resolve
from pdsim.sim.simulation import simulate
from tests.support import request, small, small_aggregated

SECOND = 10**9
KERNELS = {"cost": "kernels", "front_end": None}


def waits(scenario):
    return resolve(scenario).front_end.waits_for_prefill


@pytest.mark.parametrize("front_end", [None, {"latency_in": "40 ms"}, {"latency_out": "1 ms"}])
def test_the_engine_decides_where_the_scenario_does_not(front_end):
    changes = {"cost": "kernels", "front_end": front_end}
    assert waits(small(request(0, 8, 2), **changes))
    assert not waits(small(request(0, 8, 2), engine="vllm", decode__allocation="prefill_complete", **changes))
    assert not waits(small_aggregated(request(0, 8, 2), **changes))


def test_without_a_front_end_there_is_no_gateway():
    assert not waits(small(request(0, 8, 2)))
    assert resolve(small(request(0, 8, 2))).front_end.is_none


@pytest.mark.parametrize("given", [True, False])
def test_what_the_scenario_says_stays_at_the_ends_of_the_range(given):
    scenario = small(request(0, 8, 2), cost="kernels", front_end={"kind": "engine", "waits_for_prefill": given})
    assert "outside" in scenario.uncertain
    assert [waits(end) for end in scenario.ends] == [given, given]
    assert len({resolve(end).front_end.latency_in for end in scenario.ends}) == 2


def test_a_prompt_behind_it_on_prefill_holds_its_first_token():
    """Prefill answers when it looks at its transfers: here after the forward of the second prompt."""
    specs = [request(0, 8, 4), request(1, 60, 4, arrival_ns=2_000_000)]
    held, free = (
        simulate(small(*specs, front_end={"latency_in": "1 ms", "waits_for_prefill": is_held})).records.requests[0]
        for is_held in (True, False)
    )
    assert held.streamed_ns == free.streamed_ns == free.first_token_ns
    assert held.first_token_ns > held.streamed_ns
