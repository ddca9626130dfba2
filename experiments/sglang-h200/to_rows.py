"""Forward passes as `pdsim calibrate` reads them: python experiments/sglang-h200/to_rows.py ROWS.csv.gz

Those of Qwen3-8B on one GPU. Times are the GPU's, measured while serving, with the ends of prefill forwards, which
show how busy the GPU was.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from fit import COMMAND, DATE, DEVICE, SOFTWARE
from rows import forwards, steps

from pdsim.calibration.fit.rows import write_rows

SERVERS = ("lot1", "lot2", "shared_base")
COLUMNS = ("kind", "new_tokens", "context_tokens", "prompts", "batch", "time_us", "end_s")


def rows() -> Iterator[dict[str, object]]:
    prefill, decode = (tuple(f"{server}_{side}" for server in SERVERS) for side in ("p0", "d0"))
    timed = forwards(*prefill)
    for i in range(len(timed.gpu_ms)):
        sizes = (int(timed.num_tokens[i]), int(timed.num_context_tokens[i]), int(timed.num_prompts[i]))
        times = (f"{1e3 * timed.gpu_ms[i]:.1f}", f"{timed.end_s[i]:.6f}")
        yield dict(zip(COLUMNS, ("prefill", *sizes, "", *times), strict=True))
    for ms, batch, kv_tokens in zip(*steps(*decode), strict=True):
        yield dict(zip(COLUMNS, ("decode", "", int(kv_tokens), "", int(batch), f"{1e3 * ms:.1f}", ""), strict=True))


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
