"""What host rows say of a loop, of requests on their way, and of the rest between two decode steps."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pdsim.calibration.fit.regression import Fitted, plain_least_squares
from pdsim.calibration.fit.rows import Floats, Measurements, Rows
from pdsim.system.catalog import load_transport, names

LOOP = ("start", "launch", "result", "send")
"""What a loop takes on its CPU, as it is measured."""
MEASURED_KINDS = ("host", "loop", "sending", "handover")
"""Of which medians are taken, or what fits leave over: none is fitted for itself."""

Times = dict[str, float]
"""Settings of a scenario's section, in ns."""


def medians_ns(measurements: Measurements) -> Times:
    return {rows.name: float(np.median(rows.columns["time_ns"])) for rows in measurements.of("host")}


def loop_ns(medians: Mapping[str, float]) -> Times:
    """A grant is a message to prefill; what it takes beyond that starts a forward."""
    told = {what: medians[what] for what in LOOP if what in medians}
    if "start" not in told and medians.keys() >= {"grant", "message"}:
        told["start"] = max(0.0, medians["grant"] - medians["message"])
    return told


def front_end_ns(measurements: Measurements, medians: Mapping[str, float]) -> Times:
    """The launcher takes requests one after another; decode takes each in, with its prompt, before it grants pages."""
    if not medians.keys() >= {"route", "admit", "answer", "message"}:
        return {}
    way_in_ns = medians["route"] + medians["admit"] - medians["message"]
    told = {"service": medians["route"]}
    alone_ns = medians["route"]
    for rows in measurements.of("host"):
        if rows.name == "submit":
            told, alone_ns = _service_ns(rows, _tokens_alone(measurements))
    if "end" in medians:
        told["ending"] = medians["end"]
    return told | {"latency_in": max(0.0, way_in_ns - alone_ns), "latency_out": medians["answer"]}


def _service_ns(rows: Rows, num_tokens: float) -> tuple[Times, float]:
    """Of each request and of each of its tokens; and of one of so many."""
    tokens, times_ns = rows.columns["new_tokens"], rows.columns["time_ns"]
    terms = np.column_stack([np.ones_like(tokens), tokens])
    service_ns, per_token_ns = map(float, plain_least_squares(terms / times_ns[:, None], np.ones_like(tokens)))
    return {"service": service_ns, "service_per_token": per_token_ns}, service_ns + per_token_ns * num_tokens


def _tokens_alone(measurements: Measurements) -> float:
    """Of the requests whose stages were timed."""
    return max(float(rows.columns["new_tokens"].max()) for rows in measurements.of("host") if rows.name == "admit")


@dataclass(frozen=True)
class Sending:
    """What a transfer that the harness makes has over the engine's own time, while its worker is busy with it."""

    batch_ns: float = 0.0
    ns_per_byte: float = 0.0
    serial: bool = False
    """Workers wait for each other: while all were busy, each took nearer to so many times as long than to as long."""

    @classmethod
    def of(cls, measurements: Measurements, transfer: Fitted) -> "Sending":
        for rows in measurements.of("sending"):
            if rows.name == transfer.rows.name:
                times_ns, alone_ns = rows.columns["time_ns"], transfer.times_ns(rows.columns)
                num_workers = _busy_workers(rows.name)
                serial = float(np.median(times_ns / alone_ns)) > (1 + num_workers) / 2 and num_workers > 1
                if serial:
                    times_ns = times_ns / num_workers
                num_bytes = rows.columns["payload_bytes"]
                terms = np.column_stack([np.ones_like(num_bytes), num_bytes])
                batch_ns, per_byte_ns = plain_least_squares(terms / times_ns[:, None], 1 - alone_ns / times_ns)
                return cls(float(batch_ns), float(per_byte_ns), serial)
        return cls()

    def times_ns(self, num_bytes: Floats) -> Floats:
        return self.batch_ns + self.ns_per_byte * num_bytes


def _busy_workers(transport: str) -> int:
    """As rows of `sending` were measured: many transfers to one decode instance."""
    engine = load_transport(transport) if transport in names("transports") else None
    return engine.num_queues if engine is not None and engine.queue_by == "request" else 1


def handover_ns(measurements: Measurements, medians: Mapping[str, float], transfer: Fitted) -> Times:
    """What lies between a transfer's begin and a first token, beyond what holds its worker up and a message."""
    sending = Sending.of(measurements, transfer)
    for rows in measurements.of("handover"):
        if rows.name == transfer.rows.name and "message" in medians:
            sent_ns = transfer.times_ns(rows.columns) + sending.times_ns(rows.columns["payload_bytes"])
            left_over_ns = np.median(rows.columns["time_ns"] - sent_ns) - medians["message"]
            return {"handover": max(0.0, float(left_over_ns))}
    return {}


def rest_ns(measurements: Measurements, decode: Fitted) -> Times:
    """Host time between the steps of decode loops.

    Where rows do not tell it, it is what periods have over steps that were measured alone, whose errors it then has.
    """
    for rows in measurements.of("loop"):
        batch, period_ns = rows.columns["batch"], rows.columns["time_ns"]
        told_ns = 1e3 * rows.columns["rest_us"]
        left_over_ns = np.maximum(period_ns - decode.times_ns(rows.columns), 0)
        between_ns = np.where(np.isnan(told_ns), left_over_ns, told_ns)
        terms = np.column_stack([np.ones_like(batch), batch])
        step_ns, request_ns = plain_least_squares(terms / period_ns[:, None], between_ns / period_ns)
        return {"step": float(step_ns), "request": float(request_ns)}
    return {}
