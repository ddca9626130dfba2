"""A workload as a Mooncake trace, which most load generators replay. MooncakeTrace reads it back."""

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pdsim.core.sequence import Spans
from pdsim.workload.request_spec import RequestSpec


def write_mooncake(
    path: Path, requests: Iterable[RequestSpec], sent_ns: Mapping[int, int], *, block_tokens: int
) -> None:
    """JSON lines of mooncake_rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in mooncake_rows(requests, sent_ns, block_tokens=block_tokens):
            file.write(json.dumps(row) + "\n")


def mooncake_rows(
    requests: Iterable[RequestSpec], sent_ns: Mapping[int, int], *, block_tokens: int
) -> Iterator[dict[str, Any]]:
    """A row for each request that was sent, in the order of sending.

    An id stands for its block and all before it, so prompts share what they share in whole blocks; a last block that is
    not whole has an id of its own. Later turns have session_id and delay (ms). What a turn's prompt repeats of an
    answer is not known as such to a reader.
    """
    ids = _Ids(block_tokens)
    specs = {spec.request_id: spec for spec in requests if spec.request_id in sent_ns}
    continued = {spec.after for spec in specs.values()}
    for request_id in sorted(specs, key=lambda one: (sent_ns[one], one)):
        spec = specs[request_id]
        row: dict[str, Any] = {"timestamp": _ms(sent_ns[request_id])}
        if spec.after is not None or request_id in continued:
            row["session_id"] = f"session-{_first_turn(spec, specs)}"
        if spec.after is not None:
            row["delay"] = _ms(spec.think_ns)
        yield {
            **row,
            "input_length": len(spec.prompt),
            "output_length": len(spec.output),
            "hash_ids": ids.of(spec.prompt),
        }


class _Ids:
    def __init__(self, block_tokens: int) -> None:
        self._size = block_tokens
        self._known: dict[tuple[int, Hashable], int] = {}
        self._next = 0

    def of(self, prompt: Spans) -> list[int]:
        found: list[int] = []
        for start in range(0, len(prompt) - self._size + 1, self._size):
            key = (found[-1] if found else -1, prompt.page_key(start, self._size))
            if key not in self._known:
                self._known[key] = self._fresh()
            found.append(self._known[key])
        if len(prompt) % self._size:
            found.append(self._fresh())
        return found

    def _fresh(self) -> int:
        self._next += 1
        return self._next - 1


def _first_turn(spec: RequestSpec, specs: Mapping[int, RequestSpec]) -> int:
    while spec.after is not None:
        spec = specs[spec.after]
    return spec.request_id


def _ms(time_ns: int) -> float:
    """A whole number where it is one, as most readers expect; else exact to the nanosecond."""
    return time_ns // 10**6 if time_ns % 10**6 == 0 else time_ns / 1e6
