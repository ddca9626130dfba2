"""A simulator of a pair of vLLM: prefill computes prompts at once, and all KV of a prompt moves in one transfer when
decode asks for it.
"""

from tests.twins.pair import Pair, Request


class PulledPair(Pair):
    def arrive(self, request: Request) -> None:
        self.at(self.now_ns + self.settings.message_ns, self.granted.append, request)

    def budgeted_tokens(self, num_tokens: int) -> int:
        return num_tokens

    def transfer(self, request: Request, is_last: bool) -> None:
        """Tells decode that the prompt is computed. No KV moves before decode has pages for the whole prompt."""
        if is_last:
            self.at(self.now_ns + self.settings.message_ns, self.queued.append, request)

    def grant(self, request: Request) -> None:
        request.times_ns["admitted"] = self.now_ns
        self.at(self.now_ns + self.settings.message_ns, self.move, request)

    def move(self, request: Request) -> None:
        """Moves the KV of a request. A thread of prefill writes it (MooncakeConnector), so prefill's loop does not
        delay it.
        """
        super().transfer(request, is_last=True)
