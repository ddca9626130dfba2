"""Laws of leases: KV whose decode instance died stays on prefill until its lease ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.messages import PeerDown, StopSending, Tell, WakeAt
from pdsim.core.vllm.kv_leases import KvLeases, LeaseTimes
from tests.support import MILLISECOND, request, run, small

SECOND = 10**9

calls = st.lists(st.tuples(st.sampled_from(["begin", "end", "down", "look"]), st.integers(0, 3)), max_size=30)


@given(calls, st.integers(1, 20), st.integers(0, 15))
def test_leases_are_their_twin(calls, duration_ns, renewal_ns):
    """Twin: for each request the time at which it was computed, and the end that its decode's death left."""
    leases = KvLeases("p", LeaseTimes(duration_ns, renewal_ns))
    computed, ends = {}, {}
    for now_ns, (what, number) in enumerate(calls):
        if what == "begin" and number not in ends:
            leases.begin(number, now_ns)
            computed[number] = now_ns
        elif what == "end":
            leases.end(number)
            computed.pop(number, None)
            ends.pop(number, None)
        elif what == "down":
            seen_ns = max(0, now_ns - 3)
            alarms = leases.on_decode_down([number], seen_ns)
            if number in computed:
                ends[number] = max(computed[number] + duration_ns, seen_ns + renewal_ns)
            assert alarms == ([WakeAt("p", ends[number])] if number in computed else [])
        elif what == "look":
            over = [one for one, end_ns in ends.items() if end_ns <= now_ns]
            assert leases.expired(now_ns) == over
            for one in over:
                del computed[one], ends[one]
        assert {one for one in range(4) if leases.outlives_decode(one)} == set(ends)


def freed_at(killed_ms, **changes):
    """Times at which prefill frees the KV of request 1. Decode has no room for it while request 0 runs, and dies."""
    traced = run(
        small(
            request(0, 40, 4000),
            request(1, 40, 4, arrival_ns=MILLISECOND),
            engine="vllm",
            decode__admission="free_pages",
            decode__pool_tokens=4096,
            decode__max_running_requests=1,
            faults=[{"kill": "decode-0", "at": f"{killed_ms} ms"}],
            health={"heartbeat_interval": "2 s", "heartbeat_failures": 1, "max_retries": 0},
            **changes,
        ),
        checked=True,
    )
    assert [one.outcome for one in traced.records.requests] == ["failed", "failed"]
    down = next(entry.args[0] for entry in traced.journal if entry.args and isinstance(entry.args[0], PeerDown))
    assert down.seen_ns == killed_ms // 2000 * 2 * SECOND
    computed_ns = max(step.start_ns + step.duration_ns for step in traced.records.steps if step.kind == "prefill")
    stopped = [
        entry.args[-1]
        for entry in traced.journal
        if entry.instance_id == "prefill-0" and isinstance(entry.returned, tuple)
        for command in entry.returned[1]
        if isinstance(command, Tell) and isinstance(command.message, StopSending) and command.message.request_id == 1
    ]
    return computed_ns, stopped


@pytest.mark.parametrize("killed_ms", [5_000, 9_000, 15_000])
def test_nixl_holds_30_s_from_computing_and_20_s_from_the_last_renewal(killed_ms):
    computed_ns, stopped = freed_at(killed_ms, network={"transport": "nixl-rdma"})
    last_ns = killed_ms // 2000 * 2 * SECOND
    assert stopped == [max(computed_ns + 30 * SECOND, last_ns + 20 * SECOND)]


def test_mooncake_holds_480_s():
    computed_ns, stopped = freed_at(5_000, network={"transport": "mooncake-rdma"})
    assert stopped == [computed_ns + 480 * SECOND]


def test_a_hold_timeout_is_the_lease():
    computed_ns, stopped = freed_at(5_000, network={"transport": "mooncake-rdma"}, prefill__hold_timeout="7 s")
    assert stopped == [computed_ns + 7 * SECOND]
