"""Choices of tokens, in words that need no torch."""

from typing import Any, NamedTuple


class Draw(NamedTuple):
    """Rule by which one token is chosen."""

    temperature: float
    """0: greedily."""
    top_p: float
    top_k: int
    """0: among all."""
    min_p: float
    seed: int
    position: int
    """Position of the token in its sequence."""
    num_logprobs: int | None
    """Log probabilities of so many likeliest tokens, beside that of the chosen one; None: not even that."""


Logprobs = list[Any]
"""[of the chosen token, [[token, its own], ...]]: plain JSON, before temperature and cuts."""
