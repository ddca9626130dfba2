"""Compares pdsim's reads of embeddings with those of vLLM: `python experiments/conformance/vllm/reads.py WHEEL`.

WHEEL is the folder of an unpacked wheel of vLLM 0.33.0. Its EmbeddingCache, and the methods of ECCPUScheduler that
decide whether a prompt must wait, run without the rest of vLLM and without torch. Prompts with images, cached prefixes,
answers of encode instances and ends of reads are random.
"""

import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from encoder import Told, functions, name_of, prompts

from pdsim.core import messages as m
from pdsim.core.instance import Request
from pdsim.core.vllm.embedding_reads import EmbeddingReads

CONNECTOR = Path("vllm/distributed/ec_transfer/ec_connector/cpu/scheduler")
METHODS = ("ensure_cache_available", "_nixl_consumer_admit", "_admit_item", "_num_blocks")
NUM_LOADS = 3000


class RemoteUnavailableError(Exception):
    pass


def scheduler_class(wheel: Path) -> type[Any]:
    """vLLM's methods. Its sessions with encode instances are replaced by lists of what a test has answered."""
    known = {"time": time, "_RemoteUnavailable": RemoteUnavailableError, "_ADMIT_DEFER_TIMEOUT_S": 60.0, "logger": None}
    found = functions(wheel / CONNECTOR / "__init__.py", *METHODS, **known)
    cache: dict[str, Any] = {}
    exec((wheel / CONNECTOR / "embedding_cache.py").read_text(), cache)  # noqa: S102

    class Scheduler:
        _nixl_enabled = _is_consumer = _first_in_batch = True
        _dtype = SimpleNamespace(itemsize=1)
        _region = SimpleNamespace(block_size_bytes=1)

        def __init__(self) -> None:
            self._cache = cache["EmbeddingCache"](1 << 20)
            self._in_flight: set[str] = set()
            self._tombstones: set[str] = set()
            self._step_completed: set[str] = set()
            self._deferred_since: dict[Any, float] = {}
            self.asked: list[str] = []
            self.arrived: list[str] = []

        def _start_xfer(self, mm_hash: str, _: Any, size: int, shape: Any) -> bool:
            self._cache.alloc(mm_hash, size, shape)
            self.asked.append(mm_hash)
            return True

        def _poll_step(self) -> None:
            for mm_hash in self.arrived:
                self._in_flight.discard(mm_hash)
                self._cache.mark_ready(mm_hash)
                self._step_completed.add(mm_hash)
            self.arrived = []

        def end_step(self) -> None:
            self._step_completed.clear()
            self._first_in_batch = True

    for name in METHODS:
        setattr(Scheduler, name, found[name])
    return Scheduler


def announced(told: Told) -> None:
    """Adds what encode instances have reported on the request's items."""
    lengths = {one.identifier: one.mm_position.length for one in told.mm_features}
    told.ec_transfer_params = {
        name: {"peer_host": "", "size_bytes": size, "shape": [size, 1]} for name, size in lengths.items()
    }


class Load:
    def __init__(self, scheduler: Any, rng: random.Random) -> None:
        self.rng, self.theirs = rng, scheduler
        self.ours = EmbeddingReads("aggregated-0", {"image": 1})
        self.names: dict[tuple[int, int], str] = {}
        self.asked: list[tuple[int, int]] = []
        self.reading: list[tuple[int, int]] = []
        self.num_choices = self.num_waits = 0

    def step(self, requests: list[tuple[Request, Told]]) -> None:
        self.ours.poll()
        before = len(self.theirs.asked)
        for request, told in requests:
            cached = self.rng.randrange(request.num_tokens)
            waits = self.ours.must_wait(request, cached)
            assert waits != self.theirs.ensure_cache_available(told, cached)
            self.num_choices += 1
            self.num_waits += waits
        self.theirs.end_step()
        asks = []
        for command in self.ours.take_commands():
            if isinstance(command, m.SendEmbeddings):
                self.reading.append((command.request_id, command.part))
            else:
                asks.append((command.message.request_id, command.message.item))
        assert [self.names[one] for one in asks] == self.theirs.asked[before:]
        self.asked += asks
        for one in self.some(self.asked):
            self.ours.on_message(m.EmbeddingsGranted(*one))
        for one in self.some(self.reading):
            self.ours.on_message(m.EmbeddingsArrived(*one))
            self.theirs.arrived.append(self.names[one])

    def some(self, waiting: list[Any]) -> list[Any]:
        """Takes some of those that wait."""
        taken = [one for one in waiting if self.rng.randrange(2)]
        waiting[:] = [one for one in waiting if one not in taken]
        return taken


def main(wheel: Path) -> None:
    scheduler, totals = scheduler_class(wheel), [0, 0, 0]
    for seed in range(NUM_LOADS):
        rng = random.Random(seed)
        load, requests = Load(scheduler(), rng), prompts(rng)
        for request, told in requests:
            request.encode_ids = ("encode-0",) * len(request.media)
            announced(told)
            load.names |= {(request.request_id, i): name_of(item) for i, item in enumerate(request.media)}
        for _ in range(rng.randint(1, 14)):
            load.step(requests)
        found = load.num_choices, load.num_waits, len(load.theirs.asked)
        totals = [a + b for a, b in zip(totals, found, strict=True)]
    print("{} choices agree; {} prompts wait, {} items are read".format(*totals))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
