"""Open loops are open: what is sent when follows from the workload, however long the cluster took to start."""

import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install 'pdsim[real]'")
pytest.importorskip("torch", reason="needs torch: pip install 'pdsim[real]'")

from pdreal.logbook import read_records

from pdsim.workload.request_spec import Streams
from tests.real import clusters

NUM_REQUESTS = 24
EARLY_NS = 1_000_000
"""Timers of an event loop may be so much early."""
LATE_NS = 50_000_000
"""A loaded machine delays some timers, but not a fifth of them; start-up takes seconds."""


def arrivals(use, **fields):
    return {"use": "open_loop", "arrivals": {"use": use, **fields}}


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    times_s = [round(0.06 * i + 0.4 * (i // 8), 3) for i in range(NUM_REQUESTS)]  # three bursts
    path.write_text("arrival_s,in_tokens,out_tokens\n" + "".join(f"{at},20,3\n" for at in times_s))
    return {"use": "request_table", "path": str(path)}


@pytest.mark.parametrize("loop", ["poisson", "gamma", "trace"])
def test_requests_are_sent_when_the_workload_says(loop, trace, tmp_path):
    changes = {
        "poisson": {"client": arrivals("poisson", rate="12/s")},
        "gamma": {"client": arrivals("gamma", rate="12/s", burstiness=0.2)},
        "trace": {"client": {"use": "open_loop"}, "workload": trace},
    }[loop]
    logs = tmp_path / "logs"
    logs.mkdir()
    if loop != "trace":
        changes["workload__num_requests"] = NUM_REQUESTS
    real, resolved = clusters.run(clusters.scenario(**changes), logs=logs, check_kv=False)
    assert real.failure is None
    sent_ns = sorted(request.arrival_ns for request in read_records(logs).requests)
    if resolved.client.arrivals is None:
        due_ns = sorted(spec.arrival_ns for spec in resolved.workload.requests(Streams(resolved.seed)))
    else:
        times = resolved.client.arrivals.times_ns(Streams(resolved.seed).named("arrivals"))
        due_ns = [next(times) for _ in range(NUM_REQUESTS)]
    late_ns = [sent - due for sent, due in zip(sent_ns, due_ns, strict=True)]
    assert min(late_ns) > -EARLY_NS
    assert sorted(late_ns)[NUM_REQUESTS * 4 // 5] < LATE_NS


def test_a_fault_is_counted_from_the_first_request(tmp_path):
    """It would come at once if the time of start-up counted."""
    kill = {"at": "700 ms", "kill": "decode-0", "restart_after": "100 ms"}
    scenario = clusters.scenario(
        faults=[kill], client=arrivals("constant", rate="10/s"), workload__num_requests=12, workload__output_tokens=2
    )
    clusters.run(scenario, logs=tmp_path, check_kv=False)
    ends = [r.end_ns for r in read_records(tmp_path).requests if r.outcome == "finished" and not r.num_retries]
    assert sum(end_ns < 700_000_000 for end_ns in ends) >= 3
