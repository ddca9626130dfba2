"""A request as the workload defines it, including its output length, which policies do not see."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from random import Random
from typing import NamedTuple, Protocol

from pdsim.core.sequence import Spans


class RequestSpec(NamedTuple):
    request_id: int
    prompt: Spans
    output: Spans
    """The model's answer. Executors know its length; policies do not."""
    max_output_tokens: int
    """Limit of output tokens that the client sends. Policies may see it."""
    arrival_ns: int = 0
    """Arrival time in the trace. An open-loop client may replace it; a closed loop ignores it."""
    after: tuple[int, ...] = ()
    """Requests that must end before this request is sent, in most cases the turn before."""
    think_ns: int = 0
    """Pause after the last of these requests has ended."""
    request_class: str = ""
    """Class in a trace, for limits of an SLO. Policies do not see it."""
    session: int = -1
    """Recorded session. A closed loop counts all requests of a session as one, even requests that follow no other. -1:
    none is recorded.
    """
    primes: bool = False
    """True: a closed loop sends this request first, and all others wait for its end. Metrics leave it out."""


def alone(number: int, num_prompt_tokens: int, num_output_tokens: int, arrival_ns: int = 0) -> RequestSpec:
    """A request whose tokens are shared with no other request of its workload."""
    prompt, output = Spans.of(2 * number, num_prompt_tokens), Spans.of(2 * number + 1, num_output_tokens)
    return RequestSpec(number, prompt, output, num_output_tokens, arrival_ns)


def conversation(
    history: Spans, lengths: Iterable[tuple[int, int]], streams: Iterator[int]
) -> Iterator[tuple[Spans, Spans]]:
    """Prompt and output of each turn. A prompt is the conversation so far and new input.

    lengths: tokens of new input and of output, for each turn.
    """
    for num_inputs, num_outputs in lengths:
        prompt = history.then(Spans.of(next(streams), num_inputs))
        output = Spans.of(next(streams), num_outputs)
        yield prompt, output
        history = prompt.then(output)


def classes_of(requests: Iterable[RequestSpec]) -> dict[int, str]:
    """The class of each request that has one, by request id."""
    return {spec.request_id: spec.request_class for spec in requests if spec.request_class}


class Workload(Protocol):
    """A dataclass that a scenario names and that yields the requests."""

    def requests(self, rng: "Streams") -> Sequence[RequestSpec]: ...


class Streams:
    """Reproducible random generators, one for each purpose, so that a new draw for one purpose does not change the
    others.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def named(self, name: str) -> Random:
        """Generator of this name. Its seed is a text, so that it is equal in every process, unlike hash()."""
        return Random(f"{self._seed}/{name}")


def fresh_streams(start: int = 0) -> Iterator[int]:
    """Endless numbers of token streams that no other request shares."""
    return count(start)
