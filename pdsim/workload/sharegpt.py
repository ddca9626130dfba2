"""Conversations as text, without a tokenizer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from pdsim.core.sequence import Spans
from pdsim.workload.lengths import above_zero
from pdsim.workload.request_spec import RequestSpec, Streams
from pdsim.workload.trace_file import Line, Trace, in_order, json_records

_LEAST_TOKENS = 2
"""Of a prompt and of an answer: SGLang's client drops shorter ones."""


@dataclass(frozen=True, kw_only=True)
class ShareGpt(Trace):
    """A JSON list of conversations: the first turn is a prompt, the second its answer, as benchmark clients take them.

    Lengths are of the text, times tokens_per_character. Prompts share nothing and have no times.
    """

    tokens_per_character: float = 0.25
    """English has about four characters a token; code and other languages have fewer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        above_zero(self, tokens_per_character=self.tokens_per_character)

    def requests(self, rng: Streams) -> Sequence[RequestSpec]:
        del rng
        specs = [
            RequestSpec(i, Spans.of(2 * i, num_inputs), Spans.of(2 * i + 1, num_outputs), num_outputs)
            for i, (num_inputs, num_outputs) in enumerate(islice(self._lengths(), self.num_requests))
        ]
        return in_order(specs, self.path)

    def _lengths(self) -> Iterator[tuple[int, int]]:
        for record in json_records(self.path):
            lengths = [self._num_tokens(record, turn) for turn in _first_two(record)]
            if len(lengths) == 2 and min(lengths) >= _LEAST_TOKENS:  # noqa: PLR2004
                yield lengths[0], lengths[1]

    def _num_tokens(self, record: Line, turn: object) -> int:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise record.error("conversations", str(turn)[:40], "turns such as {'from': 'human', 'value': 'text'}")
        return round(len(turn["value"]) * self.tokens_per_character)


def _first_two(record: Line) -> list[object]:
    turns = record.value("conversations")
    if not isinstance(turns, list):
        raise record.error("conversations", turns, "a list of turns")
    return turns[:2]
