"""Laws of the router's queue, which holds requests back while all instances have prompts to compute."""

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.messages import Arrival, Cancel, Failed, PrefillDone, Send
from pdsim.core.routing.held_requests import HeldRequests
from pdsim.core.routing.role_router import RoleRouter
from pdsim.core.routing.router import Router
from pdsim.core.sequence import Spans
from pdsim.policy.dynamo import DynamoKv
from pdsim.policy.queueing import BusyThreshold
from pdsim.scenario.yaml_file import ConfigError
from tests.strategies import fault_schedules, scenarios
from tests.support import examples, request, run, run_both_ways, small, small_aggregated

FORWARD = 100
ORDERS = st.sampled_from(["fcfs", "lcfs", "wspt"])
thresholds = st.sampled_from([0.0, 0.5, 4.0])


def holding(scenario, threshold, order="fcfs"):
    router = {"prefill": DynamoKv(), "decode": DynamoKv(), "queue": BusyThreshold(threshold, order)}
    return scenario.model_copy(update={"router": scenario.router.model_copy(update=router)})


@examples(25)
@given(scenarios(), thresholds, ORDERS)
def test_many_steps_at_once_are_single_steps(scenario, threshold, order):
    run_both_ways(holding(scenario, threshold, order))


@given(fault_schedules(scenarios()), thresholds)
def test_no_request_is_left_when_things_go_wrong(scenario, threshold):
    assert run(holding(scenario, threshold)).result.stall == []


@examples(20)
@given(scenarios())
def test_a_threshold_that_no_load_reaches_changes_nothing(scenario):
    held = holding(scenario, 1e9)
    free = held.model_copy(update={"router": held.router.model_copy(update={"queue": None})})
    assert run(held).records.requests == run(free).records.requests


def router(threshold, order, num_prefill=2):
    prefill, decode = (
        RoleRouter([f"{role}-{i}" for i in range(count)], DynamoKv(), role)
        for role, count in (("prefill", num_prefill), ("decode", 1))
    )
    return Router(prefill=prefill, decode=decode, held=HeldRequests(BusyThreshold(threshold, order), prefill, FORWARD))


arrivals = st.tuples(st.integers(1, 300), st.integers(0, 9))


@given(st.lists(arrivals | st.just("done") | st.just("cancelled"), max_size=40), thresholds, ORDERS)
def test_none_is_held_beside_an_idle_instance_and_the_first_of_the_order_leaves(events, threshold, order):
    """A naive twin: lists that are sorted at each departure."""
    machine = router(threshold, order)
    tokens, held, computing = {}, [], {}
    for now_ns, event in enumerate(events):
        if event == "done" and computing:
            message = PrefillDone(next(iter(computing)))
            del computing[message.request_id]
        elif event == "cancelled" and held:
            message = Cancel(held.pop(0)[1], "by its client")
        elif isinstance(event, tuple):
            tokens[now_ns], priority = event
            arrival_s = now_ns / 1e9
            ranks = {"fcfs": arrival_s - priority, "lcfs": -arrival_s - priority, "wspt": event[0] / (1 + priority)}
            held.append((ranks[order], now_ns))
            message = Arrival(now_ns, Spans.of(now_ns, event[0]), 4, priority=priority)
        else:
            continue
        commands = machine.on_message(message, now_ns)
        sent = [one for one in commands if isinstance(one, Send) and one.to.startswith("prefill")]
        for one in sent:
            queued = {f"prefill-{i}": 0 for i in range(2)}
            for name, number in computing.values():
                queued[name] += number
            assert min(queued.values()) <= threshold * FORWARD
            held.sort()
            assert one.message.request_id == held.pop(0)[1]
            computing[one.message.request_id] = (one.to, tokens[one.message.request_id])
        assert [isinstance(one, Failed) for one in commands] == [True] * isinstance(message, Cancel) + [False] * (
            2 * len(sent)
        )
        if held:
            queued = {
                f"prefill-{i}": sum(n for name, n in computing.values() if name == f"prefill-{i}") for i in (0, 1)
            }
            assert min(queued.values()) > threshold * FORWARD


def test_shortest_first_has_the_lowest_mean_ttft():
    """Eight prompts at once, the longest first, on one aggregated instance that gets one prompt at a time."""
    specs = [request(i, 800 - 100 * i, 2) for i in range(8)]

    def mean_ttft_ns(order):
        queue = {"use": "busy_threshold", "threshold": 0, "order": order}
        found = run(small_aggregated(*specs, router={"prefill": "dynamo_kv", "queue": queue})).records.requests
        return fmean(one.first_token_ns - one.arrival_ns for one in found)

    assert mean_ttft_ns("fcfs") > 1.3 * mean_ttft_ns("wspt")


def test_the_queue_needs_dynamos_kv_mode():
    with pytest.raises(ConfigError, match=r"router\.queue: Dynamo's router holds requests in its kv mode only"):
        small(request(0, 10, 2), router={"queue": {"threshold": 4}})
