"""How a request's tokens are chosen and when they end: what a harness knows and no policy sees."""

from typing import NamedTuple


class Sampling(NamedTuple):
    """Greedy. Ends with the first of: max_tokens, stop_after_tokens, an end-of-sequence token, a token to stop at."""

    max_tokens: int
    """The client's limit, which policies see too."""
    stop_after_tokens: int | None = None
    """A workload's true output length."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
