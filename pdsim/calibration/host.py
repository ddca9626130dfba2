"""What host rows say of a loop, of requests on their way, and of the rest between two decode steps."""

from collections.abc import Mapping

import numpy as np

from pdsim.calibration.regression import Fitted, plain_least_squares
from pdsim.calibration.rows import Measurements

LOOP = ("start", "launch", "result", "send")
"""What a loop takes on its CPU, as it is measured."""
MEASURED_KINDS = ("host", "loop", "handover")
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


def front_end_ns(medians: Mapping[str, float]) -> Times:
    """The router takes requests one after another; decode takes each in, with its prompt, before it grants pages."""
    if not medians.keys() >= {"route", "admit", "answer", "message"}:
        return {}
    admitted_in_ns = max(0.0, medians["admit"] - medians["message"])
    return {"service": medians["route"], "latency_in": admitted_in_ns, "latency_out": medians["answer"]}


def handover_ns(measurements: Measurements, medians: Mapping[str, float], transfer: Fitted) -> Times:
    """What lies between a transfer's begin and a first token, beyond the transfer and a message."""
    for rows in measurements.of("handover"):
        if rows.name == transfer.rows.name and "message" in medians:
            left_over_ns = float(np.median(rows.columns["time_ns"] - transfer.times_ns(rows.columns)))
            return {"handover": max(0.0, left_over_ns - medians["message"])}
    return {}


def rest_ns(measurements: Measurements, decode: Fitted) -> Times:
    """What the periods of decode loops have over their steps alone."""
    for rows in measurements.of("loop"):
        batch, period_ns = rows.columns["batch"], rows.columns["time_ns"]
        left_over = np.maximum(period_ns - decode.times_ns(rows.columns), 0)
        terms = np.column_stack([np.ones_like(batch), batch])
        step_ns, request_ns = plain_least_squares(terms / period_ns[:, None], left_over / period_ns)
        return {"step": float(step_ns), "request": float(request_ns)}
    return {}
