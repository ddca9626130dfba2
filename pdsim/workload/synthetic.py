"""Generated loads, by the rules of the clients that others measure with."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from pdsim.core.sequence import Spans
from pdsim.workload.lengths import Lengths, positive
from pdsim.workload.request_spec import RequestSpec, Streams, alone, fresh_streams


@dataclass(frozen=True, kw_only=True)
class RandomLengths:
    """Prompts that share nothing."""

    num_requests: int
    input_tokens: Lengths
    output_tokens: Lengths
    classes: Mapping[str, float] | None = None
    """Shares of classes, drawn; None: requests have none."""

    def __post_init__(self) -> None:
        positive(self, num_requests=self.num_requests)
        if self.classes is not None and (min(self.classes.values(), default=0) < 0 or not sum(self.classes.values())):
            raise ValueError(f"classes are shares, none below 0 and one above, found {dict(self.classes)}")

    def requests(self, rng: Streams) -> Sequence[RequestSpec]:
        inputs = self.input_tokens.sampler(rng.named("input lengths"))
        outputs = self.output_tokens.sampler(rng.named("output lengths"))
        specs: list[RequestSpec] = []
        for i in range(self.num_requests):
            num_output_tokens = outputs()
            specs.append(alone(i, inputs(), num_output_tokens))
        if not self.classes:
            return specs
        drawn = rng.named("classes").choices(list(self.classes), list(self.classes.values()), k=len(specs))
        return [spec._replace(request_class=name) for spec, name in zip(specs, drawn, strict=True)]


@dataclass(frozen=True, kw_only=True)
class PrefixPool:
    """AIPerf's synthetic load: each prompt is a prefix drawn uniformly from a pool, and a body of its own."""

    num_requests: int
    num_prefixes: int
    prefix_tokens: int
    input_tokens: Lengths
    """Length of the body; the prefix comes on top."""
    output_tokens: Lengths

    def __post_init__(self) -> None:
        positive(self, num_requests=self.num_requests, num_prefixes=self.num_prefixes, prefix_tokens=self.prefix_tokens)

    def requests(self, rng: Streams) -> Sequence[RequestSpec]:
        inputs = self.input_tokens.sampler(rng.named("input lengths"))
        outputs = self.output_tokens.sampler(rng.named("output lengths"))
        pick = rng.named("prefixes").randrange
        streams = fresh_streams(self.num_prefixes)
        specs: list[RequestSpec] = []
        for i in range(self.num_requests):
            prefix = (pick(self.num_prefixes), 0, self.prefix_tokens)
            prompt = Spans((prefix, (next(streams), 0, inputs())))
            num_output_tokens = outputs()
            specs.append(RequestSpec(i, prompt, Spans.of(next(streams), num_output_tokens), num_output_tokens))
        return specs


@dataclass(frozen=True, kw_only=True)
class SharedPrefixGroups:
    """SGLang's generated-shared-prefix: groups of prompts that share a system prompt.

    Each length is uniform in [max(int(length * range_ratio), 1), length]: the system prompt's once per group, question
    and output once per prompt. With several turns, each turn's prompt is the whole conversation so far and a question.
    """

    num_groups: int = 64
    prompts_per_group: int = 16
    system_prompt_tokens: int = 2048
    question_tokens: int = 128
    output_tokens: int = 256
    range_ratio: float = 1.0
    num_turns: int = 1
    ordered: bool = False
    """Otherwise the prompts are shuffled."""

    def __post_init__(self) -> None:
        positive(self, num_groups=self.num_groups, prompts_per_group=self.prompts_per_group, num_turns=self.num_turns)
        positive(self, question_tokens=self.question_tokens, output_tokens=self.output_tokens)
        if not 0 <= self.range_ratio <= 1:
            raise ValueError(f"SharedPrefixGroups needs range_ratio in [0, 1], found {self.range_ratio:g}")

    def requests(self, rng: Streams) -> Sequence[RequestSpec]:
        lengths = rng.named("lengths")
        streams = fresh_streams()
        conversations: list[list[tuple[Spans, Spans]]] = []
        for _ in range(self.num_groups):
            system = Spans.of(next(streams), self._draw(self.system_prompt_tokens, lengths))
            conversations += [self._turns(system, streams, lengths) for _ in range(self.prompts_per_group)]
        if not self.ordered:
            rng.named("order").shuffle(conversations)
        specs: list[RequestSpec] = []
        for turns in conversations:
            for turn, (prompt, output) in enumerate(turns):
                after = (len(specs) - 1,) if turn else ()
                specs.append(RequestSpec(len(specs), prompt, output, len(output), after=after))
        return specs

    def _turns(self, system: Spans, streams: Iterator[int], lengths: Random) -> list[tuple[Spans, Spans]]:
        history, turns = system, []
        for _ in range(self.num_turns):
            prompt = history.then(Spans.of(next(streams), self._draw(self.question_tokens, lengths)))
            output = Spans.of(next(streams), self._draw(self.output_tokens, lengths))
            turns.append((prompt, output))
            history = prompt.then(output)
        return turns

    def _draw(self, tokens: int, lengths: Random) -> int:
        return lengths.randint(max(int(tokens * self.range_ratio), 1), tokens) if tokens else 0


@dataclass(frozen=True, kw_only=True)
class Sessions:
    """Conversations: each turn's prompt is the whole conversation so far and new input, sent after a pause."""

    num_sessions: int
    num_turns: Lengths
    system_prompt_tokens: int = 0
    """Shared by all sessions."""
    input_tokens: Lengths
    output_tokens: Lengths
    think_ns: int = 0

    def __post_init__(self) -> None:
        positive(self, num_sessions=self.num_sessions)

    def requests(self, rng: Streams) -> Sequence[RequestSpec]:
        turns = self.num_turns.sampler(rng.named("turns"))
        inputs = self.input_tokens.sampler(rng.named("input lengths"))
        outputs = self.output_tokens.sampler(rng.named("output lengths"))
        streams = fresh_streams(1)
        specs: list[RequestSpec] = []
        for _ in range(self.num_sessions):
            history = Spans.of(0, self.system_prompt_tokens)
            for turn in range(turns()):
                prompt = history.then(Spans.of(next(streams), inputs()))
                output = Spans.of(next(streams), outputs())
                after = (len(specs) - 1,) if turn else ()
                think_ns = self.think_ns if turn else 0
                specs.append(RequestSpec(len(specs), prompt, output, len(output), after=after, think_ns=think_ns))
                history = prompt.then(output)
        return specs
