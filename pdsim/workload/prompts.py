"""Traces that contain texts: chat messages and prompts. A tokenizer counts their tokens. Without a tokenizer, tokens
are estimated from the number of characters, with a note.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar

from pdsim.core.sequence import Spans
from pdsim.dataclass import dataclass
from pdsim.inputs import InputError, parse_json
from pdsim.workload import trace_fields as names
from pdsim.workload.hash_ids import TEXT_BLOCK, TextBlocks
from pdsim.workload.lengths import above_zero, positive
from pdsim.workload.request_spec import RequestSpec, alone
from pdsim.workload.trace_file import Line, Trace, TraceError, records, warn
from pdsim.workload.trace_rows import RowReader, RowTrace

_USUAL_OUTPUT = 256
"""Assumed length in tokens of an answer whose length is unknown: the limit that clients of SGLang and vLLM send."""
_LOOKED_AT = 100
"""Number of first rows from which the unit of times is inferred."""
_LEAST_TOKENS = 2
"""Minimum length in tokens of a prompt and of an answer. SGLang's client drops shorter ones."""


@dataclass(frozen=True, kw_only=True)
class ShareGpt(Trace):
    """ShareGPT: a JSON list of conversations. The first turn is the prompt, the second turn is the answer.
    Conversations with fewer turns are left out.

    Lengths are numbers of characters times tokens_per_character. The file has no arrival times: set the client's
    arrivals.
    """

    tokens_per_character: float = 0.25
    """Number of tokens per character. English has about four characters per token; code and other languages have
    fewer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        above_zero(self, tokens_per_character=self.tokens_per_character)

    def specs(self) -> Iterator[RequestSpec]:
        lengths = ([self._num_tokens(record, turn) for turn in _first_two(record)] for record in records(self.path))
        answered = (pair for pair in lengths if len(pair) == 2 and min(pair) >= _LEAST_TOKENS)  # noqa: PLR2004
        number = 0
        for number, (num_inputs, num_outputs) in enumerate(answered, start=1):
            yield alone(number - 1, num_inputs, num_outputs)
        if number:
            warn(_estimate_of(self.path, self.tokens_per_character))

    def _num_tokens(self, record: Line, turn: object) -> int:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise record.error("conversations", str(turn)[:40], "turns such as {'from': 'human', 'value': 'text'}")
        return round(len(turn["value"]) * self.tokens_per_character)


def _estimate_of(path: Path, tokens_per_character: float) -> str:
    return f"{path}: lengths are estimated, {tokens_per_character:g} tokens a character"


def _first_two(record: Line) -> list[object]:
    turns = record.value("conversations")
    if not isinstance(turns, list):
        raise record.error("conversations", turns, "a list of turns")
    return turns[:2]


PROMPTS = (
    "messages",
    "conversation",
    "prompt",
    "text_input",
    "text",
    "texts",
    "question",
    "instruction",
    "input",
    "turns",
)
"""Names of fields with the text of a prompt. The first field that a record has is used."""
WHOLE = ("messages", "conversation")
"""Names of trace fields that, in a later turn, contain the whole conversation so far."""
ANSWERS = ("completion", "response", "answer", "output", "chosen", "generated_text", "choices")
_IN_THE_BODY = ("body", "request", "payload", "endpointInput", "captureData", "kwargs", "data")
"""Names of fields that contain the request that was sent, as an object or as JSON text."""


@dataclass(frozen=True, kw_only=True)
class ChatTrace(RowTrace):
    """Recorded requests that contain chat messages or a prompt. Prompts with equal beginnings share a prefix. Formats:
    OpenAI's batch files, AIPerf's single and multi turn, captured bodies, vLLM's custom data sets.

    Length of a prompt: the recorded length, or else the tokenizer's count, or else its characters times
    tokens_per_character. Length of an answer: the recorded length, or else the length of its recorded text, or else the
    requested limit, or else output_tokens.
    If the text of a turn does not begin with the text of the turn before, the conversation so far is put before the
    text.
    """

    tokenizer: Path | None = None
    """Path of a tokenizer.json. Needs the package tokenizers. None: tokens are estimated from characters."""
    tokens_per_character: float = 0.25
    """Number of tokens per character. English has about four characters per token; code and other languages have
    fewer."""
    image_tokens: int = 1000
    """Assumed number of prompt tokens of each image."""
    output_tokens: int | None = None
    """Length in tokens of answers without a recorded length, a recorded text or a requested limit. None: 256, with a
    note."""

    usual_unit: ClassVar[str] = "ms"

    def __post_init__(self) -> None:
        super().__post_init__()
        above_zero(self, tokens_per_character=self.tokens_per_character)
        positive(self, output_tokens=self.output_tokens)

    def specs(self) -> Iterator[RequestSpec]:
        rows = (one for line in records(self.path) for one in _requests_of(line))
        first = list(islice(rows, _LOOKED_AT))
        yield from _ChatReader(self, first).read(chain(first, rows))

    @cached_property
    def _encode(self) -> Any:
        try:
            tokenizers = import_module("tokenizers")
        except ImportError:
            raise TraceError("tokenizer: the package tokenizers is not installed: pip install tokenizers") from None
        try:
            return tokenizers.Tokenizer.from_file(str(self.tokenizer))
        except Exception as wrong:  # noqa: BLE001  its errors have no class of their own
            raise TraceError(f"tokenizer: {self.tokenizer} is no tokenizer.json: {wrong}") from None

    def units(self, text: str) -> Sequence[Any]:
        """Returns the token ids of a text or, without a tokenizer, its characters."""
        if self.tokenizer is None:
            return text
        ids: list[int] = self._encode.encode(text, add_special_tokens=False).ids
        return ids


class _ChatReader(RowReader):
    trace: ChatTrace

    def __post_init__(self) -> None:
        super().__post_init__()
        block = TEXT_BLOCK if self.trace.tokenizer else max(1, round(TEXT_BLOCK / self.trace.tokens_per_character))
        self._texts = TextBlocks(self.streams, block)
        self._num_estimated = self._num_unknown = 0
        self._text = ""
        self._said: dict[str, tuple[int, int]] = {}
        """By session: the number of characters and the hash of the text of its last turn."""

    def say(self) -> None:
        super().say()
        if self._num_estimated:
            estimate = _estimate_of(self.trace.path, self.trace.tokens_per_character)
            warn(f"{estimate}: set tokenizer (a tokenizer.json) to count them")
        if self._num_unknown:
            what = f"answers of unknown length are assumed to have {_USUAL_OUTPUT} tokens each (output_tokens)"
            warn(f"{self.trace.path}: {self._num_unknown} {what}")
        if num := self.images.num_images:
            each = self.trace.image_tokens
            warn(f"{self.trace.path}: {num} images count as {each} tokens each (image_tokens)")

    def note_turn(self, session: str, spec: RequestSpec, line: Line) -> None:
        super().note_turn(session, spec, line)
        self._said[session] = len(self._text), hash(self._text)

    def continued(self, before: RequestSpec, prompt: Spans, line: Line) -> Spans:
        """Makes the prompt of a later turn from the conversation so far and the new text. before: the turn before.
        prompt: made from the text of this turn alone. line: the record of this turn. Returns `prompt` unchanged if it
        counts as the whole conversation: new_turns is False, the record has a field of WHOLE or a recorded length, or
        the text begins with the text of the turn before.
        """
        session = line.quantity(names.SESSION)
        length, said = self._said["" if session is None else str(session[1])]
        is_whole = any(line.get(name) for name in WHOLE) or line.quantity(names.INPUT) is not None
        if self.trace.new_turns is False or is_whole or hash(self._text[:length]) == said:
            return prompt
        return before.prompt.then(before.output).then(prompt)

    def prompt(self, line: Line) -> Spans:
        self._text, images = _text_of(line)
        text = self._text
        recorded = line.quantity(names.INPUT)
        num_image_tokens = self.images.read(images)
        units = self.trace.units(text)
        if recorded is not None:
            return self._texts.prompt(units, line.count(recorded[0]))
        num_tokens = max(1, self._num_tokens(units))
        prompt = self._texts.prompt(units, num_tokens)
        return prompt.then(Spans.of(next(self.streams), num_image_tokens)) if images else prompt

    def num_outputs(self, line: Line) -> int:
        recorded = [
            name for name in names.OUTPUT.names if line.get(name) not in (None, "") and name not in names.LIMITS
        ]
        if recorded:
            return line.count(recorded[0])
        if answer := _answer_of(line):
            return max(1, self._num_tokens(self.trace.units(answer)))
        if (limit := line.quantity(names.OUTPUT)) is not None:
            return line.count(limit[0])
        if self.trace.output_tokens is None:
            self._num_unknown += 1
            return _USUAL_OUTPUT
        return self.trace.output_tokens

    def _num_tokens(self, units: Sequence[Any]) -> int:
        if self.trace.tokenizer is not None:
            return len(units)
        self._num_estimated += 1
        return round(len(units) * self.trace.tokens_per_character)


def has_text(fields: Mapping[str, Any]) -> bool:
    """True if the prompt of the record is a text."""
    line = Line("", dict(fields))
    return _turns_of(line) is not None or _body_of(line) is not None


def _requests_of(line: Line) -> Iterator[Line]:
    """Yields the requests of a record: one request, or one for each turn or payload of a session."""
    turns, session = _turns_of(line), line.get("session_id") or line.get("question_id")
    for name in ("forks", "spawns"):
        if any(isinstance(turn, dict) and turn.get(name) for turn in turns or ()):
            raise line.error("turns", f"turns with {name}", "none: AIPerf's branches are not modelled")
    if turns is None:
        yield _with_body(line)
        return
    for i, turn in enumerate(turns):
        fields = dict(turn) if isinstance(turn, dict) else {"text": turn}
        if Line("", fields).quantity(names.IMAGES) is not None:
            fields.setdefault("texts", [""])
        yield _with_body(Line(f"{line.where}, turn {i + 1}", {"session_id": session or line.where, **fields}))


def _turns_of(line: Line) -> list[Any] | None:
    """Returns the turns of a session, also in the format of AIPerf's and GenAI-Perf's inputs.json. None: the record is
    no session.
    """
    found = (line.get(name) for name in ("turns", "payloads", "payload"))
    return next((turns for turns in found if isinstance(turns, list) and turns), None)


def _with_body(line: Line) -> Line:
    """Returns a record of a trace with the fields of its request body, if it has one, added to its own fields. Raises
    TraceError if the record has no prompt.
    """
    body = _body_of(line)
    if body is None:
        there = ", ".join(map(str, line.fields))
        raise TraceError(f"{line.where}: no prompt: {', '.join(PROMPTS[:5])} or the like; the line has {there}")
    return Line(line.where, {**line.flat().fields, **body})


def _body_of(line: Line) -> Mapping[str, Any] | None:
    if any(_is_text(line.get(name)) for name in PROMPTS):
        return line.fields
    for name in _IN_THE_BODY:
        inside = _opened(line.get(name))
        if inside is not None and (found := _body_of(Line(line.where, inside))) is not None:
            return found
    return None


def _opened(found: Any) -> dict[str, Any] | None:
    """Returns an object: `found` itself, or what it contains as JSON text, which may be base64-encoded. None: `found`
    contains no object.
    """
    if isinstance(found, dict):
        return found
    if not isinstance(found, str):
        return None
    if not found.lstrip().startswith("{"):
        try:
            found = base64.b64decode(found, validate=True).decode()
        except (binascii.Error, ValueError):
            return None
    try:
        inside = parse_json(found, "") if found.lstrip().startswith("{") else None
    except InputError:
        return None
    return inside if isinstance(inside, dict) else None


def _is_text(found: Any) -> bool:
    if isinstance(found, list):
        return bool(found) and isinstance(found[0], str | dict)
    return isinstance(found, str) and bool(found)


def _text_of(line: Line) -> tuple[str, list[str]]:
    """Returns the whole text of a prompt, and the names of its images. Raises TraceError if the line has no prompt."""
    texts: list[str] = []
    images: list[str] = []
    if isinstance(line.get("tools"), list):
        texts.append(str(line.get("tools")))
    name = next((name for name in PROMPTS if _is_text(line.get(name))), None)
    if name is None:
        raise TraceError(f"{line.where}: no prompt: the line has {', '.join(map(str, line.fields))}")
    messages = _without_answer(line.get(name))
    for message in messages if isinstance(messages, list) else [messages]:
        _add_message(message, texts, images)
    if name == "instruction" and isinstance(line.get("input"), str):
        texts.append(line.get("input"))
    own = line.quantity(names.IMAGES)
    if own is not None:
        images += map(str, own[1]) if isinstance(own[1], list) else [str(own[1])]
    return "\n".join(texts), images


def _without_answer(messages: Any) -> Any:
    """Returns the messages without the last one if this is an answer."""
    return messages[:-1] if _ends_with_answer(messages) and len(messages) > 1 else messages


def _ends_with_answer(messages: Any) -> bool:
    return isinstance(messages, list) and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant"


def _add_message(message: Any, texts: list[str], images: list[str]) -> None:
    if not isinstance(message, dict):
        texts.append(str(message))
        return
    texts.append(f"{message.get('role', 'user')}:")
    content = message.get("content", message.get("contents"))
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, dict) and "text" not in part:
            images.append(blake2b(str(part).encode()).hexdigest())
        elif part is not None:
            texts.append(str(part["text"]) if isinstance(part, dict) else str(part))
    if message.get("tool_calls"):
        texts.append(str(message["tool_calls"]))


def _answer_of(line: Line) -> str:
    messages = line.get("messages") or line.get("conversation")
    if _ends_with_answer(messages) and len(messages) > 1:
        texts: list[str] = []
        _add_message(messages[-1], texts, [])
        return "\n".join(texts[1:])
    for name in ANSWERS:
        found = line.get(name)
        if isinstance(found, str) and found:
            return found
        if isinstance(found, list) and found:
            texts = []
            _add_message(found[0].get("message") or found[0] if isinstance(found[0], dict) else found[0], texts, [])
            return "\n".join(texts)
    return ""
