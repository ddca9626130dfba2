"""Times of looking up, reading and writing pages in Mooncake's store, whose master and drive run on this host."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import count

import torch

from pdreal.hosts.processes import Processes
from pdreal.hosts.store import Store
from pdreal.measure.forwards import kv_page_bytes
from pdreal.measure.rows import MOST_REPEATS, Row, repeat_each_us, repeat_us, row_of
from pdreal.memory.paged_kv import HostKv, PagedKv
from pdreal.memory.stored_kv import StoredKv
from pdreal.settings.host import LOOPBACK, free_host_bytes
from pdreal.settings.model import ModelConfig
from pdreal.transports.mooncake_store import MooncakeStore

_SHARE_OF_MEMORY = 0.4
"""Maximum fraction of the host's free memory for the store."""
_BATCHES_WRITTEN = 2 * MOST_REPEATS
"""Number of batches of each size (in pages) for which the store gets memory. At most MOST_REPEATS + 2 batches of a size
are written, so the store evicts nothing.
"""


def storage_rows(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    page_size: int,
    counts: Sequence[int],
    seconds: float,
    left_out: Callable[[str], None],
) -> Iterator[Row]:
    """Measures lookups, reads and writes of one rank, and yields a row for each of them and each number of pages.
    counts: numbers of pages. left_out: called with a text for each number for which the host lacks memory. Raises
    UnavailableError or LaunchError if the store cannot run here. page_size: number of tokens of a page. seconds: time
    to measure each row.
    """
    page_bytes = kv_page_bytes(config, dtype, page_size)
    counts = _possible(counts, page_bytes, left_out)
    if not counts:
        return
    kv = PagedKv(
        num_pages=1,
        page_size=page_size,
        num_layers=config.num_kv_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        planes_per_layer=config.planes_per_layer,
        dtype=dtype,
        device=device,
    )
    host = HostKv(kv, max(counts))
    with ExitStack() as stack:
        master = stack.enter_context(running_store(sum(counts) * _BATCHES_WRITTEN * page_bytes))
        store = stack.enter_context(closing(MooncakeStore(master, LOOPBACK, device)))
        stored = StoredKv(host, store, 0, is_same=False)
        for num_pages in counts:
            pages = range(1, num_pages + 1)
            names = ([f"{num_pages}-{repeat}-{page}" for page in pages] for repeat in count())
            sizes = {"num_descriptors": num_pages, "payload_bytes": num_pages * page_bytes}
            first = next(names)
            stored.write(first, pages)
            writes = (partial(stored.write, new, pages) for new in names)
            yield row_of("storage", repeat_each_us(writes, seconds), what="write", **sizes)
            yield row_of("storage", repeat_us(partial(stored.num_there, first), seconds), what="lookup", **sizes)
            yield row_of("storage", repeat_us(partial(stored.read, first, pages), seconds), what="read", **sizes)


def _possible(counts: Sequence[int], page_bytes: int, left_out: Callable[[str], None]) -> list[int]:
    """Returns the numbers of pages for which the host has memory. Each number of `counts` gets an equal part of the
    store. left_out: called with a text for each other number. page_bytes: bytes of a page.
    """
    free_bytes, possible = free_host_bytes(), []
    for num_pages in counts:
        needed_bytes = num_pages * _BATCHES_WRITTEN * page_bytes
        if needed_bytes * len(counts) <= _SHARE_OF_MEMORY * free_bytes:
            possible.append(num_pages)
        else:
            room_bytes = _SHARE_OF_MEMORY * free_bytes / len(counts)
            what = f"the store needs {needed_bytes / 1e9:.1f} GB for them, and may take {room_bytes / 1e9:.1f} GB"
            left_out(f"storage, {num_pages} pages: {what}")
    return possible


@contextmanager
def running_store(num_bytes: int) -> Iterator[str]:
    """Context that runs a store with one drive and num_bytes of memory. Yields the address of the store's master."""
    with asyncio.Runner() as runner:
        store = Store(Processes(runner.get_loop(), lambda *_: None), runner.get_loop())
        try:
            runner.run(store.start(1, num_bytes, LOOPBACK))
            assert store.master is not None
            yield store.master
        finally:
            store.end()
