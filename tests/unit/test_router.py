"""The router of pairs, without faults."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.invariants import check_all_idle
from pdsim.core.messages import (
    Arrival,
    Cancel,
    Drain,
    Failed,
    Finished,
    KvSent,
    PeerDown,
    PeerUp,
    PrefillDone,
    Send,
    Serve,
    WakeAt,
)
from pdsim.core.routing.role_router import RoleRouter
from pdsim.core.routing.router import RetryLimits, Router
from pdsim.core.sequence import Spans
from pdsim.policy.routing import LeastLoaded
from pdsim.scenario.building.machines import build_router
from tests.support import examples, small


@pytest.fixture
def router() -> Router:
    def role(name):
        ids = [f"{name}-0", f"{name}-1"]
        return RoleRouter(ids, LeastLoaded())

    return Router(prefill=role("prefill"), decode=role("decode"))


def arrive(router: Router, i: int) -> set[str]:
    return {command.to for command in router.on_message(Arrival(i, Spans.of(i, 10), 5), 7)}


def test_both_of_a_pair_are_told_of_a_request_that_is_given_up(router):
    assert arrive(router, 1) == {"prefill-0", "decode-0"}
    cancel = Cancel(1, "enough")
    *told, failed = router.on_message(cancel, 8)
    assert told == [Send("decode-0", cancel), Send("prefill-0", cancel)]
    assert failed == Failed(1, "enough")
    check_all_idle([router])
    assert arrive(router, 2) == {"prefill-0", "decode-0"}


def test_what_has_ended_cannot_be_given_up(router):
    arrive(router, 1)
    router.on_message(PrefillDone(1), 8)
    router.on_message(Finished(1), 9)
    assert router.on_message(Cancel(1, "enough"), 10) == []
    assert router.on_message(Cancel(5, "never came"), 10) == []


class Asked:
    """Remembers what it is shown of the decode instance that was chosen."""

    def __init__(self) -> None:
        self.shown: list[tuple[int, int]] = []

    def is_remote(self, prompt, view) -> bool:
        self.shown.append((view.decode.num_requests, view.decode.num_tokens))
        return True


@given(st.lists(st.integers(1, 50), max_size=8))
def test_a_disaggregation_policy_sees_the_load_without_the_request_itself(lengths):
    asked = Asked()
    one_of_each = [RoleRouter([f"{role}-0"], LeastLoaded()) for role in ("prefill", "decode")]
    router = Router(prefill=one_of_each[0], decode=one_of_each[1], disaggregation=asked)
    for i, num_tokens in enumerate(lengths):
        router.on_message(Arrival(i, Spans.of(i, num_tokens), 5), 7)
    assert asked.shown == [(i, sum(lengths[:i])) for i in range(len(lengths))]


def test_a_disaggregation_policy_sees_prefill_instances_that_accept_requests():
    shown = []

    class Seen:
        def is_remote(self, prompt, view) -> bool:
            shown.append([load.instance_id for load in view.prefill])
            return True

    prefill, decode = (RoleRouter([f"{role}-0", f"{role}-1"], LeastLoaded()) for role in ("prefill", "decode"))
    router = Router(prefill=prefill, decode=decode, disaggregation=Seen())
    for i, message in enumerate([PeerDown("prefill-0"), PeerUp("prefill-0"), Drain("prefill-1")]):
        router.on_message(message, 7)
        router.on_message(Arrival(i, Spans.of(i, 10), 5), 7)
    assert shown == [["prefill-1"], ["prefill-0", "prefill-1"], ["prefill-0"]]


def test_a_message_it_does_not_know_is_a_bug(router):
    with pytest.raises(TypeError, match="does not take"):
        router.on_message(KvSent(1), 0)


DRAWING = [
    {"use": "random"},
    {"use": "power_of_two"},
    {"use": "cache_aware"},
    {"use": "cache_aware", "gateway": "0.3.2"},
    {"use": "llm_d"},
    {"use": "dynamo_kv"},
    {"use": "session_affinity", "otherwise": {"use": "random"}},
]


def seeded(policy, seed):
    if "otherwise" in policy:
        return {**policy, "otherwise": seeded(policy["otherwise"], seed)}
    return {**policy, "seed": seed}


def test_a_policy_of_a_user_keeps_its_seed():
    class Mine:
        seed = 3

        def pick(self, prompt, view):
            return view.instances[self.seed % len(view.instances)].instance_id

    scenario = small(prefill__instances=2, decode__instances=2)
    both = scenario.router.model_copy(update={"prefill": Mine(), "decode": Mine()})
    router = build_router(scenario.model_copy(update={"router": both}))
    assert arrive(router, 0) == {"prefill-1", "decode-1"}


@pytest.mark.parametrize("policy", DRAWING, ids=str)
@given(seed=st.integers(0, 2**31 - 1))
@examples(4)
def test_one_seed_gives_prefill_and_decode_unrelated_choices(policy, seed):
    """A quarter of the requests goes to each pair while the router is idle; the bounds are five standard deviations."""
    scenario = small(router=seeded(policy, seed), prefill__instances=2, decode__instances=2)
    router, pairs = build_router(scenario), Counter[frozenset[str]]()
    for i in range(400):
        pairs[frozenset(arrive(router, i))] += 1
        router.on_message(PrefillDone(i), 8)
        router.on_message(Finished(i), 9)
    assert len(pairs) == 4
    assert all(56 <= count <= 144 for count in pairs.values())


class Never:
    def pick(self, prompt, view) -> str:
        raise AssertionError


def test_a_pair_without_others_is_not_chosen_and_may_be_down():
    router = Router(prefill=RoleRouter(["p"], Never()), decode=RoleRouter(["d"], Never()), limits=RetryLimits())
    assert arrive(router, 0) == {"p", "d"}
    router.on_message(Drain("p"), 1)
    assert [type(c) for c in router.on_message(Arrival(1, Spans.of(1, 5), 5), 2)] == [WakeAt]
    router.on_message(Serve("p"), 3)
    assert arrive(router, 2) == {"p", "d"}
