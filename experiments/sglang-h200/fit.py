"""Fits the profiles of this study to forward-pass rows: python experiments/sglang-h200/fit.py

GPU times only; what the CPU, the gateway and the transfers take comes from constants.py. A prefill forward takes
  max(least, (base + per_token tokens + per_pair pairs) (1 + slowdown U))
with U from the same GpuClock that the simulator uses, forward by forward. A decode step is a straight line in the rows
of its CUDA graph, and attention in waves, by the simulator's AttentionWaves. Residuals are relative, and soft_l1 keeps
the few forwards that stood still for another reason (31 of 866) from pulling the line.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import constants
import numpy as np
from rows import HERE, Floats, Forwards, Steps, forwards, shared_steps, steps
from scipy.optimize import least_squares

from pdsim.cost.affine import GpuClock
from pdsim.cost.model import FRACTION_BITS, DecodeLine
from pdsim.cost.step_times import AttentionWaves, captured_batches
from pdsim.scenario.sections.cost import Setup
from pdsim.scenario.yaml_file import write_yaml

DATE = "2026-11-21"
DEVICE = "NVIDIA H200 141 GB, NVLink; 32 CPU cores"
SOFTWARE = "SGLang 0.5.12.post1, attention fa3, torch 2.11.0+cu130, NIXL 1.5 over UCX cuda_ipc"
COMMAND = "python experiments/sglang-h200/fit.py"

SOFT = 0.03
"""Relative error from which on a residual counts by its size, no longer by its square."""
HELD_UP = 0.25
"""Forwards this far off are told apart in the errors: a thread that posted descriptors kept their launch waiting."""
MEMORY_NS = 100e6
SHORT_CONTEXT = 2500
SMS, QUERY_ROWS = 132, 128
"""Streaming multiprocessors of an H200, and query rows of one tile of FlashAttention-3."""


@dataclass(frozen=True)
class Shape:
    """What one GPU computes of a model."""

    q_heads: int
    kv_heads: int
    layers: int

    @property
    def wave_tokens(self) -> int:
        """Tokens whose queries fill every SM once: the query heads of one KV head are packed into one tile."""
        return SMS * QUERY_ROWS // (self.q_heads // self.kv_heads * self.kv_heads)

    @property
    def head_bytes(self) -> int:
        """KV of a token in one KV head: K and V of 128 dimensions in bf16, all layers."""
        return 512 * self.layers


QWEN3_8B, QWEN3_8B_TP2, QWEN3_32B = Shape(32, 8, 36), Shape(16, 4, 36), Shape(64, 8, 64)
"""Waves of 528, 1,056 and 264 tokens."""
CAPTURED = np.array(captured_batches(512, 512))


class Prefill(NamedTuple):
    """Coefficients in ms, ms per 1,000 tokens, ms per million pairs."""

    least: float
    base: float
    per_token: float
    per_pair: float
    slowdown: float


class Decode(NamedTuple):
    """Coefficients of a step: ms, ms per row of its graph, GB/s of the memory and of one SM, us of a layer's merge."""

    base: float
    per_request: float
    memory: float
    sm: float
    merge: float

    def waves(self, shape: Shape) -> AttentionWaves:
        merge_ns = 1e3 * shape.layers * self.merge
        return AttentionWaves(SMS, shape.kv_heads, shape.head_bytes / self.sm, merge_ns)

    def read_ns(self, shape: Shape) -> float:
        """KV of one token from memory."""
        return shape.kv_heads * shape.head_bytes / self.memory

    def computed_ns(self, shape: Shape) -> float:
        """KV of one token on all SMs: what is left in a full wave if the prefix is shared."""
        return shape.kv_heads * shape.head_bytes / self.sm / SMS


def pairs(rows: Forwards, wave_tokens: int) -> Floats:
    """As affine.py counts them, for prompts of a forward that are equally long: rows do not say how long each was."""
    waves_tokens = np.ceil(rows.num_tokens / wave_tokens) * wave_tokens
    return (rows.num_tokens**2 / 2 + rows.num_context_tokens * waves_tokens) / rows.num_prompts


def prefill_ms(terms: Prefill, rows: Forwards, wave_tokens: int) -> Floats:
    rested = terms.base + terms.per_token * rows.num_tokens / 1e3
    rested += terms.per_pair * pairs(rows, wave_tokens) / 1e6
    times = np.empty(len(rested))
    for server in np.unique(rows.server):
        clock, free_ns = GpuClock(terms.slowdown, MEMORY_NS), 0
        for i in np.flatnonzero(rows.server == server):
            since_first_s = rows.end_s[i] - rows.end_s[0]
            start_ns = max(free_ns, round(1e9 * (1 + since_first_s) - 1e6 * rows.gpu_ms[i]))
            stretched = clock.stretch(start_ns, max(1.0, 1e6 * rested[i]))
            free_ns = start_ns + round(stretched)
            times[i] = stretched / 1e6
    return np.maximum(terms.least, times)


def decode_ms(terms: Decode, rows: Steps, shape: Shape, repeated_tokens: Floats | float = 0) -> Floats:
    """repeated_tokens: read again by requests of one wave."""
    waves, smooth = terms.waves(shape), DecodeLine.of_ns(0, 0, terms.read_ns(shape))
    batches, of_batch = np.unique(rows.batch, return_inverse=True)
    lines = [waves.line(int(batch), smooth) for batch in batches]
    columns = np.array([(base, context + distinct, distinct) for base, context, distinct in lines])[of_batch].T
    base, per_token, per_distinct = columns / (1e6 * (1 << FRACTION_BITS))
    graph = CAPTURED[np.searchsorted(CAPTURED, rows.batch)]
    return np.asarray(
        terms.base + terms.per_request * graph + base + per_token * rows.kv_tokens - per_distinct * repeated_tokens
    )


def robust(errors: Callable[[Sequence[float]], Floats], start: Sequence[float]) -> list[float]:
    found = least_squares(errors, start, loss="soft_l1", f_scale=SOFT, x_scale=np.abs(start))
    return [float(x) for x in found.x]


def fit_prefill(rows: Forwards, wave_tokens: int, start: Prefill, *, fixed: Mapping[str, float]) -> Prefill:
    """A row counts by its GPU time, so that busy periods come out as long as they were."""
    weight = np.sqrt(rows.gpu_ms / rows.gpu_ms.mean())
    free = [name for name in Prefill._fields if name not in fixed]

    def named(values: Sequence[float]) -> Prefill:
        return start._replace(**fixed, **dict(zip(free, values, strict=True)))

    def errors(values: Sequence[float]) -> Floats:
        return (prefill_ms(named(values), rows, wave_tokens) / rows.gpu_ms - 1) * weight

    return named(robust(errors, [getattr(start, name) for name in free]))


def fit_decode(rows: Steps, shape: Shape, start: Decode, *, fixed: Mapping[str, float]) -> Decode:
    free = [name for name in Decode._fields if name not in fixed]

    def named(values: Sequence[float]) -> Decode:
        return start._replace(**fixed, **dict(zip(free, values, strict=True)))

    def errors(values: Sequence[float]) -> Floats:
        return decode_ms(named(values), rows, shape) / rows.gpu_ms - 1

    return named(robust(errors, [getattr(start, name) for name in free]))


# Errors by region.


def prefill_region(rows: Forwards) -> list[str]:
    names = ("to 256", "257 to 1,023", "1,024 to 2,047", "2,048 to 8,191", "8,192 and more")
    sizes = np.searchsorted([257, 1024, 2048, 8192], rows.num_tokens, side="right")
    behind = np.where(rows.num_context_tokens > SHORT_CONTEXT, " on long context", "")
    return [f"{names[size]} new tokens{context}" for size, context in zip(sizes, behind, strict=True)]


def decode_region(rows: Steps) -> list[str]:
    names = ("1", "2 to 8", "9 to 16", "17 to 32", "33 to 48", "49 and more")
    sizes = np.searchsorted([2, 9, 17, 33, 49], rows.batch, side="right")
    behind = np.where(rows.kv_tokens / rows.batch > SHORT_CONTEXT, ", long context", "")
    return [f"batch {names[size]}{context}" for size, context in zip(sizes, behind, strict=True)]


def error_report(what: str, errors: Floats, regions: Sequence[str]) -> dict[str, object]:
    """Prints errors by region; the summary goes into the profile."""
    near = np.abs(errors) < HELD_UP
    by_region = {}
    print(f"\n{what}: {len(errors)} rows")
    for region in sorted(set(regions)):
        chosen = near & (np.array(regions) == region)
        if chosen.any():
            by_region[region] = float(np.abs(errors[chosen]).mean())
            share, bias = f"{by_region[region]:6.1%}", f"{np.median(errors[chosen]):+6.1%}"
            print(f"  {region:44} {chosen.sum():6} rows, mean absolute error {share}, median {bias}")
    worst = max(by_region, key=lambda region: by_region[region])
    of_near, of_all = (float(np.abs(chosen).mean()) for chosen in (errors[near], errors))
    apart = f"without the {(~near).sum()} that are off by more than {HELD_UP:.0%}"
    print(f"  all: {of_all:.2%}, {of_near:.2%} {apart}")
    return {
        "rows": len(errors),
        "mean_absolute_error": f"{of_all:.2%}" + ("" if near.all() else f", {of_near:.2%} {apart}"),
        "worst_region": f"{worst}: {by_region[worst]:.1%}",
    }


# Profiles.


def cost(prefill: Prefill, wave_tokens: int, decode: Decode, shape: Shape, host: constants.Host) -> dict[str, object]:
    return {
        "prefill": {
            "use": "affine",
            "prefill_base": f"{prefill.base:.3g} ms",
            "prefill_per_token": f"{prefill.per_token:.4g} us",
            "prefill_per_pair": f"{prefill.per_pair:.4g} ns",
            "prefill_least": f"{prefill.least:.3g} ms",
            "prefill_wave_tokens": wave_tokens,
            "prefill_slowdown": round(prefill.slowdown, 3),
            "prefill_slowdown_memory": f"{MEMORY_NS / 1e6:g} ms",
        },
        "decode": {
            "use": "affine",
            "decode_base": f"{decode.base + constants.HOST_OF_STEP_MS:.4g} ms",
            "decode_per_request": f"{1e3 * decode.per_request:.3g} us",
            "decode_per_context_token": f"{decode.computed_ns(shape):.4g} ns",
            "decode_per_distinct_token": f"{decode.read_ns(shape) - decode.computed_ns(shape):.4g} ns",
        },
        "graph_sizes": "sglang",
        "attention_sm_bandwidth": f"{decode.sm:.4g} GB/s",
        "attention_merge": f"{decode.merge:.3g} us",
        "host": {name: f"{value:g} ms" for name, value in host._asdict().items()},
    }


def measured_on(model: str, tp: tuple[int, int], prefill: Forwards, decode: Steps) -> dict[str, object]:
    """The setup of the fitted rows, and their sizes."""
    setup = Setup(model=model, weight_dtype="bf16", kv_dtype="bf16", device="h200", tp=tp)
    sizes = {
        "prefill_new_tokens": prefill.num_tokens,
        "prefill_context_tokens": prefill.num_context_tokens,
        "decode_batch": decode.batch,
        "decode_context_tokens": decode.kv_tokens,
    }
    ranges = {name: [int(values.min()), int(values.max())] for name, values in sizes.items()}
    return {**setup.model_dump(mode="json"), **ranges}


def write_profile(name: str, model: str, cost_of: Mapping[str, object], prefill: object, decode: object) -> None:
    provenance = {
        "model": model,
        "prefill": prefill,
        "decode": decode,
        "host": "constants.py",
        "command": COMMAND,
        "date": DATE,
        "device": DEVICE,
        "software": SOFTWARE,
    }
    path = HERE / f"{name}.yaml"
    write_yaml({"name": name, "cost": cost_of, "provenance": provenance}, path)


def report_prefill(name: str, servers: tuple[str, ...], terms: Prefill, wave: int, note: str = "") -> dict[str, object]:
    rows = forwards(*servers)
    errors = prefill_ms(terms, rows, wave) / rows.gpu_ms - 1
    summary = error_report(f"prefill, {name}", errors, prefill_region(rows))
    print(f"  {terms}")
    return {"fitted_on": [f"steps_{server}" for server in servers], **({"note": note} if note else {}), **summary}


def report_decode(
    name: str, servers: tuple[str, ...], terms: Decode, shape: Shape, note: str = ""
) -> dict[str, object]:
    rows = steps(*servers)
    summary = error_report(f"decode, {name}", decode_ms(terms, rows, shape) / rows.gpu_ms - 1, decode_region(rows))
    print(f"  {terms}")
    return {"fitted_on": [f"steps_{server}" for server in servers], **({"note": note} if note else {}), **summary}


def report_jumps(rows: Steps, terms: Decode, shape: Shape) -> None:
    """Prints by how much steps grow from the last batch of a wave to the first beyond it, measured and fitted."""
    print("\njumps, ms from the median step of one batch to that of the next: measured, fitted")
    predicted = decode_ms(terms, rows, shape)
    for num_waves in range(1, int(rows.batch.max()) * shape.kv_heads // SMS + 1):
        last = num_waves * SMS // shape.kv_heads
        before, after = (rows.batch == batch for batch in (last, last + 1))
        if before.any() and after.any():
            jumps = (np.median(times[after]) - np.median(times[before]) for times in (rows.gpu_ms, predicted))
            print(f"  {last} to {last + 1} requests: " + ", ".join(f"{jump:+.2f}" for jump in jumps))


def servers_of(runs: Sequence[str], side: str) -> tuple[str, ...]:
    return tuple(f"{run}_{side}" for run in runs)


def main() -> None:
    one_gpu = ("lot1", "lot2", "shared_base")
    two_gpus = ("tp2to2_c1", "tp2to2_c16", "tp2to1_slice_c1", "tp2to1_staging1g_c1")
    pre_8b, pre_tp2, pre_32b = (servers_of(runs, "p0") for runs in (one_gpu, two_gpus, ("b32",)))
    dec_8b, dec_tp2, dec_32b = (servers_of(runs, "d0") for runs in (one_gpu, two_gpus[:2], ("b32",)))
    wave_8b, wave_tp2, wave_32b = (shape.wave_tokens for shape in (QWEN3_8B, QWEN3_8B_TP2, QWEN3_32B))

    prefill = fit_prefill(forwards(*pre_8b), wave_8b, Prefill(11.5, 1.5, 19, 0.84, 0.2), fixed={})
    slowdown = {"slowdown": prefill.slowdown}
    half = {"per_pair": prefill.per_pair / 2}
    prefill_tp2 = fit_prefill(forwards(*pre_tp2), wave_tp2, Prefill(17, 3, 11, 0.4, 0), fixed=slowdown | half)
    prefill_32b = fit_prefill(forwards(*pre_32b), wave_32b, Prefill(19, 3, 82, 2.9, 0), fixed=slowdown)
    decode = fit_decode(steps(*dec_8b), QWEN3_8B, Decode(5, 0.01, 4400, 64, 4), fixed={})
    attention = {name: getattr(decode, name) for name in ("memory", "sm", "merge")}
    per_request_32b = {"per_request": decode.per_request * QWEN3_32B.layers / QWEN3_8B.layers}
    decode_tp2 = fit_decode(steps(*dec_tp2), QWEN3_8B_TP2, decode, fixed=attention)
    decode_32b = fit_decode(steps(*dec_32b), QWEN3_32B, decode, fixed=attention | per_request_32b)

    shared = "slowdown of the 8B rows"
    of_8b = report_prefill("8B TP1", pre_8b, prefill, wave_8b)
    of_tp2 = report_prefill("8B TP2", pre_tp2, prefill_tp2, wave_tp2, f"{shared}; half of TP1's time per pair")
    of_32b = report_prefill("32B TP1", pre_32b, prefill_32b, wave_32b, shared)
    report_prefill("8B TP1, aggregated server, not fitted", ("agg_a",), prefill, wave_8b)
    own = "attention of 8B TP1"
    steps_8b = report_decode("8B TP1", dec_8b, decode, QWEN3_8B)
    steps_tp2 = report_decode("8B TP2", dec_tp2, decode_tp2, QWEN3_8B_TP2, own)
    steps_32b = report_decode("32B TP1", dec_32b, decode_32b, QWEN3_32B, f"{own}; time per request too, by layers")
    for name, server, terms, shape in (
        ("8B TP1, aggregated server", "agg_a", decode, QWEN3_8B),
        ("8B TP1, behind prefill with TP2", "tp2to1_slice_c16_d0", decode, QWEN3_8B),
        ("8B TP2, behind prefill with TP1", "tp1to2_staging1g_c16_d0", decode_tp2, QWEN3_8B_TP2),
    ):
        report_decode(f"{name}, not fitted", (server,), terms, shape)
    report_jumps(steps(*dec_8b), decode, QWEN3_8B)
    shared_rows, repeated = shared_steps("shared_radix", 12_000, SMS / QWEN3_8B.kv_heads)
    errors = decode_ms(decode, shared_rows, QWEN3_8B, repeated) / shared_rows.gpu_ms - 1
    error_report("decode of shared prefixes, 8B TP1, not fitted", errors, decode_region(shared_rows))

    hosts = constants.hosts({"8b": prefill.least, "tp2": prefill_tp2.least, "32b": prefill_32b.least})
    made = {
        "profile": ("qwen3-8b", cost(prefill, wave_8b, decode, QWEN3_8B, hosts["8b"]), of_8b, steps_8b),
        "profile-tp2": (
            "qwen3-8b",
            cost(prefill_tp2, wave_tp2, decode_tp2, QWEN3_8B_TP2, hosts["tp2"]),
            of_tp2,
            steps_tp2,
        ),
        "profile-tp2to1": ("qwen3-8b", cost(prefill_tp2, wave_tp2, decode, QWEN3_8B, hosts["tp2"]), of_tp2, steps_8b),
        "profile-tp1to2": ("qwen3-8b", cost(prefill, wave_8b, decode_tp2, QWEN3_8B_TP2, hosts["8b"]), of_8b, steps_tp2),
        "profile-32b": (
            "qwen3-32b",
            cost(prefill_32b, wave_32b, decode_32b, QWEN3_32B, hosts["32b"]),
            of_32b,
            steps_32b,
        ),
    }
    fitted_on = {
        "profile": ((1, 1), pre_8b, dec_8b),
        "profile-tp2": ((2, 2), pre_tp2, dec_tp2),
        "profile-tp2to1": ((2, 1), pre_tp2, dec_8b),
        "profile-tp1to2": ((1, 2), pre_8b, dec_tp2),
        "profile-32b": ((1, 1), pre_32b, dec_32b),
    }
    for name, (model, cost_of, prefill_rows, decode_rows) in made.items():
        tp, prefills, decodes = fitted_on[name]
        measured = measured_on(model, tp, forwards(*prefills), steps(*decodes))
        write_profile(name, model, {**cost_of, "measured": measured}, prefill_rows, decode_rows)
    constants.report()


if __name__ == "__main__":
    main()
