"""Compares the KV of every request on both sides: what prefill sent, and what lies in decode's pages as it arrives."""

from collections.abc import Callable, Iterable
from typing import Any

from pdreal.rank_group import RankGroup
from pdreal.tasks import DigestArrived, DigestSent
from pdsim.core.messages import KvGranted
from pdsim.core.transfer_plan import TransferUnit


class KvDamagedError(Exception):
    """KV arrived that was not sent."""


class KvCheck:
    """Of one instance."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._pages: dict[int, list[int]] = {}
        """Of requests that are being sent, all that were sent so far."""
        self._digests: dict[int, dict[str, int]] = {}
        """Of what was sent, by KV head: on prefill until it is told, on decode until it is compared."""

    # Prefill.

    def on_sent(
        self,
        unit: TransferUnit,
        worker: int,
        num_tokens: int,
        then: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Goes on when the KV of a request that is sent whole has its fingerprints."""
        pages = self._pages.setdefault(unit.request_id, [])
        if unit.after_layers is None or unit.after_layers[1] == 0:
            pages += unit.source_pages
        if not unit.is_last:
            then()
            return
        del self._pages[unit.request_id]

        def on_done(results: list[Any], error: str | None) -> None:
            if error is not None:
                fail(RuntimeError(f"fingerprints of request {unit.request_id}: {error}"))
                return
            self._digests[unit.request_id] = _joined(results)
            then()

        self._group.begin(DigestSent(worker, pages, num_tokens), on_done)

    def sent(self, request_id: int) -> dict[str, int]:
        return self._digests.pop(request_id)

    # Decode.

    def expect(self, request_id: int, digests: dict[str, int]) -> None:
        self._digests[request_id] = digests

    def compare(
        self,
        grant: KvGranted,
        num_tokens: int,
        then: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        expected = self._digests.pop(grant.request_id)

        def on_done(results: list[Any], error: str | None) -> None:
            if error is None and (found := _joined(results)) == expected:
                then()
                return
            damaged = [] if error else [head for head in expected if expected[head] != found.get(head)]
            what = error or f"heads {', '.join(damaged)} of {num_tokens} tokens differ from what was sent"
            fail(KvDamagedError(f"KV of request {grant.request_id} is damaged: {what}"))

        self._group.begin(DigestArrived(grant.pages, num_tokens), on_done)


def _joined(by_rank: Iterable[dict[str, int]]) -> dict[str, int]:
    """Ranks that hold copies of one head agree, or the head is marked."""
    heads: dict[str, int] = {}
    for digests in by_rank:
        for head, value in digests.items():
            heads[head] = value if heads.get(head, value) == value else -1
    return heads
