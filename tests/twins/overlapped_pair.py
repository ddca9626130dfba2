"""A simulator of a pair whose prefill instance chooses the next forward while one runs, as SGLang does by default."""

from dataclasses import dataclass

from tests.twins.pair import Pair, Request


@dataclass(eq=False)
class ScheduledRequest(Request):
    scheduled_tokens: int = 0  # of the prompt, in forwards that have begun or wait for the GPU


class OverlappedPair(Pair):
    def __init__(self, requests, settings) -> None:
        super().__init__(requests, settings)
        self.num_forwards = 0  # chosen, and without a result
        self.gpu_free_ns = 0

    def prefill(self) -> None:
        """Chooses forwards until two are under way, or no prompt waits."""
        while self.num_forwards < 2 and (chunks := self.fill()):
            self.num_forwards += 1
            duration_ns = self.settings.prefill_token_ns * sum(num_tokens for _, num_tokens in chunks)
            self.gpu_free_ns = max(self.now_ns, self.gpu_free_ns) + duration_ns
            for request, _ in chunks:
                request.times_ns.setdefault("prefill_start", self.gpu_free_ns - duration_ns)
            self.at(self.gpu_free_ns, self.compute, chunks)
        self.prefill_is_busy = self.num_forwards > 0  # it looks again with the next result

    def fill(self) -> list[tuple[ScheduledRequest, int]]:
        room, chunks = self.settings.chunk_tokens, []
        for request in self.granted:
            if num_tokens := min(request.prompt_tokens - request.scheduled_tokens, room):
                chunks.append((request, num_tokens))
                room -= self.budgeted_tokens(num_tokens)
                request.scheduled_tokens += num_tokens
        return chunks

    def compute(self, chunks: list[tuple[ScheduledRequest, int]]) -> None:
        self.num_forwards -= 1
        super().compute(chunks)
