"""The tokenizer of a checkpoint: tokenizer.json, and the chat template beside it."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pdreal.launch_error import LaunchError
from pdreal.serve.fields import RefusedError
from pdreal.serve.tokenizer import Detokenizer

FILE = "tokenizer.json"


class CheckpointTokenizer:
    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Raises LaunchError."""
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
        """Vocabulary of the model, which may be larger than the tokenizer's."""

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def detokenizer(self) -> Detokenizer:
        """A detokenizer of one answer."""
        return Detokenizer(self.decode)

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Raises RefusedError if there is no template, or it refuses them."""
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
