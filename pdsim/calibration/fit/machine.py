"""Fits the times around steps: of the host's loops, and of requests and transfers on their way.

A client of a server sees a step together with the times around it (HTTP, tokenizer, host): a prompt's TTFT is the
forward plus an overhead. A stream that decodes on the same GPUs waits no longer than the forward lasts, so rows of kind
`stall` separate the forward from the overhead. Prompts that arrive together show which part of the overhead is serial.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pdsim.calibration.fit.regression import ABOVE_LEAST, FittedForm, plain_least_squares
from pdsim.calibration.fit.rows import OBSERVED, Floats, Measurements, Rows
from pdsim.dataclass import dataclass
from pdsim.system.catalog import load_transport, names

LOOP = ("start", "launch", "result", "send", "loading", "decode_prefill")
"""Names of host rows, each of which gives the HostSettings field of the same name. start, launch, result, send: parts
of the CPU time of a prefill loop. loading: time from the restart of an instance until it serves. decode_prefill: sum
of the GPU's pauses before and after a prefill forward that runs between decode steps.
"""
MEASURED_KINDS = ("host", "loop", "sending", "handover")
"""Kinds of rows to which no Form is fitted. From `host` rows, a profile has medians, differences of medians, and a
straight line over prompt lengths (rows named `submit`). From the other kinds, a profile has what is left of the times
after the fitted times of steps or transfers are subtracted, or, for `loop` rows that have it, rest_us.
"""

Times = dict[str, float]
"""Times in ns by name: the name of a field in a section of a scenario, or of a kind of host work (medians_ns)."""


def medians_ns(measurements: Measurements) -> Times:
    return {rows.name: float(np.median(rows.columns["time_ns"])) for rows in measurements.of("host")}


def loop_ns(medians: Mapping[str, float]) -> Times:
    """Host times in ns by the names in LOOP. medians: medians of host rows in ns, by name. Names without rows are left
    out, except for the following.

    If no rows are named `start`, but some `grant` and `message`, the time to start a forward is the median of `grant`
    (from decode's grant to the begin of the forward) minus the median of `message` (one message's latency). Then
    decode_prefill, if no rows have this name either, is the time to start a forward plus the time to handle its result
    (`result`): a loop that also decodes spends these times while its GPU is idle.
    """
    times = {what: medians[what] for what in LOOP if what in medians}
    if "start" not in times and medians.keys() >= {"grant", "message"}:
        times["start"] = max(0.0, medians["grant"] - medians["message"])
        times.setdefault("decode_prefill", times["start"] + times.get("result", 0.0))
    return times


def front_end_ns(measurements: Measurements, medians: Mapping[str, float]) -> Times:
    """Returns times in ns for the section front_end of a profile, from rows of kind `host` that real mode measured.
    medians: medians of these rows in ns, by name. Empty: rows named route, admit, answer or message are missing.

    The time `service` is serial, because one process (the launcher) routes all requests. `latency_in`, the delay before
    prefill, includes decode's admission, which precedes the grant of pages.
    """
    if not medians.keys() >= {"route", "admit", "answer", "message"}:
        return {}
    way_in_ns = medians["route"] + medians["admit"] - medians["message"]
    times = {"service": medians["route"]}
    alone_ns = medians["route"]
    for rows in measurements.of("host"):
        if rows.name == "submit":
            times, alone_ns = _service_ns(rows, _tokens_alone(measurements))
    if "end" in medians:
        times["ending"] = medians["end"]
    return times | {"latency_in": max(0.0, way_in_ns - alone_ns), "latency_out": medians["answer"]}


def _service_ns(rows: Rows, num_tokens: float) -> tuple[Times, float]:
    """Two results: the fields of front_end with the serial time in ns per request and per prompt token, and the serial
    time in ns of a request of num_tokens tokens. rows: times of the front end by prompt length.
    """
    tokens, times_ns = rows.columns["new_tokens"], rows.columns["time_ns"]
    service_ns, per_token_ns = _line(tokens, times_ns, np.ones_like(tokens))
    return {"service": service_ns, "service_per_token": per_token_ns}, service_ns + per_token_ns * num_tokens


def _line(sizes: Floats, times_ns: Floats, shares: Floats) -> tuple[float, float]:
    """Fits a straight line over `sizes` to times_ns x shares. Returns (time in ns at size 0, time in ns per unit of
    size). shares: share of each time that counts. Errors of the fit are relative to times_ns.
    """
    terms = np.column_stack([np.ones_like(sizes), sizes])
    base_ns, slope_ns = plain_least_squares(terms / times_ns[:, None], shares)
    return float(base_ns), float(slope_ns)


def _tokens_alone(measurements: Measurements) -> float:
    """Prompt length in tokens of the requests that ran one at a time (rows named admit), the longest if they differ."""
    return max(float(rows.columns["new_tokens"].max()) for rows in measurements.of("host") if rows.name == "admit")


@dataclass(frozen=True)
class SendingTime:
    """Time for which a worker of real mode is busy with a transfer, in addition to the fitted time of the transfer."""

    batch_ns: float = 0.0
    """Time in ns for each transfer, whatever its size. A transfer is one batch of descriptors."""
    ns_per_byte: float = 0.0
    """Further time in ns for each byte of a transfer."""
    serial: bool = False
    """True: only one worker sends at a time. If all workers are busy, a transfer then takes about its own time
    multiplied by the number of workers.
    """

    @classmethod
    def fitted(cls, measurements: Measurements, transfer: FittedForm) -> "SendingTime":
        for rows in measurements.of("sending"):
            if rows.name == transfer.rows.name:
                times_ns, alone_ns = rows.columns["time_ns"], transfer.times_ns(rows.columns)
                num_workers = _busy_workers(rows.name)
                serial = float(np.median(times_ns / alone_ns)) > (1 + num_workers) / 2 and num_workers > 1
                if serial:
                    times_ns = times_ns / num_workers
                return cls(*_line(rows.columns["payload_bytes"], times_ns, 1 - alone_ns / times_ns), serial)
        return cls()

    def times_ns(self, num_bytes: Floats) -> Floats:
        return self.batch_ns + self.ns_per_byte * num_bytes


def _busy_workers(transport: str) -> int:
    """Number of a rank's transfer workers that were busy while rows of kind `sending` were measured, with many requests
    sent to one decode instance. transport: name in the catalog. 1: the catalog lacks the transport, or all requests
    to one decode instance have the same worker.
    """
    engine = load_transport(transport) if transport in names("transports") else None
    return engine.num_queues if engine is not None and engine.queue_by == "request" else 1


def handover_ns(measurements: Measurements, medians: Mapping[str, float], transfer: FittedForm) -> Times:
    """The profile's field `handover`: the time in ns from the start of a transfer until decode streams the first token.
    The time for which the transfer worker sends is not included, nor is the latency of one message. medians: median
    host times by name. transfer: the fitted times of transfers. Returns no field if there are no rows of
    kind `handover` for this transport, or no host rows named `message`.
    """
    sending = SendingTime.fitted(measurements, transfer)
    for rows in measurements.of("handover"):
        if rows.name == transfer.rows.name and "message" in medians:
            sent_ns = transfer.times_ns(rows.columns) + sending.times_ns(rows.columns["payload_bytes"])
            left_over_ns = np.median(rows.columns["time_ns"] - sent_ns) - medians["message"]
            return {"handover": max(0.0, float(left_over_ns))}
    return {}


def rest_ns(measurements: Measurements, decode: FittedForm) -> Times:
    """Host time in ns between the steps of a decode loop, as a straight line over the batch: decode_step, and
    decode_request per request. If rows do not have this time (rest_us), the loop's period minus the fitted time of the
    step is taken, which includes the errors of the step's fit. Empty: there are no rows of kind `loop`.
    """
    for rows in measurements.of("loop"):
        batch, period_ns = rows.columns["batch"], rows.columns["time_ns"]
        told_ns = 1e3 * rows.columns["rest_us"]
        left_over_ns = np.maximum(period_ns - decode.times_ns(rows.columns), 0)
        between_ns = np.where(np.isnan(told_ns), left_over_ns, told_ns)
        step_ns, request_ns = _line(batch, period_ns, between_ns / period_ns)
        return {"decode_step": step_ns, "decode_request": request_ns}
    return {}


_SHARES_GPUS = 0.3
"""If decode streams stall for a larger share of a prompt's TTFT than this, decode is taken to share GPUs with prefill.
"""
_MOST_OVERHEAD = 0.9
"""Maximum of the overhead (all time outside the forward), as a share of the shortest TTFT. A larger overhead is cut to
this share.
"""
CANNOT_TELL = (
    "the profile lacks what a client cannot measure: KV transfers, the scheduler's own time (part of forwards), "
    "mixed batches of prefill and decode, the size of the KV pool"
)
MESSAGES_NS = 2 * 50_000.0
"""Time in ns that a simulated request spends in messages: twice the default of network.message_latency."""


@dataclass(frozen=True)
class RequestOverhead:
    """The part of a request's TTFT that lies outside its forward, computed from times that a client measured."""

    time_ns: float
    """Time in ns, the same for every request."""
    bursts: tuple[Rows, ...] = ()
    """Rows of kind `burst`: prompts that were sent together. Empty: none were measured."""
    notes: tuple[str, ...] = ()
    """Sentences for the user: how time_ns was computed, and what a client cannot measure."""

    def front_end_ns(self, prefill: FittedForm) -> dict[str, float]:
        """The overhead as fields of front_end in ns. The part that requests pass one after another becomes the service
        time. The rest becomes latency, without the time that a simulated request spends in messages (MESSAGES_NS).
        prefill: the fitted times of prefill forwards.
        """
        service_ns = min(self._serial_ns(prefill), self.time_ns)
        return {"service": service_ns, "latency_in": max(0.0, self.time_ns - service_ns - MESSAGES_NS)}

    def _serial_ns(self, prefill: FittedForm) -> float:
        """Time in ns that each prompt adds because the server handles prompts one after another. Computed from prompts
        that were sent together, as the median over the measurements: from the last prompt's TTFT, `time_ns` and the
        times of two forwards are subtracted (one with the first prompt, one with all others); the rest is divided by
        the number of prompts after the first. 0: no prompts were sent together.
        """
        found: list[float] = []
        for rows in self.bursts:
            prompts, new, times_ns = (rows.columns[name] for name in ("prompts", "new_tokens", "time_ns"))
            forwards_ns = _forward_ns(prefill, new / prompts, 1) + _forward_ns(
                prefill, new - new / prompts, prompts - 1
            )
            found += ((times_ns - self.time_ns - forwards_ns) / (prompts - 1)).tolist()
        return max(0.0, float(np.median(found))) if found else 0.0


def without_overhead(measurements: Measurements) -> tuple[Measurements, RequestOverhead | None]:
    """Replaces all rows that a client measured (OBSERVED) by rows of kind `prefill`, whose times are TTFT minus the
    overhead that is also returned. Without rows of kind `ttft`: returns the unchanged measurements, and None.
    """
    rows = {rows.kind: rows for rows in measurements.rows if rows.kind in OBSERVED}
    if "ttft" not in rows:
        return measurements, None
    ttft = rows["ttft"]
    overhead_ns, notes = _overhead_ns(rows)
    if not ttft.columns["context_tokens"].any():
        notes += ("no prompt had a cached prefix: the server has no prefix cache, or its times do not show hits",)
    overhead_ns = min(overhead_ns, _MOST_OVERHEAD * float(ttft.columns["time_ns"].min()))
    one, none = np.ones(len(ttft)), np.zeros(len(ttft))
    columns = {**ttft.columns, "time_ns": ttft.columns["time_ns"] - overhead_ns, "prompts": one, "graph": none}
    forwards = replace(ttft, kind="prefill", columns=columns)
    kept = tuple(one for one in measurements.rows if one.kind not in OBSERVED)
    bursts = tuple(one for one in measurements.rows if one.kind == "burst")
    return replace(measurements, rows=(*kept, forwards)), RequestOverhead(overhead_ns, bursts, (*notes, CANNOT_TELL))


def _overhead_ns(rows: dict[str, Rows]) -> tuple[float, tuple[str, ...]]:
    """Returns (time in ns, notes). The time is the part of a prompt's TTFT in which streams on the same GPUs continue,
    so no forward runs for the prompt. If no streams ran on the same GPUs: the median time of a round trip; 0 if no
    round trip was measured. rows: measured rows by kind.
    """
    if "stall" in rows:
        stall = rows["stall"].columns
        alone_ns = _alone_ns(rows["ttft"].columns, stall["new_tokens"])
        if np.median(stall["time_ns"] / alone_ns) > _SHARES_GPUS:
            long = alone_ns > ABOVE_LEAST[0] * alone_ns.min()
            counted = long if long.any() else np.ones_like(long)
            return max(0.0, _least_outside(stall["new_tokens"][counted], (alone_ns - stall["time_ns"])[counted])), ()
        notes = ("streams do not wait for prompts: another server prefills, and prefill times include KV transfers",)
    else:
        notes = ("no rows of kind stall: the time around a forward is taken to be one round trip",)
    round_trips_ns = rows["round_trip"].columns["time_ns"] if "round_trip" in rows else np.zeros(1)
    return float(np.median(round_trips_ns)), notes


def _least_outside(new_tokens: Floats, beyond_ns: Floats) -> float:
    """Returns the time in ns that every prompt spends outside its forward. new_tokens: lengths of the prompts.
    beyond_ns: for each prompt, its TTFT minus the time for which running streams waited. The result is the median of
    beyond_ns over prompts of similar length, for the length with the smallest median.
    """
    lengths = np.round(np.log2(new_tokens))
    return float(min(np.median(beyond_ns[lengths == length]) for length in np.unique(lengths)))


def _alone_ns(ttft: dict[str, Floats], new_tokens: Floats) -> Floats:
    """TTFT in ns of prompts of new_tokens tokens that are sent alone and have no cached prefix. ttft: columns of the
    rows of kind `ttft`. Interpolated between the nearest measured lengths.
    """
    fresh = ttft["context_tokens"] == 0
    tokens, times_ns = ttft["new_tokens"][fresh], ttft["time_ns"][fresh]
    lengths = np.round(np.log2(tokens) * 2)
    shapes = np.unique(lengths)
    middle_tokens, middle_ns = (
        np.array([np.median(values[lengths == shape]) for shape in shapes]) for values in (tokens, times_ns)
    )
    return np.asarray(np.interp(new_tokens, middle_tokens, middle_ns))


def _forward_ns(prefill: FittedForm, new_tokens: Floats, prompts: Floats | int) -> Floats:
    none = np.zeros_like(new_tokens)
    sizes = {
        "new_tokens": new_tokens,
        "context_tokens": none,
        "prompts": prompts + none,
        "graph": none,
        "time_ns": none,
    }
    return prefill.times_ns(sizes)
