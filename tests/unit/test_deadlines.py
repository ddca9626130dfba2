"""Deadlines of requests, and requests that are remembered for as long as messages of them may come."""

from pdsim.core.deadlines import KEPT_NS, Deadlines, LateRequests
from pdsim.core.messages import WakeAt


def test_a_request_is_forgotten_when_no_message_of_it_can_come_any_more():
    late = LateRequests()
    for i in range(5):
        late.now_ns = i
        late.add(i, f"because of {i}")
    late.add(0, "again")  # it is older than that
    assert late.why(0) == "because of 0"
    late.now_ns = KEPT_NS + 2
    late.forget()
    assert list(late.kept) == [3, 4]
    late.now_ns = KEPT_NS + 4
    late.forget()
    assert not late.kept


def test_deadlines_ask_to_be_woken_for_the_first_alone():
    d = Deadlines("me", 100)
    assert d.add(1, 0) == [WakeAt("me", 100)]
    assert d.add(2, 30) == []
    commands = []
    assert d.expired(99, commands, lambda _: True) == []
    assert d.expired(100, commands, lambda _: True) == [1]
    assert commands == [WakeAt("me", 130)]


def test_what_is_done_is_not_due():
    d = Deadlines("me", 100)
    for request_id in range(3):
        d.add(request_id, request_id)
    commands = []
    assert d.expired(100, commands, {2}.__contains__) == []
    assert commands == [WakeAt("me", 102)]


def test_without_a_timeout_nothing_is_due():
    d = Deadlines("me", None)
    assert d.add(1, 0) == []
    assert d.expired(1 << 60, [], lambda _: True) == []
