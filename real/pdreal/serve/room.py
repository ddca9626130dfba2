"""How large a request may be, so that one that can never be served is refused at the door and not by an instance."""

from typing import NamedTuple

from pdreal.serve.refusal import RefusedError
from pdsim.scenario.schema import Scenario


class Room(NamedTuple):
    """Tokens. Where prompt and output share a pool, the prompt counts in whole pages."""

    prompt_tokens: int
    total_tokens: int
    page_size: int = 1

    @classmethod
    def of(cls, scenario: Scenario, context: int) -> "Room":
        """Of a resolved scenario and a model's context. Pools bind as they bind the requests of a workload."""
        page = scenario.page_size
        if scenario.aggregated is not None:
            room = (scenario.aggregated.pool_tokens or 0) - page - 1
            return cls(min(room, context) - 1, min(room, context), page)
        prefill, decode = scenario.pair
        prompt = (prefill.pool_tokens or 0) - 1 - page
        total = (decode.pool_tokens or 0) + 1
        return cls(min(prompt, total - 1, context - 1), min(total, context))

    def check(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raises RefusedError."""
        paged = -(-num_prompt_tokens // self.page_size) * self.page_size
        if num_prompt_tokens > self.prompt_tokens or paged + max_tokens > self.total_tokens:
            raise RefusedError(
                f"the prompt has {num_prompt_tokens} tokens and asks for up to {max_tokens} more; "
                f"there is room for {self.prompt_tokens} prompt tokens, and for {self.total_tokens} with the output"
            )
