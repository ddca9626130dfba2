"""Laws of clusters whose servers change their roles, start and stop."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.autoscaler import DRAINING, SERVING, Autoscaler, Role, ScalingTimes
from pdsim.core.journal.lines import from_lines, to_line
from pdsim.core.journal.replay import replay
from pdsim.core.messages import ClusterSeen, Drain, FlushCache, InstanceSeen, NewRequest, Send, Serve
from pdsim.policy.planners import SpareSaturation, ThroughputPlanner
from pdsim.policy.protocols import Servers
from pdsim.policy.scaling import Forecast, LoadThresholds
from pdsim.policy.views import ScalingView
from pdsim.scenario.building.cluster import build
from pdsim.scenario.building.machines import state_machines
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.cost import ColdKernels
from pdsim.scenario.sections.servers import ElasticSettings
from pdsim.sim.simulation import Observation, Simulation
from tests.strategies import optimistic_scenarios, scenarios, vllm_scenarios
from tests.support import MILLISECOND, decisions, examples, request, run, small


@dataclass
class Script:
    """Wants what it was told, in turn."""

    wanted: tuple[Servers, ...]
    _turn: int = 0

    def servers(self, view: ScalingView) -> Servers:
        self._turn += 1
        return self.wanted[(self._turn - 1) % len(self.wanted)]


@st.composite
def elastic(draw: st.DrawFn) -> Scenario:
    scenario = draw(st.one_of(scenarios(), optimistic_scenarios(), vllm_scenarios()))
    tp = {"tp": 1, "layer_groups": 0}
    prefill = scenario.pair.prefill.model_copy(update=tp)
    decode = scenario.pair.decode.model_copy(update={"tp": 1})
    max_servers = prefill.instances + decode.instances + draw(st.integers(0, 2))
    splits = [Servers(p, d) for p in range(1, max_servers) for d in range(1, max_servers - p + 1)]
    policy = draw(
        st.one_of(
            st.lists(st.sampled_from(splits), min_size=1, max_size=8).map(lambda wanted: Script(tuple(wanted))),
            st.builds(LoadThresholds, keep_servers=st.booleans(), decode_kv_scale_up=st.sampled_from([0.3, 0.9])),
            st.builds(
                Forecast,
                prefill_token_rate_per_s=st.sampled_from([50.0, 500.0]),
                decode_requests=st.sampled_from([1.0, 3.0]),
                keep_servers=st.booleans(),
            ),
            st.builds(SpareSaturation, keep_servers=st.booleans(), kv_threshold=st.sampled_from([0.2, 0.8])),
            st.builds(
                ThroughputPlanner,
                prefill_token_ns=st.sampled_from([MILLISECOND, 10 * MILLISECOND]),
                decode_base_ns=st.just(MILLISECOND),
                decode_kv_token_ns=st.sampled_from([0, 10_000]),
                max_kv_tokens=st.sampled_from([100, 10_000]),
            ),
        )
    )
    times = st.sampled_from([0, 1, 7 * MILLISECOND, 200 * MILLISECOND])
    settings = ElasticSettings(
        policy=policy,
        max_servers=max_servers,
        interval=f"{draw(st.sampled_from([12, 40, 110]))} ms",
        start_up=f"{draw(times)} ns",
        switch=f"{draw(times)} ns",
        drain_timeout=draw(st.sampled_from([None, "10 ms", "1500 ms"])),
    )
    network = scenario.network.model_copy(update={"staging": None})
    update = {"prefill": prefill, "decode": decode, "network": network, "elastic": settings}
    return scenario.model_copy(update=update)


@given(elastic())
@examples(100)
def test_no_request_is_lost_or_decoded_twice_and_nothing_leaks(scenario: Scenario):
    """check_all_idle has run: LEAK-1 to LEAK-6, of servers that are off, too."""
    traced = run(scenario, checked=True)
    assert traced.result.stall == []
    assert len(traced.records.requests) == len(traced.cluster.requests)
    ended = [
        request_id
        for e in traced.journal
        if e.call == "on_step_done" and e.instance_id.startswith("decode")
        for request_id, _ in e.args[1].ended
    ]
    assert len(ended) == len(set(ended))
    for r in traced.records.requests:
        assert r.outcome == "finished" or (r.outcome == "failed" and "not fit" in r.reason)
    for instance in traced.cluster.instances:
        assert instance.num_available_pages == instance.cache.pool.num_pages


@given(elastic())
@examples(80)
def test_a_drained_instance_is_empty_and_gets_nothing_before_it_serves_again(scenario: Scenario):
    cluster = build(scenario)
    initial = (scenario.pair.prefill.instances, scenario.pair.decode.instances)
    serving = {f"prefill-{i}" for i in range(initial[0])} | {f"decode-{i}" for i in range(initial[0], sum(initial))}

    def record(entry):
        message = entry.args[0] if entry.call == "on_message" else None
        if entry.instance_id == "router" and isinstance(message, Serve):
            serving.add(message.instance_id)
            kinds = [name.partition("-")[2] for name in serving]
            assert len(kinds) == len(set(kinds))  # no server has two roles
        if entry.instance_id == "router" and isinstance(message, Drain):
            serving.remove(message.instance_id)
            assert {name.partition("-")[0] for name in serving} == {"prefill", "decode"}
        if entry.instance_id == "router":
            sent = [command.message for command in entry.returned if hasattr(command, "message")]
            assert all({new.prefill_id, new.decode_id} <= serving for new in sent if isinstance(new, NewRequest))
        if isinstance(message, FlushCache):
            instance = simulation.instance(entry.instance_id)
            assert instance.requests() == []
            assert instance.cache.pool.num_free == instance.cache.pool.num_pages

    simulation = Simulation(cluster, Observation(journal=record))
    simulation.run()


@given(elastic())
@examples(25)
def test_a_server_that_gets_a_role_compiles_its_kernels_again(scenario: Scenario):
    kernels = ColdKernels.model_construct(prefill=30 * MILLISECOND)
    traced = run(scenario.model_copy(update={"cost": scenario.cost.model_copy(update={"cold_kernels": kernels})}))
    left = [
        (entry.instance_id, entry.args[1])
        for entry in traced.journal
        if entry.call == "on_message" and isinstance(entry.args[0], FlushCache)
    ]
    compiled = set()
    for step in traced.records.steps:
        if step.kind == "prefill" and step.instance_id.startswith("prefill"):
            num_left = sum(name == step.instance_id and at_ns <= step.start_ns for name, at_ns in left)
            kernel = step.instance_id, num_left, (step.num_requests - 1).bit_length()
            assert (step.compiling_ns > 0) == (kernel not in compiled)
            compiled.add(kernel)


@given(elastic())
@examples(60)
def test_many_steps_at_once_are_single_steps_and_runs_replay(scenario: Scenario):
    many, single = run(scenario), run(scenario, single_steps=True)
    assert decisions(many.journal) == decisions(single.journal)
    entries = list(from_lines(map(to_line, many.journal)))
    assert replay(entries, state_machines(resolve(scenario))) == len(entries)


@given(elastic())
@examples(60)
def test_gpu_hours_are_those_of_servers_that_are_not_off(scenario: Scenario):
    traced = run(scenario)
    end_ns = max(r.end_ns for r in traced.records.requests)
    rows = sorted(traced.records.servers, key=lambda row: row.time_ns)
    on, last_ns, gpu_ns = 0, 0, 0
    roles: dict[int, str] = {}
    for row in rows:
        now_ns = min(row.time_ns, end_ns)
        gpu_ns += on * (now_ns - last_ns)
        last_ns = now_ns
        roles[row.server] = row.role
        on = sum(role != "" for role in roles.values())
        assert on <= scenario.max_servers
    gpu_ns += on * (end_ns - last_ns)
    assert traced.result.summary()["pdsim"]["gpu_hours"] == pytest.approx(gpu_ns / 3.6e12)


@dataclass
class OneLess:
    """Wants a prefill server less, and keeps what it sees."""

    seen: list[Role] = field(default_factory=list)

    def servers(self, view: ScalingView) -> Servers:
        self.seen = [view.prefill, view.decode]
        return Servers(view.prefill.num_servers - 1, view.decode.num_servers)


loads = st.tuples(st.integers(0, 3), st.integers(0, 9), st.floats(0, 1))


@given(st.lists(loads, min_size=2, max_size=4), st.lists(loads, min_size=1, max_size=4))
def test_a_policy_sees_each_role_and_the_least_loaded_server_goes(prefill, decode):
    """Of equal ones the last. Requests are added up; the use of pages is that of a mean server."""
    policy, servers = OneLess(), Servers(len(prefill), len(decode))
    times = ScalingTimes(interval_ns=1, start_up_ns=1, switch_ns=1)
    autoscaler = Autoscaler(initial=servers, max_servers=sum(servers), times=times, policy=policy, router_id="router")
    names = [f"{'prefill' if i < len(prefill) else 'decode'}-{i}" for i in range(sum(servers))]
    seen = [InstanceSeen(name, *load, False) for name, load in zip(names, [*prefill, *decode], strict=True)]
    commands = autoscaler.on_message(ClusterSeen(tuple(seen), 0, 0, 0, 0, 0, 0), 1)
    for role, own in zip(policy.seen, (prefill, decode), strict=True):
        requests, queued, use = (sum(load) for load in zip(*own, strict=True))
        assert (role.num_servers, role.num_requests, role.num_queued) == (len(own), requests, queued)
        assert role.page_use == pytest.approx(use / len(own))
    drained = min(range(len(prefill)), key=lambda i: (prefill[i][0], -i))
    assert commands[0] == Send("router", Drain(f"prefill-{drained}"))


def test_a_switch_drains_then_takes_its_time_and_a_start_takes_its_own():
    """Two switch: the prefill server is idle at once, the decode server when its request has ended."""
    load = [request(0, 10, 60), request(1, 10, 5, arrival_ns=2_000 * MILLISECOND)]
    policy = Script((Servers(1, 2), Servers(1, 2), Servers(2, 1)))
    settings = ElasticSettings(policy=policy, max_servers=3, interval="100 ms", start_up="250 ms", switch="40 ms")
    scenario = small(*load, prefill__instances=1, decode__instances=1).model_copy(update={"elastic": settings})
    traced = run(scenario, checked=True)
    ms = [(row.server, row.time_ns / MILLISECOND, row.role, row.state) for row in traced.records.servers]
    assert ms[:3] == [(0, 0, "prefill", SERVING), (1, 0, "decode", SERVING), (2, 0, "", "off")]
    assert ms[3:5] == [(2, 100, "decode", "starting"), (2, 350, "decode", SERVING)]
    assert ms[5] == (2, 600, "decode", DRAINING)  # wanted at 300 ms already; but the other one is not to be the last
    assert all(r.outcome == "finished" for r in traced.records.requests)
