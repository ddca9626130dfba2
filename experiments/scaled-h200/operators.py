"""Times of operators by GPU, for `pdsim scale`: python experiments/scaled-h200/operators.py

The rows of H20 are InferSim's (README.md says from where); every other GPU's are those of the same shape in the SGLang
0.5.14 tables of aiconfigurator 0.12.0, which must be installed, and pandas and pyarrow with it.
"""

import csv
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path

import pandas as pd

OPERATORS = Path("pdsim/calibration/fit/operators.csv")
SYSTEMS = {"h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "gb200": "gb200"}
NAMES = {"bf16": "bfloat16", "fp8": "fp8_block"}


def main() -> None:
    with OPERATORS.open(newline="") as file:
        table = csv.DictReader(file)
        columns = list(table.fieldnames or ())
        shapes = [row for row in table if row["gpu"] == "h20"]
    rows = [*shapes, *(row for gpu in SYSTEMS for row in rows_of(gpu, shapes))]
    with OPERATORS.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{len(rows)} rows in {OPERATORS}")


def rows_of(gpu: str, shapes: list[dict[str, str]]) -> Iterator[Mapping[str, str]]:
    """Matrix products in both types, attention in bf16 alone."""
    for shape in shapes:
        is_matrix = shape["operator"] in {"matrix", "weights"}
        for dtype in NAMES if is_matrix else ("bf16",):
            time_us = (matrix_us if is_matrix else attention_us)(gpu, {**shape, "dtype": dtype})
            if time_us is not None:
                yield {**shape, "gpu": gpu, "dtype": dtype, "time_us": f"{time_us:.2f}"}


def matrix_us(gpu: str, row: Mapping[str, str]) -> float | None:
    m, n, k = map(int, row["shape"].split("x"))
    found = table_of(gpu, "gemm/sglang/0.5.14/gemm_perf.parquet")
    return fastest_us(
        found[(found.gemm_dtype == NAMES[row["dtype"]]) & (found.m == m) & (found.n == n) & (found.k == k)]
    )


def attention_us(gpu: str, row: Mapping[str, str]) -> float | None:
    """Decode tables count the tokens before the new one."""
    sizes, heads = row["shape"].split()
    (batch, tokens), (query, kv, dim) = map(int, sizes.split("x")), map(int, heads.split("/"))
    phase, length, value = ("generation", "step", tokens - 1) if row["operator"] == "kv" else ("context", "isl", tokens)
    found = table_of(gpu, f"attention/sglang/0.5.14/{phase}_attention_perf.parquet")
    shape = (found.batch_size == batch) & (found[length] == value) & (found.window_size == 0)
    heads_match = (found.num_heads == query) & (found.num_key_value_heads == kv) & (found.head_dim == dim)
    return fastest_us(found[shape & heads_match & (found.kv_cache_dtype == "bfloat16")])


@cache
def table_of(gpu: str, path: str) -> pd.DataFrame:
    return pd.read_parquet(str(files("aiconfigurator_core") / "systems" / "data" / SYSTEMS[gpu] / path))


def fastest_us(found: pd.DataFrame) -> float | None:
    """Of the kernels that were measured: an engine picks it."""
    return None if found.empty else 1e3 * float(found.latency.min())


if __name__ == "__main__":
    main()
