"""Laws of priorities and of shedding."""

from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.journal.lines import from_lines, to_line
from pdsim.core.journal.replay import replay
from pdsim.core.messages import Arrival, KvGranted, NewRequest, PrefillStep
from pdsim.policy.pages import LastAdmittedFirst, LowestPriorityFirst
from pdsim.policy.prefill import HighestPriorityFirst
from pdsim.policy.routing import QueueLimit
from pdsim.scenario.building.machines import state_machines
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.schema import Scenario
from pdsim.workload.client import OpenLoop
from pdsim.workload.request_spec import Streams
from tests.strategies import aggregated_scenarios, scenarios, vllm_scenarios
from tests.support import MILLISECOND, Given, Traced, decisions, examples, request, run, small, small_aggregated

CLASSES = {"first": 2, "second": 1, "third": 0, "last": -1}


@st.composite
def prioritized(draw: st.DrawFn, clusters: st.SearchStrategy[Scenario], *, sheds: bool = False) -> Scenario:
    scenario = draw(clusters)
    specs = [
        spec._replace(request_class=draw(st.sampled_from(list(CLASSES))))
        for spec in scenario.workload.requests(Streams(0))
    ]
    present = {spec.request_class for spec in specs}
    update: dict[str, object] = {
        "workload": Given(tuple(specs)),
        "priorities": {name: priority for name, priority in CLASSES.items() if name in present},
    }
    for role in ("prefill", "aggregated"):
        if (settings := getattr(scenario, role)) is not None:
            update[role] = settings.model_copy(update={"policy": HighestPriorityFirst()})
    if scenario.aggregated is not None:
        threshold = {"priority_preemption_threshold": draw(st.sampled_from([None, 0, 1]))}
        update["aggregated"] = update["aggregated"].model_copy(update=threshold)
    role = "decode" if scenario.aggregated is None else "aggregated"
    victim = LowestPriorityFirst(last_arrived=draw(st.booleans()))
    settings = update.get(role) or getattr(scenario, role)
    update[role] = settings.model_copy(update={"preemption": victim})
    if sheds:
        limit = QueueLimit(max_queued_requests=draw(st.integers(1, 4)))
        update["router"] = scenario.router.model_copy(update={"shedding": limit})
        update["client"] = OpenLoop()
    return scenario.model_copy(update=update)


ANY = st.one_of(scenarios(), vllm_scenarios(), aggregated_scenarios())


def priorities(traced: Traced) -> dict[int, int]:
    return {e.args[0].request_id: e.args[0].priority for e in traced.journal if isinstance(e.args[0], NewRequest)}


@given(prioritized(ANY))
@examples(60)
def test_priorities_lose_nobody_and_steps_may_be_joined(scenario: Scenario):
    many, single = run(scenario, checked=True), run(scenario, single_steps=True)
    assert many.result.stall == []
    assert decisions(many.journal) == decisions(single.journal)
    assert all(r.outcome == "finished" or "not fit" in r.reason for r in many.records.requests)


@given(prioritized(ANY, sheds=True))
@examples(60)
def test_a_request_that_is_shed_leaves_nothing_behind_and_the_run_replays(scenario: Scenario):
    traced = run(scenario, checked=True)
    assert traced.result.stall == []
    assert all(r.outcome in ("finished", "failed") for r in traced.records.requests)
    entries = list(from_lines(map(to_line, traced.journal)))
    assert replay(entries, state_machines(resolve(scenario))) == len(entries)


@given(prioritized(ANY, sheds=True))
@examples(60)
def test_nobody_is_shed_while_a_place_is_free_or_one_of_a_lower_priority_waits(scenario: Scenario):
    """A model of the queue, from what the router is told."""
    limit = scenario.router.shedding.max_queued_requests
    waiting: dict[int, int] = {}
    for entry in run(scenario).journal:
        if entry.instance_id != "router":
            continue
        message, shed = entry.args[0], []
        if isinstance(message, Arrival):
            shed = [c.request_id for c in entry.returned if type(c).__name__ == "Failed" and "shed" in c.reason]
            if shed == [message.request_id]:
                assert len(waiting) >= limit
                assert message.priority <= min(waiting.values())
            elif shed:
                assert len(waiting) >= limit
                assert waiting[shed[0]] == min(waiting.values()) < message.priority
                del waiting[shed[0]]
            if shed != [message.request_id]:
                waiting[message.request_id] = message.priority
        elif type(message).__name__ in ("FirstToken", "Finished", "Failed"):
            waiting.pop(message.request_id, None)
        assert len(waiting) <= limit


@given(prioritized(scenarios()))
@examples(60)
def test_decode_grants_by_priority(scenario: Scenario):
    """Whoever is granted has the highest priority of all that wait there."""
    traced = run(scenario)
    priority = priorities(traced)
    waiting: dict[str, set[int]] = {}
    for entry in traced.journal:
        where = entry.instance_id
        if not where.startswith("decode") or "." in where:
            continue
        if entry.call == "on_message" and isinstance(entry.args[0], NewRequest) and not entry.returned:
            waiting.setdefault(where, set()).add(entry.args[0].request_id)
        if entry.call == "next_step":
            for command in entry.returned[1]:
                granted = getattr(command, "message", None)
                if isinstance(granted, KvGranted):
                    assert priority[granted.request_id] == max(priority[i] for i in waiting[where])
                    waiting[where].discard(granted.request_id)


def test_a_crowd_is_computed_by_priority_and_the_order_of_arrival():
    """All wait for the first; a limit of 16 tokens computes one at a time."""
    load = [request(i, 64, 1, arrival_ns=i * MILLISECOND, request_class=name) for i, name in enumerate("abcabc")]
    changes = {"prefill__max_prefill_tokens": 16, "prefill__chunked_prefill_tokens": 0}
    traced = run(small(*load, priorities={"a": 0, "b": 5, "c": 9}, **changes))
    steps = [e.returned[0] for e in traced.journal if e.call == "next_step" and e.instance_id == "prefill-0"]
    order = [chunk.request_id for step in steps if isinstance(step, PrefillStep) for chunk in step.chunks]
    assert order == [0, 2, 5, 1, 4, 3]


def test_vllm_preempts_by_priority():
    load = [request(0, 8, 4, request_class="a")]
    by_priority = LowestPriorityFirst(last_arrived=True)
    assert small_aggregated(*load, engine="vllm", priorities={"a": 1}).aggregated.preemption == by_priority
    assert small(*load, engine="vllm", priorities={"a": 1}).pair.decode.preemption == by_priority
    assert small_aggregated(*load, engine="vllm").aggregated.preemption == LastAdmittedFirst()


def test_a_full_queue_sheds_the_last_of_the_lowest_priority():
    load = [request(i, 400, 2, arrival_ns=i * MILLISECOND, request_class=name) for i, name in enumerate("ababb")]
    traced = run(small(*load, priorities={"b": 1}, router={"shedding": {"max_queued_requests": 2}}))
    assert [r.request_id for r in traced.records.requests if r.outcome == "failed"] == [0, 2, 4]


def test_who_runs_gives_way_to_a_priority_that_is_higher_by_more_than_the_threshold():
    """One slot: the second is not far enough above the first, the third is."""
    classes = ["low", "mid", "high"]
    load = [request(i, 8, 20, arrival_ns=i * 20 * MILLISECOND, request_class=name) for i, name in enumerate(classes)]
    traced = run(
        small_aggregated(*load, priorities={"low": 0, "mid": 10, "high": 11}, aggregated__max_running_requests=1)
    )
    low, mid, high = traced.records.requests
    assert (low.num_retractions, mid.num_retractions, high.num_retractions) == (1, 0, 0)
    assert high.end_ns < mid.first_token_ns < mid.end_ns < low.end_ns
