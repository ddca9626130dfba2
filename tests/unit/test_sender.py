"""The transfer workers and the receiver when things go wrong, message by message."""

import pytest

from pdsim.core.deadlines import KEPT_NS
from pdsim.core.messages import (
    Abort,
    AskStaging,
    CellScattered,
    CellWritten,
    KvArrived,
    KvLost,
    KvSent,
    PeerDown,
    PeerUp,
    Scatter,
    Send,
    StagingLent,
    StagingWatermark,
    StartTransfer,
    StopSending,
    Tell,
    TransferFailed,
    TransferLost,
    TransferUnit,
    UnitSent,
    WakeAt,
    Woken,
)
from pdsim.core.transfer.receiver import Receiver
from pdsim.core.transfer.sender import Sender
from pdsim.core.transfer.staging_ring import Span, StagingRing

ABORT = Abort(1, "no transfer of the request is under way", retryable=True)


def unit(i: int, cell: int | None = None, is_last: bool = False) -> TransferUnit:
    return TransferUnit(i, "prefill-0", "decode-0", (), (), 10, 1, 0, is_last, cell=cell)


def sender(staged: bool = False) -> Sender:
    return Sender("prefill-0", ["decode-0"], num_queues=1, staged=staged)


def test_a_request_of_which_nothing_is_under_way_stops_at_once():
    s = sender()
    assert s.on_message(StopSending(1, "decode-0"), 0) == [Send("decode-0", ABORT), Tell("prefill-0", KvSent(1))]
    assert s.on_message(unit(1), 0) == []  # the host had not handed it on before
    assert s.held == []


def test_what_is_under_way_ends_first_and_the_rest_is_dropped():
    s = sender()
    s.on_message(unit(1), 0)
    for late in (unit(1, is_last=True), unit(2)):
        s.on_message(late, 0)
    assert s.on_message(StopSending(1, "decode-0"), 0) == []
    answer = [StartTransfer(unit(2), None), Send("decode-0", ABORT), Tell("prefill-0", KvSent(1))]
    assert s.on_message(UnitSent(unit(1)), 0) == answer


def test_a_failed_unit_is_told_to_both_sides_and_the_next_request_goes_on():
    s = sender()
    for u in (unit(1), unit(1, is_last=True), unit(2)):
        s.on_message(u, 0)
    abort = Abort(1, "too slow", retryable=True)
    told = [Send("decode-0", abort), StartTransfer(unit(2), None), Tell("prefill-0", abort)]
    assert s.on_message(TransferFailed(unit(1), "too slow"), 0) == told


def test_a_failed_unit_of_a_stopped_request_answers():
    s = sender()
    s.on_message(unit(1), 0)
    s.on_message(StopSending(1, "decode-0"), 0)
    answer = [Send("decode-0", ABORT), Tell("prefill-0", KvSent(1))]
    assert s.on_message(TransferFailed(unit(1), "too slow"), 0) == answer


def test_a_stopped_unit_is_dropped_however_long_it_is_under_way():
    s = sender()
    s.on_message(unit(1, is_last=True), 0)
    s.on_message(StopSending(1, "decode-0"), 0)
    for i in (2, 3):
        s.on_message(StopSending(i, ""), 2 * KEPT_NS * i)
    assert s.on_message(UnitSent(unit(1, is_last=True)), 9 * KEPT_NS) == [
        Send("decode-0", ABORT),
        Tell("prefill-0", KvSent(1)),
    ]


@pytest.mark.parametrize("stopped", ["before", "afterwards"])
def test_nobody_says_of_a_lost_unit_that_nothing_is_under_way(stopped):
    s = sender()
    s.on_message(unit(1), 0)
    told = []
    if stopped == "before":
        s.on_message(StopSending(1, "decode-0"), 0)
    told += s.on_message(TransferLost(unit(1), "no answer"), 0)
    if stopped == "afterwards":
        told += s.on_message(StopSending(1, "decode-0"), 0)
    to_decode = [command.message for command in told if isinstance(command, Send)]
    assert {type(message) for message in to_decode} == {KvLost}
    assert told[-1] == Tell("prefill-0", KvSent(1))
    assert s.held == []


def test_a_request_that_prefill_does_not_know_has_nobody_to_answer():
    s = sender(staged=True)
    s.on_message(StagingLent(1, (Span(0, 0, 10),)), 0)  # lent to the life before
    assert s.held == [1]
    assert s.on_message(StopSending(1, ""), 0) == []
    s.on_message(StagingLent(1, (Span(0, 0, 10),)), 0)
    assert s.held == []


def test_with_a_staging_ring_the_receiver_is_told():
    told, _ = sender(staged=True).on_message(StopSending(1, "decode-0"), 0)
    assert told == Send("decode-0.receiver", ABORT)


def receiver(**changes) -> Receiver:
    return Receiver("decode-0", ["prefill-0"], StagingRing(100), **changes)


def test_spans_come_back_when_a_request_is_given_up():
    r = receiver()
    r.on_message(AskStaging(1, "prefill-0", (30, 30)), 0)
    told = r.on_message(ABORT, 0)
    assert told[-1] == Tell("decode-0", ABORT)
    assert isinstance(told[0].message, StagingWatermark)
    assert (r.held, r.ring.num_live_bytes) == ([], 0)
    assert r.on_message(AskStaging(1, "prefill-0", (30,)), 0) == []


def test_spans_into_which_lost_bytes_may_land_come_back_when_the_instance_says_so():
    r = receiver()
    r.on_message(AskStaging(1, "prefill-0", (30, 30)), 0)
    assert r.on_message(KvLost(1, "no answer"), 0) == [Tell("decode-0", KvLost(1, "no answer"))]
    assert (r.held, r.ring.num_live_bytes) == ([1], 60)
    r.on_message(Abort(1, "nobody writes any more", retryable=True), 30)
    assert (r.held, r.ring.num_live_bytes) == ([], 0)


def test_scatters_under_way_end_first():
    r = receiver()
    r.on_message(AskStaging(1, "prefill-0", (30, 30)), 0)
    assert r.on_message(CellWritten(1, 0, 30), 0) == [Scatter("decode-0", 1, 0, 30, 0)]
    assert r.on_message(ABORT, 0) == []
    assert r.on_message(CellWritten(1, 1, 30), 0) == []
    assert r.on_message(CellScattered(1, 0), 0)[-1] == Tell("decode-0", ABORT)
    assert r.ring.num_live_bytes == 0


def test_what_a_receiver_does_not_know_is_passed_on_or_ignored():
    r = receiver()
    assert r.on_message(CellWritten(1, 0, 30), 0) == []
    assert r.on_message(CellScattered(1, 0), 0) == []
    assert r.on_message(ABORT, 0) == [Tell("decode-0", ABORT)]
    arrived = KvArrived(2, first_token_ends=False)
    assert r.on_message(arrived, 0) == [Tell("decode-0", arrived)]


def test_one_who_is_new_is_told_the_watermark_first():
    r = receiver(has_restarted=True)
    kinds = [type(c.message) for c in r.on_message(AskStaging(1, "prefill-0", (30,)), 0)]
    assert kinds == [StagingWatermark, StagingLent]
    assert len(r.on_message(AskStaging(2, "prefill-0", (30,)), 0)) == 1
    r.on_message(PeerUp("prefill-0"), 0)
    assert len(r.on_message(AskStaging(3, "prefill-0", (30,)), 0)) == 2


def test_spans_of_a_lost_writer_come_back_at_once_and_of_one_that_is_back_after_a_while():
    """Also of requests that the decode instance does not know, because it was lost itself."""
    r = receiver(release_timeout_ns=30)
    for i in (1, 2):
        r.on_message(AskStaging(i, "prefill-0", (30,)), 0)
    assert r.on_message(PeerDown("prefill-0", has_restarted=True), 10) == [WakeAt("decode-0.receiver", 40)]
    assert (r.on_message(Woken(), 39), r.held) == ([], [1, 2])
    r.on_message(PeerDown("prefill-1"), 39)
    assert r.held == [1, 2]
    told = r.on_message(Woken(), 40)
    assert [c.message.request_id for c in told if c.to == "decode-0"] == [1, 2]
    r.on_message(AskStaging(3, "prefill-0", (30,)), 50)
    r.on_message(PeerDown("prefill-0"), 60)
    assert (r.held, r.ring.num_live_bytes) == ([], 0)
