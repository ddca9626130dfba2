"""A simulator of one aggregated instance with room for all requests. Prompts go before decode steps."""

from tests.twins.pair import Pair, Request


class Aggregated(Pair):
    def choose(self) -> None:
        if not self.prefill_is_busy and not self.decode_is_busy:
            self.prefill()
            if not self.prefill_is_busy:
                self.decode()

    def arrive(self, request: Request) -> None:
        self.at(self.now_ns + self.settings.message_ns, self.granted.append, request)

    def transfer(self, request: Request, is_last: bool) -> None:
        """Gives the request its first token if the forward completed the prompt. The KV stays where it is."""
        if is_last:
            self.merge(request)
