"""Requests of which a message may still be on its way, though they have ended here, or not come yet."""

KEPT_NS = 120_000_000_000
"""Longer than any message is on its way. SGLang's bootstrap server forgets rooms after this time, too."""


class LateRequests:
    """Each is remembered, with a word on why, until no message of it can come any more."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[int, str]] = {}
        """Until when, and why; those that go first are first."""
        self._now_ns = 0

    def at(self, now_ns: int) -> None:
        """It is now_ns: forget what is older than KEPT_NS."""
        self._now_ns = now_ns
        while self._kept and next(iter(self._kept.values()))[0] <= now_ns:
            del self._kept[next(iter(self._kept))]

    def add(self, request_id: int, why: str = "") -> None:
        """If it is not remembered already."""
        self._kept.setdefault(request_id, (self._now_ns + KEPT_NS, why))

    def discard(self, request_id: int) -> None:
        self._kept.pop(request_id, None)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._kept

    def why(self, request_id: int) -> str:
        return self._kept[request_id][1]
