"""The nearest valid name, for error messages."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, among: Iterable[str]) -> str:
    close = get_close_matches(word, list(among), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
