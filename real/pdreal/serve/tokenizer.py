"""Text to token ids and back, without a library or a vocabulary file. A token up to 255 is a byte, a larger token has a
spelling.

Token 65 is `A`. A byte that is neither printable ASCII nor a newline is spelled `<0xC3>`, a token above 255 by its
number, `<300>`, and `<` itself `<0x3C>`. So different token sequences have different texts: encode(decode(tokens)) ==
tokens. Text of printable ASCII without `<` survives encode and decode unchanged.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pdreal.control.refused import RefusedError
from pdreal.settings.host import LaunchError
from pdsim.inputs import InputError, read_json

NUM_BYTES = 256
END_OF_TEXT = 0
SPELLED_OUT = r"<(?:0x[0-9A-F]{2}|[1-9][0-9]{2,8})>"
"""Pattern of the texts of tokens that are longer than one character: <0xC3> for a byte, <1234> for any other token.
The pattern also matches some texts that spell no token, such as <0x41>; token 65 is spelled A."""

_ITSELF = frozenset(b"\n" + bytes(range(0x20, 0x7F))) - frozenset(b"<")


def piece(token: int) -> str:
    """Returns the spelling of one token. The spelling does not depend on neighbouring tokens."""
    if token in _ITSELF:
        return chr(token)
    return f"<0x{token:02X}>" if token < NUM_BYTES else f"<{token}>"


class Tokenizer:
    """A simple tokenizer for a model with vocab_size tokens: each byte of a text is one token, and each other token id
    has a spelling of its own, such as <300>, which encodes to this one token. vocab_size is at least 256.
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < NUM_BYTES:
            raise ValueError(f"a vocabulary of {vocab_size} tokens cannot hold all {NUM_BYTES} bytes")
        self.vocab_size = vocab_size

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(map(piece, tokens))

    def detokenizer(self) -> "Detokenizer":
        """Returns a new detokenizer, for one answer."""
        return Detokenizer(self.decode)

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        end = 0
        for start, stop, token in self._spelled_out(text):
            tokens += text[end:start].encode()
            tokens.append(token)
            end = stop
        tokens += text[end:].encode()
        return tokens

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Returns the tokens of a conversation, which consists of (role, content) pairs. CHAT_TEMPLATE writes the same
        text.
        """
        return self.encode("".join(f"{role}: {content}\n" for role, content in messages) + "assistant:")

    def _spelled_out(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Finds tokens that the text writes as numbers, such as <0x00> or <312>. Yields (start in the text, end in the
        text, token id) for each.
        """
        for match in re.finditer(SPELLED_OUT, text):
            token = int(match[0][1:-1], 16 if match[0].startswith("<0x") else 10)
            if token < self.vocab_size and piece(token) == match[0]:
                yield *match.span(), token


class Detokenizer:
    """Turns the tokens of an answer into text as they arrive. One character may take several tokens. decode: returns
    the text of token ids.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        """Tokens whose text `add` returned last, then tokens whose text is kept. No later text needs earlier ones."""
        self._num_told = 0

    def add(self, tokens: Sequence[int]) -> str:
        """Returns the new text. The bytes of an incomplete character are kept until its last token arrives."""
        self._tokens += tokens
        before, now = self._decode(self._tokens[: self._num_told]), self._decode(self._tokens)
        if now.endswith("\ufffd"):
            return ""
        self._tokens = self._tokens[self._num_told :]
        self._num_told = len(self._tokens)
        return now[len(before) :]


CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- message.role + ": " }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{{- part.text }}
{%- endfor %}
{%- endif %}
{{- "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "assistant:" }}
{%- endif %}
"""
"""Jinja template that writes a conversation as Tokenizer.chat does, for clients that count its tokens."""


HUB_NAME = "pdreal/bytes"
_REVISION = "0" * 40


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes the files of a tokenizer for models with random weights, so that AutoTokenizer.from_pretrained(folder)
    reads them. vocab_size: number of tokens in the vocabulary.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(vocab_size), indent=1) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(_config(), indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}) + "\n")  # transformers 5 asks for one
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def holds_tokenizer(folder: Path) -> bool:
    """True if the folder was written by `write_tokenizer`, whose config.json has the field vocab_size only. The
    config.json of a checkpoint has more fields.
    """
    try:
        config = read_json(folder / "config.json")
    except (OSError, InputError):
        return False
    return isinstance(config, dict) and config.keys() == {"vocab_size"}


def plant_in_hub_cache(hf_home: Path, vocab_size: int) -> None:
    """Writes the tokenizer into the Hugging Face cache below HF_HOME, under HUB_NAME. Some clients take no folder, but
    read this cache when offline.
    """
    model = hf_home / "hub" / f"models--{HUB_NAME.replace('/', '--')}"
    write_tokenizer(model / "snapshots" / _REVISION, vocab_size)
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / "main").write_text(_REVISION)


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """Returns the content of tokenizer.json. Text that spells a token as a number, such as <312>, becomes this one
    token; each other character becomes one token, or one token for each of its UTF-8 bytes.
    """
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": END_OF_TEXT,
                "content": piece(END_OF_TEXT),
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": SPELLED_OUT},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": True,
            "vocab": {piece(token): token for token in range(vocab_size)},
            "merges": [],
        },
    }


def _config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": piece(END_OF_TEXT),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**9,
    }


FILE = "tokenizer.json"


class CheckpointTokenizer:
    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Reads the tokenizer of a checkpoint's folder. Raises LaunchError if it cannot be read."""
        try:
            from tokenizers import Tokenizer  # noqa: PLC0415
        except ModuleNotFoundError:
            raise LaunchError(f"{folder / FILE} is read by tokenizers: pip install tokenizers jinja2") from None
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / FILE))
            config = folder / "tokenizer_config.json"
            self._config: dict[str, Any] = json.loads(config.read_text()) if config.is_file() else {}
            template = folder / "chat_template.jinja"
            self._template = template.read_text() if template.is_file() else self._config.get("chat_template")
        except Exception as wrong:  # noqa: BLE001  the library has no type of its own
            raise LaunchError(f"{folder / FILE} cannot be read: {wrong}") from None
        self.vocab_size = vocab_size
        """Vocabulary size of the model, which may be larger than the tokenizer's."""

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def detokenizer(self) -> Detokenizer:
        """Returns a new detokenizer, for one answer."""
        return Detokenizer(self.decode)

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Returns the tokens of a conversation. Raises RefusedError if the checkpoint has no chat template, or the
        template does not accept the messages.
        """
        if not isinstance(self._template, str):
            raise RefusedError("the checkpoint has no chat template: send a completion")
        try:
            from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415
        except ModuleNotFoundError:
            raise RefusedError("the chat template needs jinja2 on the server") from None
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        said = [{"role": role, "content": content} for role, content in messages]
        named = {name: _text(self._config.get(name)) for name in ("bos_token", "eos_token")}
        text = environment.from_string(self._template).render(messages=said, add_generation_prompt=True, **named)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _refuse(message: str) -> None:
    raise RefusedError(f"the chat template refuses the messages: {message}")


def _text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


class StopTexts:
    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        """Text that may be the beginning of a stop text."""

    def add(self, text: str) -> tuple[str, str | None]:
        """Adds new text of an answer. Returns the text that can be sent now, and the stop text that the answer has
        reached (None: it has reached none). Text that may be the beginning of a stop text is held back until later
        calls.
        """
        if not self._stops:
            return text, None
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda place: (place[0], -len(place[1])))
            self._held = ""
            return text[:at], stop
        begin = next(at for at in range(len(text) + 1) if any(stop.startswith(text[at:]) for stop in self._stops))
        self._held = text[begin:]
        return text[:begin], None

    def rest(self) -> str:
        """Returns text that was held back because a stop text might have begun with it. Called at the answer's end."""
        held, self._held = self._held, ""
        return held
