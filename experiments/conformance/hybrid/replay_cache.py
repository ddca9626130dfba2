"""Hold pdsim's cache of pages and states to what SGLang's did: python replay_cache.py"""

import gzip
import json
import zlib
from collections.abc import Iterable
from math import lcm
from pathlib import Path
from typing import NamedTuple

from cache_operations import MAX_REQUESTS, Load, Operation, Settings, load_of

from pdsim.core.memory.hybrid_cache import HybridKvCache, HybridLease, StateLimits
from pdsim.core.memory.radix_cache import PagePool, RadixCache
from pdsim.core.sequence import TokenIds
from pdsim.policy.pages import LeastRecentlyUsed

LOG = Path(__file__).parent / "logs" / "operations.json.gz"
Row = list[int] | None
BLOCKED = [-1, 0]
"""What an admission gives that waits for slots."""


class Outcome(NamedTuple):
    num_equal: int
    """Number of operations that were possible, up to the first difference."""
    difference: str = ""
    """The first one."""


def digest(prefixes: Iterable[tuple[int, ...]], kept: Iterable[tuple[int, ...]]) -> int:
    """16 bits of the cached prefixes, in any order, and of those with a state, in theirs."""
    return zlib.crc32(repr((sorted(prefixes), list(kept))).encode()) & 0xFFFF


class Request:
    def __init__(self, lease: HybridLease, ids: tuple[int, ...]) -> None:
        self.lease, self.ids, self.num_prompt_tokens, self.num_computed = lease, ids, len(ids), 0


class Replay:
    """pdsim's cache of one load."""

    def __init__(self, settings: Settings) -> None:
        page = settings.page_size
        self.page_size, self.pool = page, PagePool(settings.num_pages)
        grid = lcm(max(settings.chunk_tokens, page), page)
        limits = StateLimits(
            num_slots=settings.num_slots,
            slots_per_request=settings.own_slots,
            chunk_tokens=grid,
            interval_tokens=lcm(grid, settings.track_interval),
            has_buffer=settings.has_buffer,
            computes_prompts=not settings.is_decode,
        )
        self.is_decode = settings.is_decode
        self.tree = RadixCache(self.pool, page, LeastRecentlyUsed())
        self.cache = HybridKvCache(self.pool, page, self.tree, limits)
        self.live: list[Request] = []

    def step(self, operation: Operation) -> Row:
        given: Row = getattr(self, f"_{operation.kind}")(operation)
        return given

    def _one(self, operation: Operation, *, is_computed: bool | None = None) -> Request | None:
        if not self.live:
            return None
        found = self.live[operation.which % len(self.live)]
        whole = found.num_computed >= found.num_prompt_tokens
        return found if is_computed is None or whole == is_computed else None

    def _admit(self, operation: Operation) -> Row:
        if len(self.live) == MAX_REQUESTS:
            return None
        if self.is_decode and not self.cache.makes_room_for_states():
            return BLOCKED
        ids = operation.ids
        lease = self.cache.open(TokenIds(ids), len(ids) if self.is_decode else len(ids) - 1)
        assert isinstance(lease, HybridLease)
        request = Request(lease, ids)
        request.num_computed = lease.num_shared * self.page_size
        found = [request.num_computed, lease.branch_tokens]
        if self._lengthen(request, ids):
            self.live.append(request)
        else:
            self.cache.drop(lease)
        return found

    def _lengthen(self, request: Request, ids: tuple[int, ...]) -> bool:
        num_pages = -(-len(ids) // self.page_size) - len(request.lease.table)
        if num_pages > self.cache.num_available_pages:
            return False
        self.cache.grow(request.lease, num_pages)
        request.ids = ids
        return True

    def _compute(self, operation: Operation) -> Row:
        request = self._one(operation, is_computed=False)
        if request is None:
            return None
        left = request.num_prompt_tokens - request.num_computed
        request.num_computed += max(1, int((1.0 if self.is_decode else operation.share) * left))
        self.cache.checkpoint(request.lease, TokenIds(request.ids), request.num_computed)
        return [0, 0]

    def _generate(self, operation: Operation) -> Row:
        request = self._one(operation, is_computed=True)
        if request is None or not self._lengthen(request, request.ids + operation.ids):
            return None
        return [0, 0]

    def _finish(self, operation: Operation) -> Row:
        request = self._one(operation, is_computed=True)
        if request is None:
            return None
        self.live.remove(request)
        self.cache.close(request.lease, TokenIds(request.ids), len(request.ids))
        return [0, 0]

    def _drop(self, operation: Operation) -> Row:
        request = self._one(operation)
        if request is None:
            return None
        self.live.remove(request)
        self.cache.drop(request.lease)
        return [0, 0]

    def _look(self, operation: Operation) -> Row:
        return [self.cache.use(TokenIds(operation.ids)), 0]

    def state(self) -> list[int]:
        """As the drive's."""
        prefixes, nodes = [], [self.tree.root]
        for node in nodes:
            nodes += node.children.values()
            if node.parent is not None:
                prefixes.append(tuple(node.sequence.ids()[: node.stop]))
        kept = [tuple(node.sequence.ids()[: node.stop]) for node in self.cache.states.kept]
        free = self.pool.num_free, self.cache.states.num_free, self.tree.num_evictable_pages
        return [*free, digest(prefixes, kept)]


def compare_rows(load: Load, rows: list[Row]) -> Outcome:
    replay, num_equal = Replay(load.settings), 0
    for operation, row in zip(load.operations, rows, strict=True):
        given = replay.step(operation)
        mine = None if given is None else given + replay.state()
        if mine != row:
            return Outcome(num_equal, f"{load.settings} {operation}: {mine}, SGLang {row}")
        num_equal += row is not None
    return Outcome(num_equal)


def outcomes() -> dict[int, Outcome]:
    """Of each load with a log."""
    logs = json.loads(gzip.decompress(LOG.read_bytes()))
    return {int(seed): compare_rows(load_of(int(seed)), rows) for seed, rows in logs.items()}


def show(found: dict[int, Outcome]) -> None:
    for seed, outcome in found.items():
        if outcome.difference:
            print(seed, outcome.difference)
    num_equal, num_differing = sum(o.num_equal for o in found.values()), sum(bool(o.difference) for o in found.values())
    print(f"{len(found)} loads: {num_equal} operations equal, {num_differing} loads differ")


if __name__ == "__main__":
    show(outcomes())
