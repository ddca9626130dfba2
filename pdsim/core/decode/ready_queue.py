"""Requests of a decode instance that wait for a place in the batch. Their KV is complete.

Requests of the highest priority leave first, as in SGLang's get_new_prebuilt_batch; requests of equal priority leave in
the order in which they became ready. A resumed request keeps its first rank in this order, or gets a new rank at its
retraction (EngineRules.keeps_ranks).
"""

from collections.abc import Iterator

from pdsim.core.decode.admission_queue import DecodeRequest


class ReadyQueue:
    def __init__(self, *, keeps_ranks: bool) -> None:
        self._keeps_ranks = keeps_ranks
        self.requests: list[DecodeRequest] = []
        """Requests in order of arrival, or by priority as of the last call of `take`."""
        self._num_entries = 0
        """Number of ranks that the queue has given so far."""
        self._has_priorities = False

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(self.requests)

    def append(self, request: DecodeRequest) -> None:
        if not request.entry:
            self._num_entries += 1
            request.entry = self._num_entries
        self._has_priorities |= request.priority != 0
        self.requests.append(request)

    def on_retraction(self, request: DecodeRequest) -> None:
        """Ranks a retracted request behind all earlier requests, unless EngineRules.keeps_ranks is True."""
        if not self._keeps_ranks:
            self._num_entries += 1
            request.entry = self._num_entries

    def take(self, num_places: int) -> list[DecodeRequest]:
        """Removes and returns the first requests of the queue, at most num_places."""
        if self._has_priorities:
            self.requests.sort(key=lambda request: (-request.priority, request.entry))
        num_places = max(num_places, 0)
        taken = self.requests[:num_places]
        del self.requests[:num_places]
        return taken

    def withdraw(self, request_id: int) -> DecodeRequest | None:
        """Removes and returns a request. None: the queue does not hold the request."""
        for i, request in enumerate(self.requests):
            if request.request_id == request_id:
                return self.requests.pop(i)
        return None
