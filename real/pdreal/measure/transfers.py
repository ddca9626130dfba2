"""How long writes take from one process to another, by every engine of the device that this machine can run."""

from collections.abc import Callable, Iterator, Sequence

import torch

from pdreal import transfer_bench
from pdreal.measure.rows import Row
from pdreal.transports.protocol import UnavailableError


def transfer_rows(
    device: torch.device,
    sizes: Sequence[int],
    descriptors: Sequence[int],
    seconds: float,
    left_out: Callable[[str], None],
) -> Iterator[Row]:
    """From the first GPU to the last, where there are several. Engines that are missing are told."""
    last = torch.device("cuda", torch.cuda.device_count() - 1) if device.type == "cuda" else device
    cases = transfer_bench.cases(sizes, descriptors)
    for transport in transfer_bench.ENGINES[device.type]:
        if transport == transfer_bench.COPY:
            continue
        try:
            for row in transfer_bench.measure(transport, cases, (device, last), seconds):
                yield Row(
                    kind="transfer",
                    transport=transport,
                    payload_bytes=row.payload_bytes,
                    num_descriptors=row.num_descriptors,
                    time_us=row.time_us,
                    min_us=row.min_us,
                    repeats=row.repeats,
                )
        except UnavailableError as missing:
            left_out(f"{transport}: {missing}")
