"""A request as its workload defines it, including its output length, which policies do not see."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from random import Random
from typing import NamedTuple, Protocol

from pdsim.core.encode.media_item import MediaItem, Modality
from pdsim.core.sequence import Spans


class RequestSpec(NamedTuple):
    request_id: int
    """Number of the request, from 0 in the order of the workload."""
    prompt: Spans
    """Tokens of the prompt, as spans of token streams."""
    output: Spans
    """Output of the model. Executors know its length; policies do not."""
    max_output_tokens: int
    """Maximum number of output tokens that the client requests. Policies may see this number."""
    arrival_ns: int = 0
    """Arrival time in ns in the trace. Open-loop clients with arrivals of their own, and closed loops, ignore it."""
    after: tuple[int, ...] = ()
    """Ids of requests that must end before this request is sent. In most cases this is the previous request of the same
    conversation.
    """
    think_ns: int = 0
    """Pause in ns before the client sends the request. The pause begins when all requests in `after` have ended. If
    `after` is empty, the pause begins with the session in a closed loop, and an open loop makes no pause.
    """
    request_class: str = ""
    """Class of the request in the trace, for SLOs per class. Policies do not see it. Empty: no class."""
    session: int = -1
    """Number of the recorded session. A closed loop counts all its requests as one session, even if none follows
    another. -1: no session is recorded."""
    agent: int = 0
    """Number of the session's agent that sends the request. 0: the session's own agent. Each sub-agent has another
    number."""
    primes: bool = False
    """True: the client sends this request at the start, for example to fill caches. Requests without this mark are
    sent after all marked requests have ended. Metrics leave marked requests out.
    """
    media: tuple[MediaItem, ...] = ()
    """Images and audio clips of the prompt, in the prompt's order."""

    def num_media_tokens(self, modality: Modality) -> int:
        """Number of prompt tokens that stand for images or for audio clips."""
        return sum([item.num_tokens for item in self.media if item.modality == modality])


def alone(number: int, num_prompt_tokens: int, num_output_tokens: int) -> RequestSpec:
    """Makes the request with id `number`, which shares no tokens with other requests of its workload."""
    prompt, output = Spans.of(2 * number, num_prompt_tokens), Spans.of(2 * number + 1, num_output_tokens)
    return RequestSpec(number, prompt, output, num_output_tokens)


def conversation(
    history: Spans, lengths: Iterable[tuple[int, int]], streams: Iterator[int]
) -> Iterator[tuple[Spans, Spans]]:
    """Yields a pair for each turn: its prompt and its output.

    Each prompt is the conversation so far, then new input. history: tokens before the first turn. lengths: for each
    turn, its numbers of new input tokens and of output tokens. streams: yields numbers of unused token streams.
    """
    for num_inputs, num_outputs in lengths:
        prompt = history.then(Spans.of(next(streams), num_inputs))
        output = Spans.of(next(streams), num_outputs)
        yield prompt, output
        history = prompt.then(output)


def classes_of(requests: Iterable[RequestSpec]) -> dict[int, str]:
    """Returns the class of each request that has one, by request id."""
    return {spec.request_id: spec.request_class for spec in requests if spec.request_class}


class Workload(Protocol):
    """A dataclass that yields the requests of a scenario. The scenario names the class and gives its settings."""

    def requests(self, rng: "Streams") -> Sequence[RequestSpec]: ...


class Streams:
    """Reproducible random generators, one for each purpose. A further draw from one generator does not change the
    numbers of other generators.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def named(self, name: str) -> Random:
        """Returns the generator for the purpose `name`. Its seed is a text of the streams' seed and this name, so the
        generator is equal in every process.
        """
        return Random(f"{self._seed}/{name}")


def fresh_streams(start: int = 0) -> Iterator[int]:
    """Yields start, start + 1, ... as the numbers of new token streams. Prompts share tokens only if they have the same
    stream.
    """
    return count(start)
