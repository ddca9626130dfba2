"""Requests of a decode instance whose KV is complete, and that wait for a place in the batch.

The first that was ready is the first to go, unless requests have priorities: then the highest goes first, as in
SGLang's get_new_prebuilt_batch. Who comes back after a retraction has the rank that it had.
"""

from collections.abc import Iterator

from pdsim.core.admission_queue import DecodeRequest


class ReadyQueue:
    def __init__(self) -> None:
        self._requests: list[DecodeRequest] = []
        self._num_entries = 0
        """Requests that came for the first time."""
        self._has_priorities = False

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(self._requests)

    def append(self, request: DecodeRequest) -> None:
        if not request.entry:
            self._num_entries += 1
            request.entry = self._num_entries
        self._has_priorities |= request.priority != 0
        self._requests.append(request)

    def take(self, num_places: int) -> list[DecodeRequest]:
        """As many of the first as there are places. They leave."""
        if self._has_priorities:
            self._requests.sort(key=lambda request: (-request.priority, request.entry))
        num_places = max(num_places, 0)
        taken = self._requests[:num_places]
        del self._requests[:num_places]
        return taken

    def withdraw(self, request_id: int) -> DecodeRequest | None:
        """A request leaves, if it waits here."""
        for i, request in enumerate(self._requests):
            if request.request_id == request_id:
                return self._requests.pop(i)
        return None
