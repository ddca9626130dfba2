"""Measures kernels of pdkernels on this GPU and, for comparison, other ways to do the same work (SGLang's kernels if
they are found). Writes the times to a CSV file.

python -m pdkernels.bench [--quick] [--sglang FOLDER] --out rows.csv
"""

import argparse
import datetime as dt
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from pdkernels.addressing import RUN_TIME
from pdkernels.bench import sglang
from pdkernels.bench.attention import attention
from pdkernels.bench.cases import MODELS, Arena, Case, Memory
from pdkernels.bench.peers import peers
from pdkernels.bench.precompile import Job, compile_launcher, precompile
from pdkernels.bench.rows import Provenance, Row, table, write_rows
from pdkernels.bench.staging import SIDES, Bench, batches, cases, copy_us, few_programs, measure, other_forms
from pdkernels.copies.gather import GATHER
from pdkernels.copies.scatter import SCATTER

_PEAK_BYTES = 4 << 30
_SHORT_TOKENS = 4096  # requests up to this length need little memory


def main() -> None:
    arguments = _arguments()
    if not torch.cuda.is_available():
        raise SystemExit("pdkernels.bench measures a GPU, and torch sees none here")
    torch.manual_seed(arguments.seed)
    arena = Arena((48 if max(arguments.tokens) > _SHORT_TOKENS else 8) << 30)
    if not arguments.only or "staging" in arguments.only:
        precompile(_jobs(arena, arguments.pages))
    peak = 2 * _PEAK_BYTES // 4 / copy_us(arena, _PEAK_BYTES // 4)
    bench = Bench(arena, sglang.load(arguments.sglang), peak)
    rows: list[Row] = []
    try:
        for row in _measured(bench, arguments):
            rows.append(row)
            print(table([row]).split("\n")[1], flush=True)
    finally:
        write_rows(arguments.out, rows, Provenance.here(arguments.date))
    print(f"\ncopy bandwidth, read plus written: {peak / 1e3:.0f} GB/s\n{table(rows)}\n\n{summary(rows)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pdkernels.bench", description="Measure the kernels on this GPU.")
    parser.add_argument("--out", "-o", type=Path, required=True, help="CSV of rows to write")
    parser.add_argument("--tokens", nargs="+", type=int, help="lengths of requests for gather and scatter")
    parser.add_argument("--pages", nargs="+", type=int, help="page sizes for gather and scatter")
    parser.add_argument("--quick", action="store_true", help="one page size, short requests")
    parser.add_argument(
        "--sglang", type=Path, help="folder that holds SGLang's source; else an installed sglang is used"
    )
    parser.add_argument(
        "--only", nargs="*", choices=("staging", "programs", "batches", "attention", "peers"), default=[]
    )
    parser.add_argument("--seed", type=int, default=0, help="of page lists and contents")
    parser.add_argument("--date", default=dt.datetime.now(dt.UTC).date().isoformat())
    arguments = parser.parse_args()
    arguments.tokens = arguments.tokens or ([256, 1000, 4096] if arguments.quick else [256, 1000, 4096, 16384, 54528])
    arguments.pages = arguments.pages or ([16] if arguments.quick else [1, 16, 64])
    return arguments


def _measured(bench: Bench, arguments: argparse.Namespace) -> Iterator[Row]:
    wanted = arguments.only or ["staging", "programs", "batches", "attention"]
    if "programs" in wanted:
        yield from few_programs(bench)
    if "batches" in wanted:
        yield from batches(bench)
        yield from other_forms(bench)
    if "attention" in wanted:
        yield from attention(bench, quick=arguments.quick)
    if "staging" in wanted:
        for side, case in cases(arguments.tokens, arguments.pages):
            yield from measure(bench, side, case)
    if "peers" in wanted:
        yield from peers(bench, quick=arguments.quick)


def _jobs(arena: Arena, page_sizes: Sequence[int]) -> Iterator[Job]:
    """Yields the jobs that compile gather and scatter before the measurements: for each model, page size and TP size of
    decode, for a single request and for a batch.
    """
    for model in MODELS:
        for page_size in page_sizes:
            for dst_tp in (1, 2):
                case = Case(model, 64, page_size, 4, dst_tp)
                for side, copy in zip(SIDES, (GATHER, SCATTER), strict=True):
                    heads, slices = (case.source_heads, 1) if side == "gather" else (case.target_heads, case.writers)
                    memory = Memory.of(arena, case, heads)
                    for batched in (False, True):
                        ready = copy.ready(memory.pool, None, slices, None, limited=False, batched=batched)
                        kernel = copy.kernel.fn
                        constants = (kernel.__module__, kernel.__name__, ready.constants, copy.tiling.warps)
                        yield compile_launcher, (*constants, len(RUN_TIME))


def summary(rows: list[Row]) -> str:
    """Returns a table of the rows of our gather and scatter ("fused"). For each direction and class of payload sizes
    that has rows, a line gives the number of rows, the smallest share of copy bandwidth that the kernel reaches, and
    its smallest speed-up over SGLang's kernel (empty: SGLang's was not measured).
    """
    lines = [f"{'':24} {'rows':>5} {'least share of copy':>20} {'SGLang : fused, least':>22}"]
    shape = {(r.kernel, r.model, r.tokens, r.page_size, r.dst_tp): r for r in rows if r.variant == "sglang"}
    for side in SIDES:
        ours = [row for row in rows if row.kernel == side and row.variant == "fused"]
        for name, low, high in (
            ("under 30 MB", 0, 30e6),
            ("30 to 100 MB", 30e6, 100e6),
            ("100 MB and more", 100e6, 1e15),
        ):
            group = [row for row in ours if low <= row.payload_bytes < high]
            if not group:
                continue
            least = min(row.copy_fraction or 0 for row in group)
            leads = [
                other.time_us / row.time_us
                for row in group
                if (other := shape.get((side, row.model, row.tokens, row.page_size, row.dst_tp)))
                and other.time_us
                and row.time_us
            ]
            lead = f"{min(leads):.2f}" if leads else ""
            lines.append(f"{side:8} {name:15} {len(group):>5} {least:>20.1%} {lead:>22}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
