"""Makes a profile from measured rows: fits formulas to times of steps, transfers and copies, and lays out the file."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from pdsim.calibration.fit import machine, regression
from pdsim.calibration.fit.clock import GpuSlowdown, gpu_slowdown
from pdsim.calibration.fit.launches import launch_ns, missing_work, with_launches
from pdsim.calibration.fit.machine import RequestOverhead, without_overhead
from pdsim.calibration.fit.regression import FittedForm, Form, fit
from pdsim.calibration.fit.rows import (
    FORWARDS,
    OBSERVED,
    PREFILL_GRAPHS,
    STAGING,
    UNKNOWN,
    Measurements,
    Rows,
    graph_sizes,
)
from pdsim.cost.kernels import tile_of
from pdsim.dataclass import dataclass
from pdsim.scenario.sections.cost import Setup
from pdsim.scenario.sections.profile import origin
from pdsim.scenario.yaml_file import ConfigError, did_you_mean
from pdsim.system.catalog import load_gpu, load_model, load_transport, names
from pdsim.system.model import KV_DTYPES, ModelSpec

TABLE_ABOVE = 0.05
"""Mean relative error of straight lines on held-out rows above which a table is tried. With CUDA graphs: always."""
_PHASES: dict[str, tuple[Callable[[Rows], Form], Callable[[Rows], Form]]] = {
    "prefill": (regression.prefill_form, regression.prefill_table),
    "decode": (regression.decode_form, regression.decode_table),
}
_NOT_FITTED = (*machine.MEASURED_KINDS, "clock", "storage", *OBSERVED)
"""Kinds of rows to which no form is fitted separately."""
LEAST_CONTEXT_TOKENS = 1000
"""Minimum number of context tokens per request of the decode rows that are fitted for a model with experts. With
shorter contexts, requests choose the same experts more often than in a real run, so that a step reads fewer experts.
"""
SHARED_READING = 0.47
"""Share of the time of reading a KV token that requests with a common prefix pay once; each of them pays the rest.
Memory delivers a shared token once, but the SMs read it for each request: the share is 1 minus the SMs' time divided by
the memory's time, in the fit of SGLang on an H200 (experiments/sglang-h200). Measured rows have no shared KV.
"""
LEAST_NS = 1e-6
"""Fitted coefficients below this number of ns are written as 0. Fits come near 0 without reaching it."""
_LONG_TOKENS = 1024
_TILE_TOKENS = 256
"""Matrix kernels compute tiles of up to this many tokens. One more token needs further tiles, which take as long as
full ones. With fp8 on an H100, 2,049 to 2,304 tokens took 41 ms, and 2,048 tokens 31 ms (experiments/sglang-llama).
"""
_MOSTLY_ROUND = 0.9
_RANGES = {
    "prefill": {"prefill_new_tokens": "new_tokens", "prefill_context_tokens": "context_tokens"},
    "decode": {"decode_batch": "batch", "decode_context_tokens": "context_tokens"},
}


@dataclass(frozen=True)
class Calibration:
    """The results of fitting measured rows."""

    measurements: Measurements
    """All measured rows. Those of kind `ttft` have become rows of kind `prefill` (without_overhead)."""
    fits: dict[str, FittedForm]
    """Fitted times of prefill, decode, gather and scatter, by kind of rows, and of transfers, by transport."""
    host_ns: dict[str, float]
    """Median times in ns of host work, by the name of the work, such as message."""
    clock: GpuSlowdown | None
    """Slowdown of a busy GPU. The fitted times of prefill are then those without slowdown. None: not measured."""
    gpu: str | None
    """Name of the GPU in the catalog. The measured speed of staging is compared with this GPU's memory bandwidth. None:
    not known.
    """
    overhead: RequestOverhead | None = None
    """The part of requests' TTFT outside forwards. None: no client measured it."""
    notes: tuple[str, ...] = field(default=())
    """Says which parts could not be fitted, and why."""


def calibrate(measurements: Measurements, *, gpu: str | None = None, table_above: float = TABLE_ABOVE) -> Calibration:
    """Fits the forms of a profile to measured rows. Raises ConfigError if rows of prefill or decode are missing or have
    too few shapes, if the GPU is not in the catalog, or if scipy is not installed.

    gpu: name of the GPU in the catalog; None: the GPU of the catalog that the rows name. table_above: see TABLE_ABOVE.
    """
    if find_spec("scipy") is None:
        raise ConfigError("fitting needs scipy: pip install 'pdsim[calibrate]'")
    gpu = gpu or _gpu_of(measurements.devices)
    if gpu is not None and gpu not in names("gpus"):
        raise ConfigError(
            f"no GPU {gpu!r} in the catalog{did_you_mean(gpu, names('gpus'))}; it has {', '.join(names('gpus'))}"
        )
    measurements = with_launches(measurements)
    clock = gpu_slowdown(measurements)
    measurements, overhead = without_overhead(measurements)
    models = [load_model(name) for name in measurements.forwards.get("model", ()) if name in names("models")]
    known = _Known.of(gpu, models, measurements.forwards.get("dtype", []))
    fits: dict[str, FittedForm] = {}
    notes = [*measurements.notes, *(overhead.notes if overhead else ()), *_round_lengths(measurements, known)]
    for rows in measurements.rows:
        if rows.kind in _NOT_FITTED:
            continue
        try:
            kept = _with_long_contexts(rows) if known.has_experts and not overhead else rows
            fits[rows.name or rows.kind] = _fit(kept, clock, table_above, known, by_ratio=overhead is not None)
            if len(kept) < len(rows):
                less = f"contexts below {LEAST_CONTEXT_TOKENS:,} tokens per request, which use fewer experts"
                notes.append(f"{len(rows) - len(kept)} of {len(rows)} rows of {rows.kind} are left out: {less}")
        except ValueError as too_few:
            notes.append(f"{rows.name or rows.kind} is left out: {too_few}")
    if not fits.keys() >= {"prefill", "decode"}:
        lacking = " and ".join(kind for kind in _PHASES if kind not in fits)
        raise ConfigError(f"a profile needs rows of {lacking} in enough shapes{''.join(f'; {note}' for note in notes)}")
    notes += missing_work(fits["prefill"], measurements)
    if gpu is None and fits.keys() & set(STAGING):
        notes.append(f"staging is left out: no GPU of the catalog is in {measurements.devices!r}; name it with --gpu")
    return Calibration(
        measurements,
        fits,
        host_ns=machine.medians_ns(measurements),
        clock=clock,
        gpu=gpu,
        overhead=overhead,
        notes=tuple(notes),
    )


class _Known(NamedTuple):
    """Data of the catalog on the measured model and GPU."""

    has_experts: bool
    """True: the model has routed experts."""
    tile_tokens: int | None
    """Number of tokens in a tile of matrix products. None: the GPU or the data type is not known, the catalog
    lacks the model, or data types have different tiles.
    """

    @classmethod
    def of(cls, gpu: str | None, models: Sequence[ModelSpec], dtypes: Sequence[str]) -> "_Known":
        has_experts = any(model.experts for model in models)
        tiles = {tile_of(gpu, dtype, has_experts=has_experts) for dtype in dtypes} if gpu and models else set()
        return cls(has_experts, tiles.pop() if len(tiles) == 1 else None)


def _round_lengths(measurements: Measurements, known: _Known) -> Iterator[str]:
    """Yields a note if most long prefill rows (_count_round_lengths) have multiples of _TILE_TOKENS tokens, at which
    kernels are fastest. Yields nothing if the tile size of the GPU's matrix products is known.
    """
    for rows in measurements.of("prefill") if known.tile_tokens is None else ():
        num_round, num_long = _count_round_lengths(rows)
        if num_round:
            yield (
                f"{num_round} of {num_long} prefill rows of {_LONG_TOKENS:,} tokens or more have lengths that are "
                f"multiples of {_TILE_TOKENS}. Kernels are fastest at such lengths: other prompts can take 10 to 30 % "
                "longer. Measure some."
            )


def _count_round_lengths(rows: Rows) -> tuple[int, int]:
    """Number of long prefill rows (at least _LONG_TOKENS new tokens) whose length is a multiple of _TILE_TOKENS, and
    number of all long rows. The first number is 0 if it is below the share _MOSTLY_ROUND of the second.
    """
    tokens = rows.columns["new_tokens"]
    tokens = tokens[tokens >= _LONG_TOKENS]
    num_round = int((tokens % _TILE_TOKENS == 0).sum())
    return num_round if num_round >= _MOSTLY_ROUND * len(tokens) else 0, len(tokens)


def profile_of(made: Calibration, name: str, command: str, *, host_slowdown: float = 1) -> dict[str, Any]:
    """The content of a profile file. made: the fitted times. name: name of the profile. command: the command that made
    the profile. host_slowdown: factor by which simulated host work is slower than measured.
    """
    network = {
        "transports": {
            rows.name: _link(made.fits[rows.name], machine.SendingTime.fitted(made.measurements, made.fits[rows.name]))
            | _times(machine.handover_ns(made.measurements, made.host_ns, made.fits[rows.name]))
            for rows in made.measurements.of("transfer")
            if rows.name in made.fits
        },
        "staging": _staging(made),
        **({"message_latency": _time(made.host_ns["message"])} if "message" in made.host_ns else {}),
    }
    slowdown = {"slowdown": host_slowdown} if host_slowdown != 1 else {}
    cost = {
        "prefill": {**_prefill(made), **_slowdown(made.clock)},
        "decode": _decode(made.fits["decode"]),
        "host": {**_times(_loop_ns(made)), **slowdown},
        **_graphs(made.fits["decode"]),
        "measured": {**_setup(made), **_ranges(made.measurements)},
    }
    sections: dict[str, dict[str, Any]] = {
        "cost": cost,
        "network": network,
        "front_end": _front_end(made),
    }
    return {
        "name": name,
        **_without_empty({name: _without_empty(section) for name, section in sections.items()}),
        "provenance": {
            "measured": [dict(file) for file in made.measurements.provenance],
            "fitted": {kind: _described(fitted) for kind, fitted in made.fits.items()},
            "intervals": "95 %, by bootstrap over shapes",
            **origin(command),
        },
    }


def _fit(rows: Rows, clock: GpuSlowdown | None, table_above: float, known: _Known, *, by_ratio: bool) -> FittedForm:
    """Fits a formula to the times of one kind of rows. For steps, a table replaces straight lines if its median error
    on held-out rows is smaller. table_above: mean error of lines above which a table is tried; with CUDA graphs always.
    clock: slowdown of a busy GPU; None: not measured. by_ratio: True: a client of a server measured the times, so the
    fit counts errors as ratios, not as differences. Raises ValueError if rows have too few shapes.
    """
    if rows.kind == "transfer":
        return fit(partial(regression.transfer_form, _overlap(rows.name)), rows)
    if rows.kind not in _PHASES:
        return fit(regression.staging_form, rows)
    if rows.kind == "prefill" and clock is not None:
        rows = clock.stretching(rows)
    affine, table = _forms(rows, known)
    lines = fit(affine, rows, by_ratio=by_ratio)
    if lines.error <= table_above and not rows.columns.get("graph", np.zeros(1)).any():
        return lines
    try:
        return min(lines, fit(table, rows, by_ratio=by_ratio), key=lambda fitted: fitted.typical_error)
    except ValueError:  # too few shapes for a table
        return lines


def _forms(rows: Rows, known: _Known) -> tuple[Callable[[Rows], Form], Callable[[Rows], Form]]:
    """Returns two functions from measured rows to a formula (Form) for the times of prefill or decode: one with
    straight lines, one with a table. rows: the measured rows. known: catalog data on the measured model and GPU. In
    decode steps of a model with experts, a CUDA graph's rows without a request take no time besides that of their KV,
    because all of them choose the same experts (experiments/expert-parallel-two-h200).
    """
    affine, table = _PHASES[rows.kind]
    fixed: dict[str, Any] = {"has_free_rows": known.has_experts}
    if rows.kind == "prefill":
        is_round = _count_round_lengths(rows)[0] > 0
        tile_tokens = known.tile_tokens or 1 if is_round else regression.best_tile(rows)
        fixed = {"wave_tokens": regression.best_wave(rows), "tile_tokens": tile_tokens}
    return partial(affine, **fixed), partial(table, **fixed)


def _with_long_contexts(rows: Rows) -> Rows:
    """The decode rows with at least LEAST_CONTEXT_TOKENS per request, whose requests choose experts as in a real run.
    Returns all rows if none is so long, and rows of other kinds as they are.
    """
    if rows.kind != "decode":
        return rows
    is_long = rows.columns["context_tokens"] >= LEAST_CONTEXT_TOKENS * rows.columns["batch"]
    return rows.where(is_long) if is_long.any() else rows


def _overlap(transport: str) -> float:
    """The share by which posting descriptors and moving bytes overlap, from the catalog's transport. 0: the catalog
    lacks the transport. This share is not fitted.
    """
    return load_transport(transport).overlap if transport in names("transports") else 0.0


def _gpu_of(device: str) -> str | None:
    known = [name for name in names("gpus") if name in device.lower().replace(" ", "-")]
    return max(known, key=len, default=None)


# As a scenario writes it.


def _prefill(made: Calibration) -> dict[str, Any]:
    fitted = made.fits["prefill"]
    entries = {"prefill": _entries(fitted)} if fitted.form.name == "table" else {}
    lines = {name: value for name, value in fitted.values.items() if not _is_of_table(name)}
    section: dict[str, Any] = {
        "use": fitted.form.name,
        **entries,
        **{f"prefill_{name}": _time(value) for name, value in lines.items() if name != "launch"},
    }
    if fitted.form.tile_tokens > 1:
        section["prefill_tile_tokens"] = fitted.form.tile_tokens
    if not (graphs := made.measurements.forwards[PREFILL_GRAPHS]):
        return section
    return {**section, "prefill_graph_sizes": graph_sizes(graphs[0]), "prefill_wave_tokens": fitted.form.wave_tokens}


def _loop_ns(made: Calibration) -> machine.Times:
    """Fields of the profile's section `host`: CPU times in ns of the prefill loop and of the decode loop. The field
    `launch` comes from the host rows, or else from the launches in a server's log. The log's time begins after the loop
    has chosen the forward, so the field `start` is added to it.
    """
    times_ns = machine.loop_ns(made.host_ns) | machine.rest_ns(made.measurements, made.fits["decode"])
    shown_ns = launch_ns(made.fits["prefill"])
    return times_ns if shown_ns is None else {"launch": shown_ns + times_ns.get("start", 0.0)} | times_ns


def _slowdown(clock: GpuSlowdown | None) -> dict[str, Any]:
    if clock is None or not clock.slowdown:
        return {}
    return {"prefill_slowdown": round(clock.slowdown, 4), "prefill_slowdown_memory": _time(clock.memory_ns)}


def _decode(fitted: FittedForm) -> dict[str, Any]:
    per_token_ns = fitted.values["per_context_token"]
    reading = {
        "decode_per_context_token": _time((1 - SHARED_READING) * per_token_ns),
        "decode_per_distinct_token": _time(SHARED_READING * per_token_ns),
    }
    if fitted.form.name == "table":
        return {"use": "table", "decode": _entries(fitted), **reading}
    lines = {f"decode_{name}": _time(fitted.values[name]) for name in ("base", "per_request")}
    return {"use": "affine", **lines, **reading}


def _graphs(fitted: FittedForm) -> dict[str, Any]:
    """Fields of the profile about CUDA graphs. Empty: some rows do not name the size of their graph. The profile's
    eager_layer is 0, so a batch larger than all measured graphs is timed as if it ran in a graph.
    """
    sizes = np.unique(fitted.rows.columns.get("graph", 0))
    if not sizes.all():
        return {}
    per_token = fitted.values["per_context_token"]
    share = fitted.values.get("per_empty_row_token", 0.0) / per_token if per_token > LEAST_NS else 0.0
    return {
        "graph_sizes": sizes.astype(int).tolist(),
        "graph_empty_rows_free": fitted.form.has_free_rows,
        "graph_empty_row_kv": round(share, 3),
        "eager_layer": "0 ns",
    }


def _entries(fitted: FittedForm) -> dict[int, str]:
    climbs = [value for name, value in fitted.values.items() if _is_of_table(name)]
    return {round(k): _time(float(ns)) for k, ns in zip(fitted.form.knots, np.cumsum(climbs), strict=True)}


def _is_of_table(name: str) -> bool:
    """True for a coefficient of a time table: `first`, the first time, or `to N`, the rise of the time up to size N."""
    return name == "first" or name.startswith("to ")


def _front_end(made: Calibration) -> dict[str, Any]:
    """Returns the section front_end of the profile. With host rows named `submit`, which real mode measures, the
    section sets holds_client: one thread of the launcher handles the requests one after another, and clients share it.
    """
    if made.overhead is not None:
        return _times(made.overhead.front_end_ns(made.fits["prefill"]))
    times_ns = machine.front_end_ns(made.measurements, made.host_ns)
    return {**_times(times_ns), **({"holds_client": True} if "submit" in made.host_ns else {})}


def _link(fitted: FittedForm, sending: machine.SendingTime) -> dict[str, Any]:
    per_byte = fitted.values["per_byte"] + sending.ns_per_byte
    bandwidth = {"bandwidth": f"{_digits(1 / per_byte)} GB/s"} if per_byte else {}
    return {
        **bandwidth,
        "transfer_latency": _time(round(fitted.values["batch"] + sending.batch_ns)),
        "descriptor_latency": _time(round(fitted.values["per_descriptor"])),
        **({"serial": True} if sending.serial else {}),
    }


def _staging(made: Calibration) -> dict[str, Any]:
    """The section `staging` of the profile. Empty: the GPU is not known. The host time of a copy is the median time to
    submit it, plus the fitted time of a copy of 0 bytes. A copy's efficiency is a share of memory bandwidth, where each
    byte counts twice: read and written.
    """
    if made.gpu is None:
        return {}
    memory_bytes_per_ns = load_gpu(made.gpu).memory_bandwidth / 1e9
    section: dict[str, Any] = {}
    for kind in STAGING:
        if kind in made.fits:
            fitted = made.fits[kind]
            submit_ns = 1e3 * fitted.rows.columns["submit_us"]
            submitting = float(np.median(submit_ns[submit_ns > 0])) if submit_ns.any() else 0.0
            section[f"{kind}_host"] = _time(round(fitted.values["base"] + submitting))
            section[f"{kind}_efficiency"] = round(min(1.0, 2 / fitted.values["per_byte"] / memory_bytes_per_ns), 3)
    return section


def _setup(made: Calibration) -> dict[str, Any]:
    """The setup in which the forwards were measured. Empty: the rows come from several models, or do not name their
    model.
    """
    setups = made.measurements.forwards
    if len(setups["model"]) != 1:
        return {}
    prefill, decode = (made.fits[phase].rows.ranks for phase in FORWARDS)
    kv_dtype = KV_DTYPES.get(setups["dtype"][0]) if len(setups["dtype"]) == 1 else None
    setup = Setup(
        model=setups["model"][0],
        weight_dtype=None if kv_dtype == "fp32" else kv_dtype,
        kv_dtype=kv_dtype,
        device=made.gpu or ", ".join(name for name in setups["device"] if name != UNKNOWN) or None,
        tp=(prefill.tp, decode.tp),
        ep=(prefill.ep, decode.ep) if setups["ep"] else None,
        moe_a2a_backend=(prefill.a2a, decode.a2a) if max(prefill.ep, decode.ep) > 1 else None,
        draft_tokens=int(setups["verified"][0]) if setups["verified"] else None,
    )
    return setup.model_dump(mode="json", exclude_none=True)


def _ranges(measurements: Measurements) -> dict[str, list[float]]:
    return {
        name: [float(rows.columns[column].min()), float(rows.columns[column].max())]
        for kind, ranges in _RANGES.items()
        for rows in measurements.of(kind)
        for name, column in ranges.items()
    }


def _described(fitted: FittedForm) -> dict[str, Any]:
    """Describes a fit in the profile: numbers of rows and shapes, errors, and coefficients in ns with intervals."""
    return {
        "form": fitted.form.name,
        "rows": len(fitted.rows),
        "shapes": fitted.num_shapes,
        "held_out_error": f"{fitted.error:.2%} mean absolute, {fitted.error_p90:.2%} at the 90th percentile",
        "parameters_ns": {
            name: f"{value:.4g}, {fitted.intervals[name][0]:.4g} to {fitted.intervals[name][1]:.4g}"
            for name, value in fitted.values.items()
        },
    }


def _without_empty(sections: Mapping[str, Any]) -> dict[str, Any]:
    return {name: section for name, section in sections.items() if section}


def _times(times_ns: Mapping[str, float]) -> dict[str, str]:
    return {name: _time(ns) for name, ns in times_ns.items()}


def _time(ns: float) -> str:
    for unit, factor in (("ms", 1e6), ("us", 1e3)):
        if ns >= factor:
            return f"{_digits(ns / factor)} {unit}"
    return f"{_digits(ns)} ns" if ns > LEAST_NS else "0 ns"


def _digits(value: float) -> str:
    return np.format_float_positional(value, precision=4, fractional=False, trim="-")
