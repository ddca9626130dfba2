"""A pair as vLLM serves it: prefill computes at once, and all KV of a prompt moves in one transfer when decode asks."""

from tests.twins.pair import Pair, Request


class PulledPair(Pair):
    def arrive(self, request: Request) -> None:
        self.at(self.now_ns + self.settings.message_ns, self.granted.append, request)

    def budgeted_tokens(self, num_tokens: int) -> int:
        return num_tokens

    def transfer(self, request: Request, is_last: bool) -> None:
        """Nothing crosses before decode has pages for the whole prompt."""
        if is_last:
            self.at(self.now_ns + self.settings.message_ns, self.queued.append, request)

    def grant(self, request: Request) -> None:
        request.times_ns["admitted"] = self.now_ns
        self.at(self.now_ns + self.settings.message_ns, self.move, request)

    def move(self, request: Request) -> None:
        """A thread of prefill writes the KV (MooncakeConnector); prefill's loop plays no part."""
        super().transfer(request, is_last=True)
