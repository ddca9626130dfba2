"""Measures kernels with many tilings: python -m pdkernels.bench.tune --out FOLDER

The best tilings are copied by hand into pdkernels/copies/tiling.py and pdkernels/attention/decode.py.
"""

import argparse
import csv
import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from pdkernels.addressing import RUN_TIME
from pdkernels.attention import decode
from pdkernels.bench.cases import MODELS, Arena, Case, Memory
from pdkernels.bench.precompile import Job, compile_launcher, precompile
from pdkernels.bench.staging import our_calls
from pdkernels.bench.timing import graph_us
from pdkernels.copies.gather import GATHER
from pdkernels.copies.scatter import SCATTER
from pdkernels.copies.staging import StagingCopy
from pdkernels.copies.tiling import Tiling

_SHAPES = (  # model, page size, target TP
    ("qwen3-32b-fp8", 1, 1),
    ("qwen3-32b-fp8", 16, 2),
    ("llama3.1-8b-bf16", 1, 2),
    ("llama3.1-8b-bf16", 16, 1),
    ("llama3.1-8b-bf16", 64, 1),
    ("qwen3.5-397b-fp8", 1, 1),
)
_LENGTHS = (16384, 1000)


def tilings() -> Iterator[Tiling]:
    """Yields the tilings of gather and scatter to try: the combinations of 64 to 2,048 units and 2, 4 or 8 warps whose
    threads each have 16 to 128 bytes in flight.
    """
    for units, warps in itertools.product((64, 128, 256, 512, 1024, 2048), (2, 4, 8)):
        if 1 <= units / (warps * 32) <= 8:
            yield Tiling(units, warps)


def sweep_staging(arena: Arena, lengths: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Yields one row per shape, side (gather or scatter), length and tiling: the measured time."""
    models = {model.name: model for model in MODELS}
    shapes = [(models[name], page_size, dst_tp) for name, page_size, dst_tp in _SHAPES]
    precompile(_jobs(arena, [Case(model, 256, page_size, 4, dst_tp) for model, page_size, dst_tp in shapes]))
    for (model, page_size, dst_tp), side, tokens in itertools.product(shapes, ("gather", "scatter"), lengths):
        case = Case(model, tokens, page_size, 4, dst_tp)
        heads = case.source_heads if side == "gather" else case.target_heads
        memory = Memory.of(arena, case, heads)
        for tiling in tilings():
            yield {
                "kernel": side,
                "model": model.name,
                "tokens": tokens,
                "page_size": page_size,
                "row_bytes": heads * model.head_bytes,
                "payload_bytes": case.payload_bytes(heads),
                "tiling": repr(tiling),
                "graph_us": round(graph_us(our_calls(side, case, memory, tiling=tiling), 9), 2),
            }


def _jobs(arena: Arena, cases: list[Case]) -> Iterator[Job]:
    for case, copy in itertools.product(cases, (GATHER, SCATTER)):
        memory = Memory.of(arena, case, case.source_heads if copy is GATHER else case.target_heads)
        slices = 1 if copy is GATHER else case.writers
        yield from (staging_job(copy, memory, slices, tiling) for tiling in tilings())


def staging_job(copy: StagingCopy, memory: Memory, slices: int, tiling: Tiling) -> Job:
    """Returns the job that compiles a gather or scatter. slices: number of target ranks (gather) or of source ranks
    (scatter).
    """
    ready = copy.ready(memory.pool, None, slices, tiling, limited=False, batched=False)
    kernel = copy.kernel.fn
    return compile_launcher, (kernel.__module__, kernel.__name__, ready.constants, tiling.warps, len(RUN_TIME))


def decode_tilings() -> Iterator[tuple[int, decode.DecodeTiling]]:
    """Yields pairs to try: tokens per block of decode attention, and the warps and stages of a program."""
    for tokens, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4, 5)):
        if tokens * stages <= 384:
            yield tokens, decode.DecodeTiling(warps, stages)


def sweep_decode(lengths: list[int], page_size: int) -> Iterator[dict[str, Any]]:
    """Yields one row per number of shares and tiling: the measured time of decode attention of one layer, with 32 query
    and 8 KV heads of dimension 128, over contexts of these lengths in tokens. Leaves out tilings that need more
    registers or shared memory than the GPU has.
    """
    precompile([(compile_decode, (tokens, tiling, page_size)) for tokens, tiling in decode_tilings()])
    batch, pages = len(lengths), [-(-length // page_size) for length in lengths]
    slots = sum(pages) * page_size
    pools = [[torch.randn(slots, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)] for _ in range(2)]
    scattered = torch.randperm(sum(pages), device="cuda").to(torch.int32).split(pages)
    table = torch.nn.utils.rnn.pad_sequence(list(scattered), batch_first=True)
    on_device = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    query = torch.randn(batch, 32, 128, dtype=torch.bfloat16, device="cuda")
    for shares, (tokens, tiling) in itertools.product((33, 66, 99, 132, 198, 264), decode_tilings()):
        workspace = decode.decode_workspace(batch, 32, 8, 128, query.device, shares=shares, block_tokens=tokens)
        workspace.divide(on_device)
        how: dict[str, Any] = {"page_size": page_size, "workspace": workspace, "tiling": tiling}
        calls = [partial(decode.paged_decode, query, k, v, table, on_device, **how) for k, v in pools]
        try:
            us = graph_us(calls, 9)
        except triton.runtime.errors.OutOfResources:
            continue
        yield {
            "kernel": "decode",
            "model": f"batch {batch}, contexts of {min(lengths)} to {max(lengths)} tokens",
            "tokens": round(sum(lengths) / batch),
            "page_size": page_size,
            "row_bytes": 256,
            "payload_bytes": 2 * sum(lengths) * 8 * 128 * 2,
            "tiling": f"shares={shares} tokens={tokens} {tiling!r}",
            "graph_us": round(us, 2),
        }


def compile_decode(tokens: int, tiling: decode.DecodeTiling, page_size: int) -> None:
    """Compiles decode attention by running it on a small batch."""
    keys, values = (torch.zeros(4096, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    table = torch.zeros(2, 256, dtype=torch.int32, device="cuda")
    lengths = torch.ones(2, dtype=torch.int32, device="cuda")
    query = torch.zeros(2, 32, 128, dtype=torch.bfloat16, device="cuda")
    workspace = decode.decode_workspace(2, 32, 8, 128, query.device, block_tokens=tokens)
    workspace.divide(lengths)
    how: dict[str, Any] = {"page_size": page_size, "workspace": workspace, "tiling": tiling}
    try:
        decode.paged_decode(query, keys, values, table, lengths, **how)
    except triton.runtime.errors.OutOfResources:
        return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", "-o", type=Path, required=True)
    folder = parser.parse_args().out
    torch.manual_seed(0)
    arena = Arena(24 << 30)
    with (folder / "tilings.csv").open("w", newline="") as file:
        writer: csv.DictWriter[str] | None = None
        for row in itertools.chain(
            sweep_decode([4096] * 64, 16), sweep_decode([700] * 9 + [16000], 64), sweep_staging(arena, _LENGTHS)
        ):
            if writer is None:
                writer = csv.DictWriter(file, fieldnames=list(row))
                writer.writeheader()
            writer.writerow(row)
            file.flush()


if __name__ == "__main__":
    main()
