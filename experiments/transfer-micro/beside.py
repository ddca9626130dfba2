"""Prefill forwards while KV leaves their GPU: python beside.py OUT.csv, on two GPUs of one host, with pdreal.

Beside each forward the same process writes as much KV as it computes, as real mode does. Forwards alone and beside
transfers take turns, so that the GPU's clock is that of both.
"""

import csv
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pdreal.measure.forwards import ForwardBench, PrefillCase, kv_page_bytes
from pdreal.measure.rows import Provenance, once_us
from pdreal.measure.transfers import opened, scattered_ranges
from pdreal.model.transformer import Transformer
from pdreal.model.weights import RandomWeights
from pdreal.rank.runner import ModelRunner
from pdreal.settings.model import from_catalog
from pdreal.transports.streams import compute_stream

MODEL, PAGE_SIZE = "qwen3-8b", 64
TRANSPORTS = ("mooncake-nvlink", "cuda-ipc")
CASES = tuple(
    PrefillCase(*case) for case in ((1, 256), (1, 600), (1, 1024), (1, 1900), (3, 1024), (6, 1024), (1, 8000))
)
_ROUNDS = 4
_ROUND_US = 200_000
_FEWEST = 6
"""Forwards of a round."""


def rows(here: torch.device, there: torch.device) -> Iterator[dict[str, Any]]:
    config = from_catalog(MODEL)
    model = Transformer.load(config, RandomWeights(0, here), dtype=torch.bfloat16, device=here)
    num_pages = max(case.num_prompts * -(-case.num_kv_tokens // PAGE_SIZE) for case in CASES)
    bench = ForwardBench(ModelRunner(model, num_pages=num_pages, page_size=PAGE_SIZE, prefills=True), seconds=0)
    num_planes = config.planes_per_layer * config.num_layers
    page_bytes = kv_page_bytes(config, torch.bfloat16, PAGE_SIZE)
    for transport in TRANSPORTS:
        with opened(transport, num_pages * page_bytes, (here, there), None) as (engine, address, source, remote):
            ranges = partial(scattered_ranges, source.data_ptr(), remote)
            engine.write(address, *ranges(page_bytes, num_pages))
            for case in CASES:
                num_tokens = case.num_prompts * case.num_tokens
                num_blocks = num_planes * -(-num_tokens // PAGE_SIZE)
                write = partial(engine.write, address, *ranges(page_bytes // num_planes, num_blocks))
                alone, beside, transfers = times_us(bench.prefilling(case), write, here)
                yield {
                    "transport": transport,
                    "prompts": case.num_prompts,
                    "new_tokens": num_tokens,
                    "num_descriptors": num_blocks,
                    "payload_bytes": num_blocks * page_bytes // num_planes,
                    "alone_us": round(median(alone)),
                    "beside_us": round(median(beside)),
                    "transfer_us": round(median(transfers)),
                    "repeats": len(alone),
                }


def times_us(
    forward: Callable[[], Any], write: Callable[[], None], device: torch.device
) -> tuple[list[float], list[float], list[float]]:
    """Forwards alone, forwards beside a transfer, and these transfers."""
    alone: list[float] = []
    beside: list[float] = []
    transfers: list[float] = []
    with (
        ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,)) as worker,
        torch.inference_mode(),
        torch.cuda.stream(compute_stream(device)),
    ):
        for _ in range(3):
            forward_beside(forward, write, worker)
        num_forwards = max(_FEWEST, round(_ROUND_US / once_us(forward)))
        for _ in range(_ROUNDS):
            alone += [once_us(forward) for _ in range(num_forwards)]
            for _ in range(num_forwards):
                forward_us, transfer_us = forward_beside(forward, write, worker)
                beside.append(forward_us)
                transfers.append(transfer_us)
    return alone, beside, transfers


def forward_beside(forward: Callable[[], Any], write: Callable[[], None], worker: Executor) -> tuple[float, float]:
    transfer = worker.submit(once_us, write)
    return once_us(forward), transfer.result()


def main(out: Path) -> None:
    here, there = torch.device("cuda", 0), torch.device("cuda", 1)
    told = asdict(Provenance.here(MODEL, here, "bfloat16", PAGE_SIZE, 1)) | {"command": f"python beside.py {out.name}"}
    with out.open("w", newline="") as file:
        for row in rows(here, there):
            if not file.tell():
                table = csv.DictWriter(file, [*row, *told])
                table.writeheader()
            table.writerow(row | told)
            file.flush()
            share = (row["beside_us"] - row["alone_us"]) / row["transfer_us"]
            print(f"{row['transport']}, {row['new_tokens']} tokens: {share:.2f} of a transfer's time", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
