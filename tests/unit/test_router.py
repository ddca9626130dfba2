"""The router of pairs, without faults."""

import pytest

from pdsim.core.invariants import check_all_idle
from pdsim.core.messages import Arrival, Cancel, Failed, Finished, KvSent, PrefillDone, Send
from pdsim.core.router import RoleRouter, Router
from pdsim.core.sequence import Spans
from pdsim.policy.routing import LeastLoaded


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


def test_a_message_it_does_not_know_is_a_bug(router):
    with pytest.raises(TypeError, match="does not take"):
        router.on_message(KvSent(1), 0)
