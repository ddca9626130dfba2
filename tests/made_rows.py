"""Makes rows, as calibration reads them, of an imagined machine whose times are known."""

import numpy as np

from pdsim.calibration.fit.rows import read_rows, write_rows

PROVENANCE = {
    "device": "NVIDIA H200",
    "driver": "570",
    "model": "qwen3-8b",
    "dtype": "bfloat16",
    "command": "pdreal measure",
    "date": "2026-11-22",
}
NEW_TOKENS, CONTEXTS = (16, 64, 256, 1024, 4096, 8192), (0, 1024, 8192, 32768)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


def prefill_rows(time_us, noise=0.01):
    random = np.random.default_rng(0)
    return [
        {"kind": "prefill", "new_tokens": n, "context_tokens": c, "time_us": time_us(n, c) * random.lognormal(0, noise)}
        for n in NEW_TOKENS
        for c in CONTEXTS
        for _ in range(3)
    ]


def decode_rows(time_us, noise=0.01):
    random = np.random.default_rng(0)
    return [
        {
            "kind": "decode",
            "batch": b,
            "context_tokens": b * c,
            "time_us": time_us(b, b * c) * random.lognormal(0, noise),
        }
        for b in BATCHES
        for c in (500, 2000, 8000)
    ]


def affine_prefill_us(n, c):
    return max(11_800, 1000 + 19.45 * n + 0.00085 * n * (c + n / 2))


def affine_decode_us(b, context):
    return 5200 + 6.3 * b + 0.037 * context


def measured(tmp_path, *tables, **provenance):
    paths = []
    for i, rows in enumerate(tables):
        paths.append(tmp_path / f"rows{i}.csv.gz")
        write_rows(paths[-1], rows, PROVENANCE | provenance)
    return read_rows(paths)
