"""Text to token ids and back, without a library or a vocabulary file: a token a byte, and a name for any other.

Token 65 is `A`. A byte that is no printable ASCII is spelled `<0xC3>`, a token above 255 by its number, `<300>`, and
`<` itself `<0x3C>`. So no two token sequences read the same, whatever a model says: encode(decode(tokens)) == tokens.
The other way round, text of printable ASCII without `<` comes back as it was.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

NUM_BYTES = 256
END_OF_TEXT = 0
SPELLED_OUT = r"<(?:0x[0-9A-F]{2}|[1-9][0-9]{2,8})>"
"""What a token may look like that is not one character."""

_ITSELF = frozenset(b"\n" + bytes(range(0x20, 0x7F))) - frozenset(b"<")


def piece(token: int) -> str:
    """How a token is spelled, whatever stands beside it."""
    if token in _ITSELF:
        return chr(token)
    return f"<0x{token:02X}>" if token < NUM_BYTES else f"<{token}>"


class Tokenizer:
    """Of a model with vocab_size tokens, 256 at least."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < NUM_BYTES:
            raise ValueError(f"a vocabulary of {vocab_size} tokens cannot hold all {NUM_BYTES} bytes")
        self.vocab_size = vocab_size

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(map(piece, tokens))

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
        """A conversation of (role, content), as CHAT_TEMPLATE writes it down."""
        return self.encode("".join(f"{role}: {content}\n" for role, content in messages) + "assistant:")

    def _spelled_out(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Start, end and token of each name of a token in the text."""
        for match in re.finditer(SPELLED_OUT, text):
            token = int(match[0][1:-1], 16 if match[0].startswith("<0x") else 10)
            if token < self.vocab_size and piece(token) == match[0]:
                yield *match.span(), token


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
"""Tokenizer.chat in Jinja, for clients that count a conversation's tokens."""
