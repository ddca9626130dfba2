"""Time of a run begins with its clients: however long the start took, requests are sent when the workload says."""

import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install 'pdsim[real]'")
pytest.importorskip("torch", reason="needs torch: pip install 'pdsim[real]'")

from pdreal.clients import PunctualTimeline
from pdreal.control.logbook import read_journal, read_records

from pdsim.core.journal.replay import replay
from pdsim.core.messages import Arrival
from pdsim.scenario.building.machines import state_machines
from tests.real import clusters

NUM_REQUESTS = 24
ABORTED = NUM_REQUESTS - 1
ABORT_S = 1.7
"""After the last arrival, of a request that would go on for longer."""
EARLY_NS = 1_000_000
"""Timers of an event loop may be so much early."""
LATE_NS = 200_000_000
"""Many timers are never so late, though the machine is loaded; a start takes longer."""


@pytest.fixture
def trace(tmp_path):
    """Three bursts, and their times in ns."""
    due_s = [round(0.03 * i + 0.3 * (i // 8), 3) for i in range(NUM_REQUESTS)]
    outputs = [3] * ABORTED + [3000]
    path = tmp_path / "trace.csv"
    rows = [f"{at},20,{output}\n" for at, output in zip(due_s, outputs, strict=True)]
    path.write_text("".join(["arrival_s,in_tokens,out_tokens\n", *rows]))
    return {"use": "request_table", "path": str(path)}, [round(at * 1e9) for at in due_s]


class HandClock:
    """A clock that the test sets."""

    now_ns = 0

    def after(self, delay_ns, callback):
        self.callback = callback


def test_lateness_ends_when_the_request_is_ready_to_send():
    """Routing is the front end's time. Of requests that one call sends, the first counts; calls without any do not."""
    clock = HandClock()
    timeline = PunctualTimeline(clock)

    def send_two(_):
        for _ in range(2):
            clock.now_ns += 3  # its tokens are made
            timeline.sends()
            clock.now_ns += 500  # it is routed

    timeline.after(10, send_two)
    clock.now_ns = 11
    clock.callback(None)
    assert timeline.late_ns == [1 + 3]
    timeline.after(10, lambda _: None)
    clock.now_ns += 10
    clock.callback(None)
    timeline.sends()
    assert timeline.late_ns == [1 + 3]


def test_requests_and_faults_come_when_the_scenario_says(trace, tmp_path):
    workload, due_ns = trace
    faults = [{"at": f"{ABORT_S} s", "abort": ABORTED}]
    scenario = clusters.scenario(client={"use": "open_loop"}, workload=workload, faults=faults)
    real, resolved = clusters.run(scenario, logs=tmp_path, check_kv=False)
    assert real.failure is None
    requests = sorted(read_records(tmp_path).requests, key=lambda request: request.request_id)
    late_ns = sorted(request.arrival_ns - due for request, due in zip(requests, due_ns, strict=True))
    assert late_ns[0] > -EARLY_NS
    assert late_ns[NUM_REQUESTS * 4 // 5] < LATE_NS
    assert len(real.late_ns) == NUM_REQUESTS, "one for each request"
    assert all(said >= late - EARLY_NS for said, late in zip(sorted(real.late_ns), late_ns, strict=True))
    assert requests[ABORTED].outcome == "failed"
    assert -EARLY_NS < requests[ABORTED].end_ns - ABORT_S * 1e9 < LATE_NS
    entries = list(read_journal(tmp_path))
    told_ns = [entry.args[-1] for entry in entries if isinstance(entry.args[0], Arrival)]
    assert all(-EARLY_NS < told - request.arrival_ns < LATE_NS for told, request in zip(told_ns, requests, strict=True))
    assert 0 <= entries[0].args[-1] < LATE_NS, "ranks wait for time to begin"
    assert replay(entries, state_machines(resolved)) == len(entries)
