"""Fields of a request's JSON body and how they are checked."""

import json
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from math import inf, isinf
from random import getrandbits
from typing import Any, NamedTuple, TypeVar

from pdreal.control.refused import RefusedError
from pdreal.control.requests import Sampling

Typed = TypeVar("Typed")


def unavailable(message: str, *, retry_after_s: int | None = None) -> RefusedError:
    """Returns the refusal, with status 503, of a request that is itself correct. retry_after_s: value of the header
    Retry-After in s; None: no such header.
    """
    headers = None if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return RefusedError(message, status=HTTPStatus.SERVICE_UNAVAILABLE, headers=headers)


class Fields:
    """A JSON object. A field that is null counts as missing, because clients send null for missing fields; unknown
    fields are ignored.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        """values: the object. prefix: path of the object in the body, for messages."""
        self._values = values
        self._prefix = prefix

    @classmethod
    def parse(cls, body: bytes) -> "Fields":
        try:
            values = json.loads(body, parse_constant=_refuse_constant, parse_float=_finite)
        except ValueError as error:
            raise RefusedError(f"the body is not JSON: {error}") from None
        except RecursionError:
            raise RefusedError("the body is not JSON: nested too deeply") from None
        if not isinstance(values, dict):
            raise RefusedError(f"the body must be a JSON object, not {_kind(values)}")
        return cls(values)

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def text(self, name: str, default: str) -> str:
        return self._typed(name, str, "a string", default)

    def flag(self, name: str) -> bool:
        return self._typed(name, bool, "true or false", default=False)

    def section(self, name: str) -> "Fields":
        return Fields(self._typed(name, dict, "an object", {}), f"{self._prefix}{name}.")

    def having(self, name: str, value: Any) -> "Fields":
        return Fields({**self._values, name: value}, self._prefix)

    def positive(self, names: Sequence[str], default: int) -> int:
        """Returns an integer: the value of the first of these fields that is present, or else the default. Raises
        RefusedError if the value is below 1.
        """
        name = next((n for n in names if self._values.get(n) is not None), names[0])
        value = self.integer(name, default)
        if value < 1:
            raise self.refused(name, f"must be at least 1, not {value}")
        return value

    def check_between(self, name: str, low: float, high: float) -> None:
        """Raises RefusedError if the field is no number, below low, or above high. A missing field is accepted."""
        value = self._typed(name, int | float, "a number", low)
        if not low <= value <= high:
            what = f"at least {low}" if math.isinf(high) else f"from {low} to {high}"
            raise self.refused(name, f"must be {what}, not {value}")

    def integer(self, name: str, default: int) -> int:
        return self._typed(name, int, "an integer", default)

    def texts(self, name: str) -> tuple[str, ...]:
        """Returns the strings of a field that is one string or a list of strings. Empty strings are left out."""
        value = self._values.get(name)
        texts = [value] if isinstance(value, str) else self._typed(name, list, "a string or a list of strings", [])
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise self.refused(name, f"must be a string or a list of strings; it has {_kind(wrong[0])}")
        return tuple(filter(None, texts))

    def tokens(self, name: str, vocab_size: int) -> list[int]:
        """Returns the token ids in a field. Empty: the field is missing or an empty list. Raises RefusedError if the
        field is no list of ids from 0 to vocab_size - 1.
        """
        tokens: list[int] = self._typed(name, list, "a list of token ids", [])
        if wrong := [token for token in tokens if type(token) is not int]:
            raise self.refused(name, f"must be a list of token ids; it has {_kind(wrong[0])}")
        if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
            raise self.refused(name, f"has token {wrong[0]}; the model's tokens are 0 to {vocab_size - 1}")
        return tokens

    def allow_only(self, neutral: Mapping[str, Sequence[Any]], why: str) -> None:
        """Raises RefusedError for fields of features that real mode lacks. neutral: for each field, the values that
        switch its feature off, which are accepted. why: the reason, for the message.
        """
        for name, values in neutral.items():
            value = self._values.get(name)
            if value is not None and value not in values:
                accepted = " or ".join(json.dumps(v) for v in values)
                raise self.refused(name, f"is not supported, {why}: leave it out or send {accepted or 'null'}")

    def refused(self, name: str, what: str) -> RefusedError:
        return RefusedError(f"{self._prefix}{name} {what}", field=self._prefix + name)

    def _typed(self, name: str, kind: Any, wanted: str, default: Typed) -> Typed:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.refused(name, f"must be {wanted}, not {_kind(value)}")
        typed: Typed = value
        return typed


def _refuse_constant(name: str) -> None:
    raise RefusedError(f"the body is not JSON: {name} is no number")


def _finite(text: str) -> float:
    if isinf(value := float(text)):
        _refuse_constant(text[:20])
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 1e6),
    "top_p": (0, 1),
    "top_k": (-1, inf),
    "min_p": (0, 1),
}
"""Sampling fields that are numbers, with the smallest and the largest value of each."""
_MOST_CHOICES = 128
_MOST_LOGPROBS = 20
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "use_beam_search": [False],
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
"""Fields of a request for sampling features that real mode lacks. For each: the values that switch the feature off,
which are accepted. null is always accepted."""
WHY = "as tokens are chosen by temperature, top_p, top_k and min_p alone"


class AnswerSettings(NamedTuple):
    """Settings of a request's answers: sampling, texts that end an answer, and number of choices."""

    sampling: Sampling
    stop: tuple[str, ...]
    """Texts that end an answer and are not part of it."""
    num_choices: int
    """Number of answers to the same prompt, each with a seed of its own."""


def answer_settings(
    fields: Fields, limits: Sequence[str], default: int, vocab_size: int, num_logprobs: int | None = None
) -> AnswerSettings:
    """Reads the settings of answers from a body. limits: names of the field for the maximum number of output tokens;
    the first name that is present counts. default: this maximum if no name is present. num_logprobs: number of
    likeliest tokens whose log probabilities are returned; None: no log probabilities. Raises RefusedError for values
    that real mode does not support.

    Without a temperature the likeliest tokens are chosen. Without a seed the seed is random.
    """
    fields.allow_only(NEUTRAL, WHY)
    for name, (low, high) in _RANGES.items():
        fields.check_between(name, low, high)
    if num_logprobs is not None and not 0 <= num_logprobs <= _MOST_LOGPROBS:
        raise RefusedError(f"log probabilities are available for 0 to {_MOST_LOGPROBS} tokens, not for {num_logprobs}")
    seed = fields.integer("seed", getrandbits(62))
    num_choices = fields.positive(["n"], 1)
    if num_choices > _MOST_CHOICES:
        raise fields.refused("n", f"must be at most {_MOST_CHOICES}, not {num_choices}")
    if fields.positive(["best_of"], num_choices) != num_choices:
        raise fields.refused("best_of", f"must equal n, {num_choices}: the server returns all answers")
    sampling = Sampling(
        max_tokens=fields.positive(limits, default),
        ignore_eos=fields.flag("ignore_eos"),
        stop_token_ids=tuple(fields.tokens("stop_token_ids", vocab_size)),
        temperature=float(fields.get("temperature") or 0),
        top_p=float(1 if fields.get("top_p") is None else fields.get("top_p")),
        top_k=max(0, int(fields.get("top_k") or 0)),
        min_p=float(fields.get("min_p") or 0),
        seed=seed % (1 << 62),
        num_logprobs=num_logprobs,
    )
    return AnswerSettings(sampling, fields.texts("stop"), num_choices)
