"""A workload as a Mooncake trace, which most load generators replay. The readers of traces read it back."""

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdsim.core.sequence import Spans
from pdsim.workload.client import sessions_of
from pdsim.workload.request_spec import RequestSpec


class NotASessionError(ValueError):
    """Requests that follow each other in another way than turn by turn."""


def write_mooncake(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def mooncake_rows(
    requests: Iterable[RequestSpec], sent_ns: Mapping[int, int], *, block_tokens: int
) -> Iterator[dict[str, Any]]:
    """A row for each request that was sent, in the order of sending.

    An id stands for its block and all before it, so prompts share what they share in whole blocks; a last block that is
    not whole has an id of its own. Later turns have session_id and delay (ms). What a turn's prompt repeats of an
    answer is not known as such to a reader. Raises NotASessionError.
    """
    specs = _in_order_of_sending(requests, sent_ns)
    _check_turns(specs)
    ids = _Ids(block_tokens)
    sessions = [session for session in sessions_of(specs) if len(session) > 1]
    names = {turn.request_id: f"session-{session[0].request_id}" for session in sessions for turn in session}

    def row(spec: RequestSpec) -> dict[str, Any]:
        session = {"session_id": names[spec.request_id]} if spec.request_id in names else {}
        delay = {"delay": _ms(spec.think_ns)} if spec.after else {}
        return {"timestamp": _ms(sent_ns[spec.request_id]), **session, **delay, **ids.lengths(spec)}

    return map(row, specs)


def agentic_rows(
    requests: Iterable[RequestSpec], sent_ns: Mapping[int, int], *, block_tokens: int
) -> Iterator[dict[str, Any]]:
    """The same with request_id, and with wait_for and delay (ms) of those that follow others, however they do."""
    ids = _Ids(block_tokens)
    for spec in _in_order_of_sending(requests, sent_ns):
        waits = {"wait_for": list(map(str, spec.after)), "delay": _ms(spec.think_ns)} if spec.after else {}
        timestamp = _ms(sent_ns[spec.request_id])
        yield {"request_id": str(spec.request_id), "timestamp": timestamp, **waits, **ids.lengths(spec)}


class _Ids:
    def __init__(self, block_tokens: int) -> None:
        self._size = block_tokens
        self._known: dict[tuple[int, Hashable], int] = {}
        self._next = 0

    def lengths(self, spec: RequestSpec) -> dict[str, Any]:
        return {
            "input_length": len(spec.prompt),
            "output_length": len(spec.output),
            "hash_ids": self._of(spec.prompt),
            **({"class": spec.request_class} if spec.request_class else {}),
        }

    def _of(self, prompt: Spans) -> list[int]:
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


def _in_order_of_sending(requests: Iterable[RequestSpec], sent_ns: Mapping[int, int]) -> Sequence[RequestSpec]:
    sent = [spec for spec in requests if spec.request_id in sent_ns]
    return sorted(sent, key=lambda spec: (sent_ns[spec.request_id], spec.request_id))


def _check_turns(specs: Sequence[RequestSpec]) -> None:
    num_followers = Counter(earlier for spec in specs for earlier in spec.after)
    for spec in specs:
        if len(spec.after) > 1 or num_followers[spec.request_id] > 1:
            how = "follows several" if len(spec.after) > 1 else "is followed by several"
            raise NotASessionError(f"request {spec.request_id} {how}, and rows of a session follow one by one")


def _ms(time_ns: int) -> float:
    """A whole number where it is one, as most readers expect; else exact to the nanosecond."""
    return time_ns // 10**6 if time_ns % 10**6 == 0 else time_ns / 1e6
