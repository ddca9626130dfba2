"""Forward passes as `pdsim calibrate` reads them: python experiments/sglang-h200/to_rows.py ROWS.csv.gz

Those of Qwen3-8B on one GPU. Times are the GPU's, measured while serving: of a GPU that may have computed for long.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from fit import COMMAND, DATE, DEVICE, SOFTWARE
from rows import forwards, steps

from pdsim.calibration.fit.rows import write_rows

SERVERS = ("lot1", "lot2", "shared_base")
COLUMNS = ("kind", "new_tokens", "context_tokens", "prompts", "batch", "time_us")


def rows() -> Iterator[dict[str, object]]:
    prefill, decode = (tuple(f"{server}_{side}" for server in SERVERS) for side in ("p0", "d0"))
    timed = forwards(*prefill)
    columns = timed.num_tokens, timed.num_context_tokens, timed.num_prompts, timed.gpu_ms
    for new, context, prompts, ms in zip(*columns, strict=True):
        yield dict(zip(COLUMNS, ("prefill", int(new), int(context), int(prompts), "", f"{1e3 * ms:.1f}"), strict=True))
    for ms, batch, kv_tokens in zip(*steps(*decode), strict=True):
        yield dict(zip(COLUMNS, ("decode", "", int(kv_tokens), "", int(batch), f"{1e3 * ms:.1f}"), strict=True))


if __name__ == "__main__":
    provenance = {
        "device": DEVICE,
        "model": "qwen3-8b",
        "dtype": "bfloat16",
        "software": SOFTWARE,
        "command": COMMAND,
        "date": DATE,
    }
    write_rows(Path(sys.argv[1]), rows(), provenance)
