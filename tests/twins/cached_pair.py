"""A simulator of a pair whose decode instance caches prompts and outputs. Prefill sends only pages that decode
lacks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.twins.pair import Pair, Request


@dataclass(eq=False)
class Conversation(Request):
    tokens: Sequence[object] = ()  # of the prompt, then of the output


def num_common(tokens: Sequence[object], others: Sequence[object]) -> int:
    differ = (i for i, (token, other) in enumerate(zip(tokens, others, strict=False)) if token != other)
    return next(differ, min(len(tokens), len(others)))


class CachedPair(Pair):
    def __init__(self, requests, settings) -> None:
        super().__init__(requests, settings)
        self.cached: list[Sequence[object]] = []  # decode has the KV of their whole pages

    def grant(self, request: Conversation) -> None:
        prompt = request.tokens[: request.prompt_tokens]
        num_cached = max((num_common(prompt, sequence) for sequence in self.cached), default=0)
        request.sent_pages = num_cached // self.settings.page_tokens
        super().grant(request)

    def transfer(self, request: Conversation, is_last: bool) -> None:
        if is_last or self.settings.num_pages(request.computed_tokens) > request.sent_pages:
            super().transfer(request, is_last)

    def merge(self, request: Conversation) -> None:
        self.cache(request.tokens[: request.prompt_tokens])
        super().merge(request)

    def give_token(self, request: Conversation) -> None:
        super().give_token(request)
        if request not in self.batch:
            self.cache(request.tokens[:-1])  # the last token's KV is never computed

    def cache(self, tokens: Sequence[object]) -> None:
        whole_pages = len(tokens) // self.settings.page_tokens
        self.cached.append(tokens[: whole_pages * self.settings.page_tokens])
