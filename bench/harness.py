"""Measures the time that real mode adds to a decode step:
python bench/harness.py --model qwen3-8b --device cuda --dtype bfloat16

Prints the time from step to step of an instance whose batch stays the same, and the time of the same step alone in the
same process.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pdreal.measure.forwards import DecodeCase
from pdreal.measure.plan import FULL
from pdreal.measure.rows import Row
from pdreal.measure.run import measurement
from pdreal.settings.options import Options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-qwen3")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256])
    given = parser.parse_args()
    options = Options(device=given.device, dtype=given.dtype)

    def rows(kind: str, **shapes: Any) -> Iterator[Row]:
        plan = replace(FULL, **shapes)
        measured = measurement(given.model, options, given.page_size, 1, kind, plan, 1)
        return measured.rows(lambda reason: print(f"left out: {reason}", file=sys.stderr))

    loops = [row for row in rows("host", served_batches=tuple(given.batch)) if row.kind == "loop"]
    cases = tuple(DecodeCase(row.batch, row.context_tokens // row.batch) for row in loops)
    print("| batch | in the loop, ms | alone, ms | added, ms | between two steps, ms |")
    print("|---|---|---|---|---|")
    for loop, alone in zip(loops, rows("decode", decode=cases), strict=True):
        times = (loop.time_us, alone.time_us, loop.time_us - alone.time_us, loop.rest_us)
        print(f"| {loop.batch} | {' | '.join(f'{us / 1e3:.2f}' for us in times)} |")


if __name__ == "__main__":
    main()
