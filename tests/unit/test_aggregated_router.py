"""The router of an aggregated cluster."""

import pytest

from pdsim.core.messages import Arrival, Cancel, Failed, Finished, KvSent, NewRequest, Send
from pdsim.core.routing.role_router import RoleRouter
from pdsim.core.routing.router import Router
from pdsim.core.sequence import Spans
from pdsim.policy.routing import LeastLoaded


@pytest.fixture
def router() -> Router:
    ids = ["aggregated-0", "aggregated-1"]
    instances = RoleRouter(ids, LeastLoaded())
    return Router(prefill=instances, decode=None)


def arrive(router: Router, i: int, num_tokens: int = 10) -> str:
    (command,) = router.on_message(Arrival(i, Spans.of(i, num_tokens), 5), 7)
    return command.to


def test_one_instance_gets_the_request_once(router):
    prompt = Spans.of(1, 10)
    assert router.on_message(Arrival(1, prompt, 5), 7) == [
        Send("aggregated-0", NewRequest(1, 7, prompt, 5, "aggregated-0", "aggregated-0"))
    ]


@pytest.mark.parametrize(("outcome", "answer"), [(Finished(1), []), (Failed(1, "too long"), [Failed(1, "too long")])])
def test_loads_count_what_has_not_ended(router, outcome, answer):
    assert [arrive(router, i) for i in (1, 2)] == ["aggregated-0", "aggregated-1"]
    assert router.on_message(outcome, 8) == answer
    assert arrive(router, 3) == "aggregated-0"


def test_who_computes_a_request_that_is_given_up_is_told(router):
    arrive(router, 1)
    cancel = Cancel(1, "enough")
    assert router.on_message(cancel, 8) == [Send("aggregated-0", cancel), Failed(1, "enough")]
    assert router.on_message(cancel, 9) == []
    assert arrive(router, 2) == "aggregated-0"


def test_a_message_it_does_not_know_is_a_bug(router):
    with pytest.raises(TypeError, match="does not take"):
        router.on_message(KvSent(1), 0)
