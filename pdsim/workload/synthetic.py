"""Generated workloads, by the rules of common benchmark clients."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from random import Random

from pdsim.core.encode.media_item import MediaItem, Modality
from pdsim.core.sequence import Spans
from pdsim.dataclass import dataclass
from pdsim.inputs import InputError
from pdsim.workload.lengths import Lengths, positive
from pdsim.workload.request_spec import RequestSpec, Streams, conversation, fresh_streams


@dataclass(frozen=True, kw_only=True)
class RandomLengths:
    """Prompts of random lengths that share no prefix, except for equal images and audio clips at their beginnings."""

    num_requests: int
    """Number of requests."""
    input_tokens: Lengths
    """Distribution of prompt lengths, without images and audio clips."""
    output_tokens: Lengths
    """Distribution of output lengths."""
    images: Lengths | None = None
    """Distribution of the number of images of a prompt, which come before its text. None: prompts have no images."""
    image_tokens: Lengths | None = None
    """Distribution of the number of tokens of an image. Needed with images."""
    distinct_images: int | None = None
    """Number of different images, from which each prompt's images are drawn. None: all images are different."""
    image_share: float = 1.0
    """Share of the requests that have images. These requests are drawn at random."""
    audio_clips: Lengths | None = None
    """Distribution of the number of audio clips of a prompt. The clips come after the prompt's images. None: prompts
    have no audio clips.
    """
    audio_tokens: Lengths | None = None
    """Distribution of the number of tokens of an audio clip. Needed with audio_clips. A second of audio has 25 tokens
    for Qwen2-Audio, and 13 for Qwen3-Omni."""
    distinct_audio_clips: int | None = None
    """Number of different audio clips, from which each prompt's clips are drawn. None: all clips are different."""
    audio_share: float = 1.0
    """Share of the requests that have audio clips. These requests are drawn at random."""
    classes: Mapping[str, float] | None = None
    """Shares of request classes, such as {chat: 0.7, batch: 0.3}. Each request's class is drawn at random. None:
    requests have no class."""

    def __post_init__(self) -> None:
        positive(self, num_requests=self.num_requests, distinct_images=self.distinct_images)
        positive(self, distinct_audio_clips=self.distinct_audio_clips)
        if (self.images is None) != (self.image_tokens is None):
            raise ValueError("RandomLengths needs images and image_tokens together")
        if (self.audio_clips is None) != (self.audio_tokens is None):
            raise ValueError("RandomLengths needs audio_clips and audio_tokens together")
        for name, share in (("image_share", self.image_share), ("audio_share", self.audio_share)):
            if not 0 <= share <= 1:
                raise ValueError(f"RandomLengths needs {name} in [0, 1], found {share:g}")
        if self.classes is not None and (min(self.classes.values(), default=0) < 0 or not sum(self.classes.values())):
            raise ValueError(f"classes are shares, none below 0 and at least one above 0, found {dict(self.classes)}")

    def requests(self, rng: Streams) -> Sequence[RequestSpec]:
        inputs = self.input_tokens.sampler(rng.named("input lengths"))
        outputs = self.output_tokens.sampler(rng.named("output lengths"))
        specs: list[RequestSpec] = []
        for i in range(self.num_requests):
            num_output_tokens = outputs()
            prompt, output = Spans.of(2 * i, inputs()), Spans.of(2 * i + 1, num_output_tokens)
            specs.append(RequestSpec(i, prompt, output, num_output_tokens))
        first_stream = 2 * self.num_requests
        for draw in self._media(rng):
            specs = [draw.added(spec, first_stream) for spec in specs]
            first_stream += max(draw.tokens, default=-1) + 1
        if not self.classes:
            return specs
        drawn = rng.named("classes").choices(list(self.classes), list(self.classes.values()), k=len(specs))
        return [spec._replace(request_class=name) for spec, name in zip(specs, drawn, strict=True)]

    def _media(self, rng: Streams) -> Iterator["MediaDraw"]:
        """Yields an object that draws the images of prompts, then an object that draws their audio clips. Leaves out a
        kind that prompts do not have.
        """
        if self.images is not None and self.image_tokens is not None:
            yield MediaDraw(rng, "image", self.images, self.image_tokens, self.distinct_images, self.image_share)
        if self.audio_clips is not None and self.audio_tokens is not None:
            clips = self.audio_clips, self.audio_tokens, self.distinct_audio_clips
            yield MediaDraw(rng, "audio", *clips, self.audio_share)


_MOST_ITEMS = 10_000
"""Largest number of images, and of audio clips, of a request. With more, a typing error would fill the memory."""


class MediaDraw:
    """Draws the images, or the audio clips, of prompts."""

    def __init__(
        self, rng: Streams, modality: Modality, counts: Lengths, tokens: Lengths, num_distinct: int | None, share: float
    ) -> None:
        """Items are images or audio clips, as modality says. counts: distribution of a prompt's number of items.
        tokens: distribution of an item's number of tokens. num_distinct: number of different items; None: all are
        different. share: share of requests with items.
        """
        self._modality = modality
        self._share = share
        self._has_items = rng.named(f"{modality} requests").random
        self._count = counts.sampler(rng.named({"image": "images", "audio": "audio clips"}[modality]))
        self._draw_tokens = tokens.sampler(rng.named(f"{modality} tokens"))
        self._pick = None if num_distinct is None else partial(rng.named(f"{modality} ids").randrange, num_distinct)
        self.tokens: dict[int, int] = {}
        """Number of tokens of each different item, by its number."""

    def added(self, spec: RequestSpec, first_stream: int) -> RequestSpec:
        """Returns the request with newly drawn items. Their tokens come after the media that the prompt already has,
        and before its text. first_stream: number of the token stream of item 0; item k has stream first_stream + k.
        """
        if self._has_items() >= self._share:
            return spec
        start = sum([item.num_tokens for item in spec.media])
        items: list[MediaItem] = []
        if (count := self._count()) > _MOST_ITEMS:
            what = f"{self._modality} clips" if self._modality == "audio" else "images"
            raise InputError(f"request {spec.request_id} has {count:,} {what}; at most {_MOST_ITEMS:,}")
        for _ in range(count):
            media_id = len(self.tokens) if self._pick is None else self._pick()
            if media_id not in self.tokens:
                self.tokens[media_id] = self._draw_tokens()
            items.append(MediaItem(start, self.tokens[media_id], media_id, self._modality))
            start += items[-1].num_tokens
        spans = [(first_stream + item.media_id, 0, item.num_tokens) for item in items]
        before, text = spec.prompt.spans[: len(spec.media)], spec.prompt.spans[len(spec.media) :]
        return spec._replace(prompt=Spans([*before, *spans, *text]), media=(*spec.media, *items))


@dataclass(frozen=True, kw_only=True)
class PrefixPool:
    """AIPerf's synthetic load: each prompt is a prefix from a pool, then a text of its own. Prefixes are drawn with
    equal probability.
    """

    num_requests: int
    """Number of requests."""
    num_prefixes: int
    """Number of prefixes in the pool."""
    prefix_tokens: int
    """Length of each prefix in tokens."""
    input_tokens: Lengths
    """Distribution of prompt lengths without the prefix."""
    output_tokens: Lengths
    """Distribution of output lengths."""

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
    """SGLang's generated-shared-prefix: groups of prompts. The prompts of a group share a system prompt."""

    num_groups: int = 64
    """Number of groups of prompts."""
    prompts_per_group: int = 16
    """Number of conversations in each group."""
    system_prompt_tokens: int = 2048
    """Maximum length in tokens of a system prompt. The length is drawn for each group."""
    question_tokens: int = 128
    """Maximum length in tokens of a question. The length is drawn for each prompt."""
    output_tokens: int = 256
    """Maximum length in tokens of an output. The length is drawn for each prompt."""
    range_ratio: float = 1.0
    """Minimum of each drawn length, as a share of the maximum of the length. 1: all lengths are equal."""
    num_turns: int = 1
    """Number of turns per conversation. Each prompt is the conversation so far, then a new question."""
    ordered: bool = False
    """True: prompts are sent group by group. False: all prompts are shuffled."""

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
            conversations += [
                list(conversation(system, self._turn_lengths(lengths), streams)) for _ in range(self.prompts_per_group)
            ]
        if not self.ordered:
            rng.named("order").shuffle(conversations)
        specs: list[RequestSpec] = []
        for turns in conversations:
            for turn, (prompt, output) in enumerate(turns):
                after = (len(specs) - 1,) if turn else ()
                specs.append(RequestSpec(len(specs), prompt, output, len(output), after=after))
        return specs

    def _turn_lengths(self, lengths: Random) -> Iterator[tuple[int, int]]:
        for _ in range(self.num_turns):
            yield self._draw(self.question_tokens, lengths), self._draw(self.output_tokens, lengths)

    def _draw(self, tokens: int, lengths: Random) -> int:
        return lengths.randint(max(int(tokens * self.range_ratio), 1), tokens) if tokens else 0


@dataclass(frozen=True, kw_only=True)
class Sessions:
    """Conversations. The prompt of each turn is the conversation so far, then new input. A turn is sent after a
    pause.
    """

    num_sessions: int
    """Number of conversations."""
    num_turns: Lengths
    """Distribution of the number of turns per conversation."""
    system_prompt_tokens: int = 0
    """Length in tokens of a system prompt that all conversations share."""
    input_tokens: Lengths
    """Distribution of the length of each turn's new input."""
    output_tokens: Lengths
    """Distribution of output lengths."""
    think_ns: int = 0
    """Pause between the end of an answer and sending the next turn."""

    def __post_init__(self) -> None:
        positive(self, num_sessions=self.num_sessions)

    def requests(self, rng: Streams) -> Sequence[RequestSpec]:
        turns = self.num_turns.sampler(rng.named("turns"))
        inputs = self.input_tokens.sampler(rng.named("input lengths"))
        outputs = self.output_tokens.sampler(rng.named("output lengths"))
        streams = fresh_streams(1)
        specs: list[RequestSpec] = []
        system = Spans.of(0, self.system_prompt_tokens)
        for _ in range(self.num_sessions):
            lengths = ((inputs(), outputs()) for _ in range(turns()))
            for turn, (prompt, output) in enumerate(conversation(system, lengths, streams)):
                after = (len(specs) - 1,) if turn else ()
                think_ns = self.think_ns if turn else 0
                specs.append(RequestSpec(len(specs), prompt, output, len(output), after=after, think_ns=think_ns))
        return specs
