"""Requests that have ended are remembered for as long as messages of them may come, and no longer."""

from pdsim.core.deadlines import KEPT_NS, LateRequests


def test_a_request_is_forgotten_when_no_message_of_it_can_come_any_more():
    late = LateRequests()
    for i in range(5):
        late.at(i)
        late.add(i, f"because of {i}")
    late.at(4)
    late.add(0, "again")  # it is older than that
    assert late.why(0) == "because of 0"
    late.at(KEPT_NS + 2)
    assert [i in late for i in range(5)] == [False, False, False, True, True]
    late.discard(3)
    assert 3 not in late
    late.at(KEPT_NS + 4)
    assert 4 not in late
