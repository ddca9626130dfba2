"""A message on the wire: the core's own in the journal's codec, or a notice; beside it what the core must not see."""

import json
from typing import Any, NamedTuple

from pdreal.notices import KINDS
from pdsim.core.journal import from_json, to_text


class Envelope(NamedTuple):
    to: str
    """A state machine of the core, or a process."""
    message: Any
    extra: Any = None
    """Plain JSON: with NewRequest the sampling, with FirstToken and KvArrived the token and the cached tokens."""


def encode(envelope: Envelope) -> bytes:
    to, message, extra = envelope
    name = type(message).__name__
    content = json.dumps({name: message}) if name in KINDS else to_text(message)
    return f"[{json.dumps(to)},{content},{json.dumps(extra)}]".encode()


def decode(data: bytes) -> Envelope:
    to, content, extra = json.loads(data)
    ((name, fields),) = content.items()
    return Envelope(to, KINDS[name](*fields) if name in KINDS else from_json(content), extra)
