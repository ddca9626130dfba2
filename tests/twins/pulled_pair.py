"""A pair as vLLM serves it: prefill computes at once, and decode then reads all KV of a prompt in one transfer."""

from collections import deque

from tests.twins.pair import Pair, Request


class PulledPair(Pair):
    def __init__(self, requests, settings) -> None:
        super().__init__(requests, settings)
        self.asked: deque[Request] = deque()  # on prefill: decode has pages for their KV

    def arrive(self, request: Request) -> None:
        self.at(self.now_ns + self.settings.message_ns, self.granted.append, request)

    def prefill(self) -> None:
        while self.asked:
            super().transfer(self.asked.popleft(), is_last=True)
        super().prefill()

    def budgeted_tokens(self, num_tokens: int) -> int:
        return num_tokens

    def transfer(self, request: Request, is_last: bool) -> None:
        """Nothing crosses before decode has pages for the whole prompt."""
        if is_last:
            self.at(self.now_ns + self.settings.message_ns, self.queued.append, request)

    def grant(self, request: Request) -> None:
        request.times_ns["admitted"] = self.now_ns
        self.at(self.now_ns + self.settings.message_ns, self.asked.append, request)
