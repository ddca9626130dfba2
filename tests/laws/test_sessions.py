"""Laws of session affinity: a session stays where it is until it has been idle for its time to live."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.journal.message_json import from_json, to_json
from pdsim.core.messages import Arrival, Drain, Finished, PrefillDone, Serve
from pdsim.core.routing.role_router import RoleRouter, RoutedLoad
from pdsim.core.routing.router import Router
from pdsim.core.sequence import Spans
from pdsim.policy.routing import RandomChoice, RoundRobin
from pdsim.policy.sessions import Manual, SessionAffinity, StickyLeastLoaded
from tests.support import run, small

NAMES = ["a", "b", "c"]
TTL_NS = 100

steps = st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 80), st.integers(0, 3)), max_size=40)


@given(steps)
def test_a_session_stays_until_it_was_idle_for_its_time(steps):
    """Twin: the requests of each session that are there, and when the last one left."""
    role = RoleRouter(NAMES, SessionAffinity(TTL_NS, RandomChoice(3)), "prefill")
    live, places, idle_since = [], {}, {}
    now_ns = 0
    for number, (session, gap_ns, num_ended) in enumerate(steps):
        now_ns += gap_ns
        bound = places.get(session) if session >= 0 else None
        is_there = any(s == session for _, s, _ in live)
        if bound and not is_there and now_ns >= idle_since[session] + TTL_NS:
            bound = None
        picked = role.pick(Spans.of(number, 10), now_ns, "", number, session)
        assert bound is None or picked == bound
        if session >= 0:
            places[session] = picked
        live.append((number, session, picked))
        for _ in range(min(num_ended, len(live))):
            ended, of_session, place = live.pop(0)
            role.release(place, 10, ended, now_ns)
            idle_since[of_session] = now_ns


def test_a_session_whose_instance_drains_moves_and_stays_there():
    role = RoleRouter(NAMES, SessionAffinity(TTL_NS, RoundRobin()), "prefill")
    assert [role.pick(Spans.of(i, 10), 0, "", i, 1) for i in range(3)] == ["a"] * 3
    role.note(Drain("a"))
    assert len({role.pick(Spans.of(i, 10), 0, "", i, 1) for i in range(3, 9)} - {"a"}) == 1


def test_a_role_with_one_instance_asks_no_policy_and_keeps_no_session():
    role = RoleRouter(["a"], SessionAffinity(TTL_NS, otherwise=None), "prefill")
    assert [role.pick(Spans.of(i, 10), 0, "", i, session=i) for i in range(3)] == ["a"] * 3
    for i in range(3):
        role.release("a", 10, i)
    assert role.loads == [RoutedLoad("a")]


def test_each_role_keeps_a_session_until_its_own_requests_have_left():
    """Prefill is idle from PrefillDone on, decode from the end."""
    prefill, decode = (
        RoleRouter([f"{role}-{i}" for i in range(9)], SessionAffinity(TTL_NS, RandomChoice(1)), role)
        for role in ("prefill", "decode")
    )
    router = Router(prefill=prefill, decode=decode)
    arrival = Arrival(1, Spans.of(1, 10), 5, session=4)
    router.on_message(arrival, 0)
    router.on_message(PrefillDone(1), 10)
    router.on_message(Finished(1), 50)
    for role, last_ns in ((prefill, 10), (decode, 50)):
        role.session, role.now_ns = 4, last_ns + TTL_NS - 1
        assert role.session_instance(TTL_NS)
        role.now_ns += 1
        assert not role.session_instance(TTL_NS)


@pytest.mark.parametrize(
    ("more", "num_fields"), [({}, 4), ({"ignores_eos": True}, 5), ({"session": 3}, 6), ({"session": 3, "agent": 2}, 8)]
)
def test_a_journal_has_sessions_only_where_there_are_any(more, num_fields):
    arrival = Arrival(1, Spans.of(1, 9), 5, **more)
    assert from_json(to_json(arrival)) == arrival
    assert len(to_json(arrival)["Arrival"]) == num_fields


def conversations(router):
    """Turns of 8 conversations; a turn's KV is where the turn before it was computed."""
    workload = {"use": "sessions", "num_sessions": 8, "num_turns": 4, "input_tokens": 200, "output_tokens": 3}
    client = {"use": "closed_loop", "concurrency": 3}
    return small(workload=workload, client=client, prefill__instances=3, router=router, prefill__radix_cache=True)


def num_computed_tokens(router):
    requests = run(conversations(router)).records.requests
    return sum(one.num_prompt_tokens - one.num_prefill_cached_tokens for one in requests)


def test_turns_of_a_session_find_what_earlier_turns_left():
    """Each new token is computed once, and of earlier turns only outputs and the ends of pages."""
    kept = num_computed_tokens({"use": "session_affinity", "otherwise": "round_robin"})
    assert 8 * 4 * 200 <= kept <= 8 * 4 * 200 + 8 * 3 * (3 + 4)
    assert 1.25 * kept < num_computed_tokens("round_robin")


gaps_ns = st.sampled_from([0, 10, 50, 100])
moves = st.lists(st.tuples(st.integers(-1, 2), gaps_ns, st.integers(0, 3), st.integers(0, 4)), max_size=40)
COUNTS = {
    "random": lambda live, name: 0,
    "min_load": lambda live, name: sum(place == name for _, _, place in live),
    "min_group": lambda live, name: len({one for _, one, place in live if place == name and one >= 0}),
}


@given(moves, st.sampled_from(list(COUNTS)), st.sampled_from([0, 50, 70]))
def test_manual_is_its_twin(moves, mode, interval_ns):
    """Twin: a table of the sessions' instances. Every interval_ns all sessions leave it that were idle for max_idle."""
    role = RoleRouter(NAMES, Manual(mode, TTL_NS, interval_ns), "prefill")
    table, last_ns, live, down = {}, {}, [], set()
    now_ns, every_ns = 0, interval_ns or 10**9
    for number, (session, gap_ns, num_ended, turned) in enumerate(moves):
        for due_ns in range(now_ns // every_ns * every_ns + every_ns, now_ns + gap_ns + 1, every_ns):
            table = {one: places for one, places in table.items() if due_ns - last_ns[one] < TTL_NS}
        now_ns += gap_ns
        if turned < 3 and len(down ^ {NAMES[turned]}) < 3:
            down ^= {NAMES[turned]}
            role.note((Drain if NAMES[turned] in down else Serve)(NAMES[turned]))
        up = [name for name in NAMES if name not in down]
        picked = role.pick(Spans.of(number, 10), now_ns, "", number, session)
        if session < 0:
            assert picked in up
        elif kept := [name for name in table.get(session, []) if name in up]:
            assert picked == kept[0]
        else:
            assert COUNTS[mode](live, picked) == min(COUNTS[mode](live, name) for name in up)
            table[session] = [*table.get(session, [])[-1:], picked]
        last_ns[session] = now_ns
        live.append((number, session, picked))
        for _ in range(min(num_ended, len(live))):
            ended, _, place = live.pop(0)
            role.release(place, 10, ended, now_ns)


def test_a_session_remembers_two_instances():
    """It returns to the first of them that is up."""
    role = RoleRouter(NAMES, Manual(), "prefill")

    def picked():
        return role.pick(Spans.of(0, 10), 0, session=1)

    first = picked()
    role.note(Drain(first))
    second = picked()
    assert second != first
    role.note(Serve(first))
    assert picked() == first
    role.note(Drain(first))
    role.note(Drain(second))
    third = picked()
    assert {first, second, third} == {*NAMES}
    role.note(Serve(first))
    assert picked() == third


@pytest.mark.parametrize(("now_ns", "is_kept"), [(149, True), (150, False)])
def test_a_session_is_forgotten_when_the_router_looks(now_ns, is_kept):
    """The router looks every 50 ns. The session's instance is the busiest, so a forgotten session moves."""
    role = RoleRouter(NAMES, Manual("min_load", TTL_NS, 50), "prefill")
    first = role.pick(Spans.of(0, 10), 50, session=1)
    assert (role.pick(Spans.of(0, 10), now_ns, session=1) == first) == is_kept


SECOND = 10**9
long_gaps_ns = st.sampled_from([0, 20 * SECOND, 60 * SECOND, 100 * SECOND])


@given(st.lists(st.tuples(st.integers(-1, 3), long_gaps_ns, st.integers(0, 3)), max_size=40))
def test_sticky_least_loaded_is_its_twin(calls):
    """Twin: a list of the sessions' last requests, which loses old ones at a request 60 s after the last look."""
    role = RoleRouter(NAMES, StickyLeastLoaded(120 * SECOND), "prefill")
    requests, now_ns, looked_ns, down = [], 0, 0, set()
    for number, (session, gap_ns, turned) in enumerate(calls):
        now_ns += gap_ns
        if now_ns - looked_ns >= 60 * SECOND:
            requests, looked_ns = [one for one in requests if now_ns - one[2] < 120 * SECOND], now_ns
        if turned < 3 and len(down ^ {NAMES[turned]}) < 3:
            down ^= {NAMES[turned]}
            role.note((Drain if NAMES[turned] in down else Serve)(NAMES[turned]))
        up = [name for name in NAMES if name not in down]
        picked = role.pick(Spans.of(number, 10), now_ns, "", number, session)
        bound = {one: place for one, place, _ in requests}
        counts = {name: list(bound.values()).count(name) for name in up}
        if bound.get(session) in up:
            assert picked == bound[session]
        else:
            assert counts[picked] == min(counts.values())
        if session >= 0:
            requests = [*(one for one in requests if one[0] != session), (session, picked, now_ns)]


@pytest.mark.parametrize(("now_s", "is_kept"), [(119, True), (120, False)])
def test_sticky_sessions_expire(now_s, is_kept):
    """Another session is at another instance, so a forgotten session may go to any of two."""
    policy = StickyLeastLoaded(120 * SECOND)
    role = RoleRouter(NAMES, policy, "prefill")
    role.pick(Spans.of(0, 10), 0, session=1)
    role.pick(Spans.of(0, 10), now_s * SECOND, session=2)
    assert (1 in policy._bound.places) == is_kept


def test_of_streams_no_session_is_counted():
    """The gateway looks for the routing keys of streams in answers, which have none."""
    role = RoleRouter(NAMES, Manual("min_group"), "decode")
    role.counts_streams = True
    for session in range(9):
        role.count(role.pick(Spans.of(session, 10), 0, session=session), 1, 10)
    assert sum(load.num_requests for load in role.loads) == 9
    assert [load.num_sessions for load in role.loads] == [0, 0, 0]


agents = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=30)


@given(agents, st.sampled_from(["agent", "siblings", "run"]))
def test_a_scope_groups_the_agents_of_a_run(calls, scope):
    """Twin: each group's first request goes to the next instance in turn, and the others follow the first."""
    role = RoleRouter(NAMES, SessionAffinity(TTL_NS, RoundRobin(), scope), "prefill")
    places = {}
    for number, (run_number, agent) in enumerate(calls):
        group = (run_number, {"agent": agent, "siblings": agent > 0, "run": 0}[scope])
        expected = places.setdefault(group, NAMES[len(places) % len(NAMES)])
        assert role.pick(Spans.of(number, 10), 0, "", number, run_number, agent) == expected


def test_sub_agents_of_a_recorded_run_go_to_one_instance(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    chosen = {}
    for scope in ("agent", "siblings", "run"):
        scenario = small(
            workload={"use": "weka_trace", "path": str(tmp_path / "run.json")},
            client={"use": "closed_loop", "concurrency": 1},
            router={"use": "session_affinity", "otherwise": "round_robin", "scope": scope},
            prefill__instances=4,
        )
        chosen[scope] = [one.prefill_id for one in run(scenario).records.requests]
    assert [len({*ids}) for ids in chosen.values()] == [4, 2, 1]
    assert len({chosen["siblings"][0], chosen["siblings"][-1]}) == 1  # the run's own agent


CALL = {"t": 0.0, "type": "s", "model": "m", "in": 20, "out": 2, "api_time": 0.5}
RUN = {
    "id": "run",
    "block_size": 64,
    "requests": [
        {**CALL, "hash_ids": [0]},
        *(
            {"t": 1.0, "type": "subagent", "requests": [{**CALL, "t": 1.0 + 0.1 * i, "hash_ids": [i]}]}
            for i in range(1, 4)
        ),
        {**CALL, "t": 3.0, "hash_ids": [0]},
    ],
}
"""A run whose agent calls three sub-agents and goes on when they have ended."""
