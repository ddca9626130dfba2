"""The fields of both dialects that say how tokens are chosen and when they end."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from pdreal.sampling import Sampling
from pdreal.serve.fields import Fields

IGNORED: Mapping[str, tuple[float, float]] = {
    "temperature": (0, inf),
    "top_p": (0, 1),
    "top_k": (-1, inf),
    "min_p": (0, 1),
}
"""Settings of sampling, and what they may be: they change nothing, for tokens are greedy."""
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "n": [1],
    "best_of": [1],
    "use_beam_search": [False],
    "stop": [[], ""],
    "stop_regex": [[], ""],
    "min_tokens": [0],
    "min_new_tokens": [0],
    "bad_words": [[]],
    "frequency_penalty": [0],
    "presence_penalty": [0],
    "repetition_penalty": [1],
    "logit_bias": [{}],
    "json_schema": [],
    "regex": [],
    "ebnf": [],
    "structural_tag": [],
}
"""What asks for other tokens than the greedy ones, and the values that do not; null never does."""
WHY = "as each request gets one answer of greedy tokens"


def sampling_of(fields: Fields, limits: Sequence[str], default: int, vocab_size: int) -> Sampling:
    """limits: names of the longest answer, the first that is there counts. Raises RefusedError."""
    fields.allow_only(NEUTRAL, WHY)
    for name, (low, high) in IGNORED.items():
        fields.check_between(name, low, high)
    return Sampling(
        max_tokens=fields.positive(limits, default),
        ignore_eos=fields.flag("ignore_eos"),
        stop_token_ids=tuple(fields.tokens("stop_token_ids", vocab_size)),
    )
