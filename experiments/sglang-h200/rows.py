"""Reads data/: requests as the client saw them, forward passes and request stages as the servers reported them."""

import csv
import gzip
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent
DATA = HERE / "data"
RUNS_OF = {
    "lot1": ("smoke", "q4", "q16", "q32"),
    "lot2": ("s128", "s512", "s1024", "s2048", "s4096", "s8192", "s16384", "c1", "c8", "c32", "c64", "c128", "c256"),
    "b32": ("b32_s1024", "b32_s4096", "b32_s16384", "b32_c1"),
}
"""Runs that share one servers' life, in order; every other run had servers of its own."""
WORDS = ("side", "prefix_id")
"""Columns that hold no numbers."""
WARM_UP_LENGTHS = (4, 200)
"""Tokens of the requests that warm servers up; no run has such."""

Floats = NDArray[np.float64]
Columns = dict[str, Floats]


class Forwards(NamedTuple):
    """Prefill forwards of some servers, one after another."""

    server: Floats
    end_s: Floats
    gpu_ms: Floats
    num_prompts: Floats
    num_tokens: Floats
    """New ones."""
    num_context_tokens: Floats
    """Of all its prompts together."""

    def where(self, chosen: NDArray[np.bool_]) -> "Forwards":
        return Forwards(*(column[chosen] for column in self))


class Steps(NamedTuple):
    """Decode steps."""

    gpu_ms: Floats
    batch: Floats
    kv_tokens: Floats


class Served(NamedTuple):
    """Requests of a run in the order in which decode got them, in ms; beside them what prefill says of them."""

    ttft: Floats
    latency: Floats
    ready: Floats
    """From decode's entry until decode has the KV."""
    decoded: Floats
    """From decode's entry until its last token."""
    decode_entry: Floats
    prefill_forward: Floats
    """From the choice of its batch until prefill sees its transfer done."""
    sent: Floats
    """From its first send until prefill sees it done."""
    gb: Floats
    """Sent, in 1e9 bytes a rank."""
    tokens: Floats
    send: Floats
    """When the client sent it."""
    cached: Floats


def columns(name: str) -> Columns:
    """Those that hold numbers; empty fields are NaN."""
    with gzip.open(DATA / f"{name}.csv.gz", "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    return {key: np.array([float(row[key] or "nan") for row in rows]) for key in rows[0] if key not in WORDS}


def forwards(*servers: str) -> Forwards:
    """`prefill_kv_tokens` are the lengths that prompts reach, so the rest of them is context.

    A prompt that finds one token of another in the cache is still computed as if it found none.
    """
    parts = []
    for index, server in enumerate(servers):
        table = columns(f"steps_{server}")
        computes = table["num_prefill"] > 0
        end_s, gpu_s, prompts, tokens, reached = (
            table[key][computes] for key in ("t_unix_s", "gpu_s", "num_prefill", "prefill_tokens", "prefill_kv_tokens")
        )
        context = np.where(reached - tokens < 2 * prompts, 0, reached - tokens)
        parts.append(Forwards(np.full(len(end_s), float(index)), end_s, gpu_s * 1e3, prompts, tokens, context))
    return Forwards(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def steps(*servers: str) -> Steps:
    parts = []
    for server in servers:
        table = columns(f"steps_{server}")
        decodes = table["num_decode"] > 0
        parts.append(
            Steps(table["gpu_s"][decodes] * 1e3, table["num_decode"][decodes], table["decode_kv_tokens"][decodes])
        )
    return Steps(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def shared_steps(run: str, prefix_tokens: int, wave_requests: float) -> tuple[Steps, Floats]:
    """Decode steps over shared prefixes, and the KV tokens that requests of one wave read again.

    Requests are known by their lengths. Only steps of whose batch the stages of all requests tell the same size count.
    """
    with gzip.open(DATA / f"requests_{run}.csv.gz", "rt", newline="") as file:
        prefixes = {(row["in_tokens"], row["out_tokens"]): row["prefix_id"] for row in csv.DictReader(file)}
    table, reported = stages(run, "d0"), columns(f"steps_{run}_d0")
    ready_ms = sum(table[key] for key in ("bootstrap_ms", "alloc_wait_ms", "transfer_ms", "queue_ms"))
    joined_s = table["entry_unix_s"] + ready_ms / 1e3
    ended_s = joined_s + table["forward_ms"] / 1e3
    lengths = zip(table["input_tokens"], table["output_tokens"], strict=True)
    prefix = np.array([prefixes[f"{int(tokens)}", f"{int(output)}"] for tokens, output in lengths])
    rows = []
    for end_s, gpu_s, batch, kv_tokens in zip(
        *(reported[key] for key in ("t_unix_s", "gpu_s", "num_decode", "decode_kv_tokens")), strict=True
    ):
        running = np.flatnonzero((joined_s < end_s) & (ended_s >= end_s - 1e-3))
        if len(running) == batch > 0 and kv_tokens > batch * prefix_tokens:
            running = running[np.argsort(joined_s[running], kind="stable")]
            waves = (np.arange(len(running)) // wave_requests).astype(int)
            num_read = len(set(zip(waves, prefix[running], strict=True)))
            rows.append((1e3 * gpu_s, batch, kv_tokens, (batch - num_read) * prefix_tokens))
    *step, repeated = (np.array(column) for column in zip(*rows, strict=True))
    return Steps(*step), repeated


def served(run: str) -> Served:
    """Client and servers told apart requests by nothing but their order, which holds where few are sent at a time."""
    requests = columns(f"requests_{run}")
    prefill, decode = stages(run, "p0"), stages(run, "d0")
    send, first, end = (1e3 * requests[key] for key in ("send_s", "first_token_s", "end_s"))
    ready = sum(decode[key] for key in ("bootstrap_ms", "alloc_wait_ms", "transfer_ms", "queue_ms"))
    return Served(
        first - send,
        end - send,
        np.asarray(ready),
        ready + decode["forward_ms"],
        1e3 * decode["entry_unix_s"],
        prefill["forward_ms"],
        prefill["transfer_MB"] / 1.024 / prefill["transfer_GBps"],
        prefill["transfer_MB"] * 2**20 / 1e9,
        requests["in_tokens"],
        send,
        requests["cached_tokens"],
    )


def stages(run: str, side: str) -> Columns:
    """The rows of a run: what its servers report, without warm-ups, divided by the sizes of their runs.

    Where a run has a file of its own, that may begin with the end of the run before it.
    """
    server = next((name for name, runs in RUNS_OF.items() if run in runs), run)
    table = columns(f"stages_{server}_{side}")
    rows = np.flatnonzero(~np.isin(table["input_tokens"], WARM_UP_LENGTHS))
    rows = rows[np.argsort(table["entry_unix_s"][rows], kind="stable")]
    runs = RUNS_OF.get(server, (run,))
    ends = list(accumulate(len(columns(f"requests_{name}")["k"]) for name in runs))
    at = runs.index(run)
    chosen = rows[-ends[0] :] if len(runs) == 1 else rows[ends[at] - len(columns(f"requests_{run}")["k"]) : ends[at]]
    return {key: column[chosen] for key, column in table.items()}
