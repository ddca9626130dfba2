"""Writes recorded calls (Entry) as lines of text, and reads them."""

import json
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from json.encoder import encode_basestring_ascii

from pdsim.core.journal.calls import Entry
from pdsim.core.journal.message_json import from_json
from pdsim.core.journal.message_text import sequence_text, to_text


def digest(entries: Iterable[Entry]) -> str:
    """Returns the digest of a journal. Equal journals have equal digests in every process, on every platform, and with
    any PYTHONHASHSEED.
    """
    h = blake2b(digest_size=16)
    for entry in entries:
        h.update(to_line(entry).encode())
    return h.hexdigest()


def to_line(entry: Entry) -> str:
    """Returns the entry as one line of a journal: a JSON array."""
    instance_id, call, args, returned = entry
    name = encode_basestring_ascii(instance_id)
    return f'[{name},"{call}",{sequence_text(args)},{to_text(returned)}]\n'


def from_lines(lines: Iterable[str]) -> Iterator[Entry]:
    for line in lines:
        instance_id, call, args, returned = from_json(json.loads(line))
        yield Entry(instance_id, call, args, returned)
