"""Translation of an instance's decisions to its ranks' work, and back: holds the tokens of one instance's requests.

    step -> begin -> batch -> ModelRunner of every rank -> tokens -> finish -> result and new tokens

Called from the one thread that calls the instance. Page tables are read when a step is begun; its batch stays true
whatever the instance does meanwhile.
"""

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pdreal.model.draw import Draw, Logprobs
from pdreal.requests import Sampling
from pdreal.tasks import DecodeBatch, ForgetKv, PrefillBatch, PrefillInput, RestoreKv, SaveKv
from pdsim.core import messages as m
from pdsim.core.messages import DecodeStep, PrefillChunk, PrefillStep, Step, StepResult
from pdsim.core.sequence import TokenIds


class HasPageTables(Protocol):
    """An instance."""

    def page_table(self, request_id: int) -> Sequence[int]: ...


class NewToken(NamedTuple):
    """A token to be streamed."""

    request_id: int
    token: int
    logprobs: Logprobs | None = None


class Outcome(NamedTuple):
    result: StepResult
    new_tokens: list[NewToken]


@dataclass
class _Sequence:
    sampling: Sampling
    num_prompt_tokens: int
    tokens: "array[int]"
    """Prompt and outputs."""
    page_table: "array[int]" = field(default_factory=lambda: array("i"))
    """Pages while it runs. An instance only lengthens it then."""
    is_saved: bool = False
    num_cached_tokens: int = 0
    """Tokens of the prompt that were not computed for it."""
    is_begun: bool = False
    first_logprobs: Logprobs | None = None
    """Log probabilities of a first token that another instance made."""

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_kv_tokens(self) -> int:
        """The last output has no KV yet: the next step computes it."""
        return len(self.tokens) - 1

    @property
    def output(self) -> TokenIds:
        return TokenIds(data=self.tokens[self.num_prompt_tokens :].tobytes())


class Executor:
    def __init__(self, instance: HasPageTables, end_tokens: Collection[int] = ()) -> None:
        self._instance = instance
        self._end_tokens = frozenset(end_tokens)
        self._sequences: dict[int, _Sequence] = {}
        self._running: list[int] = []
        """Requests of the decode batch, in its order."""

    # What comes and goes.

    def add(self, request_id: int, prompt: TokenIds, sampling: Sampling) -> None:
        """Take in a request with NewRequest, before the instance sees it."""
        tokens = array("i", bytes(prompt))
        self._sequences[request_id] = _Sequence(sampling, len(tokens), tokens)

    def add_first_token(
        self, request_id: int, token: int, num_cached_tokens: int, logprobs: Logprobs | None = None
    ) -> None:
        """Take the token that comes to a decode instance with KvArrived."""
        if sequence := self._sequences.get(request_id):
            sequence.tokens.append(token)
            sequence.first_logprobs = logprobs
            sequence.num_cached_tokens = num_cached_tokens

    @property
    def num_requests(self) -> int:
        return len(self._sequences)

    def others_than(self, request_ids: Collection[int]) -> list[int]:
        """Requests that were given up without an outcome."""
        return [request_id for request_id in self._sequences if request_id not in request_ids]

    def num_prompt_tokens(self, request_id: int) -> int:
        return self._sequences[request_id].num_prompt_tokens

    def num_cached_tokens(self, request_id: int) -> int:
        """Tokens of the prompt in the prefix cache of the instance that computed it."""
        return self._sequences[request_id].num_cached_tokens

    def first_logprobs(self, request_id: int) -> Logprobs | None:
        return self._sequences[request_id].first_logprobs

    def last_token(self, request_id: int) -> int:
        return self._sequences[request_id].tokens[-1]

    def save(self, command: m.SaveKv) -> SaveKv:
        """All ranks do it before the next command is carried out."""
        sequence = self._sequences[command.request_id]
        sequence.is_saved = True
        return SaveKv(command.request_id, sequence.num_kv_tokens, array("i", command.pages))

    def load(self, command: m.LoadKv) -> RestoreKv:
        """All ranks do it before the next command is carried out."""
        self._sequences[command.request_id].is_saved = False
        return RestoreKv(command.request_id, array("i", command.pages))

    def output(self, request_id: int) -> list[int]:
        """All tokens made so far."""
        sequence = self._sequences[request_id]
        return sequence.tokens[sequence.num_prompt_tokens :].tolist()

    def forget(self, request_id: int) -> ForgetKv | None:
        """Drop a request that has an outcome, or whose Cancel the instance has seen; again does no harm.

        Returns what all ranks do then, if anything.
        """
        sequence = self._sequences.pop(request_id, None)
        return ForgetKv(request_id) if sequence is not None and sequence.is_saved else None

    # Steps.

    def begin(self, step: Step) -> PrefillBatch | DecodeBatch:
        if isinstance(step, PrefillStep):
            return PrefillBatch(tuple(map(self._prefill_input, step.chunks)))
        return self._begin_decode(step)

    def finish(self, step: Step, tokens: Sequence[int], logprobs: Sequence[Logprobs | None] = ()) -> Outcome:
        """tokens: what the ranks made of the step's batch, and how likely they were if anybody asked."""
        likely = logprobs or [None] * len(tokens)
        if isinstance(step, PrefillStep):
            made = zip(step.chunks, tokens, likely, strict=True)
            return self._take([NewToken(chunk.request_id, token, told) for chunk, token, told in made if chunk.is_last])
        outcome = self._take([NewToken(*made) for made in zip(self._running, tokens, likely, strict=True)])
        ended = {request_id for request_id, _ in outcome.result.ended}
        self._running = [request_id for request_id in self._running if request_id not in ended]
        return outcome

    def _prefill_input(self, chunk: PrefillChunk) -> PrefillInput:
        sequence = self._sequences[chunk.request_id]
        tokens = sequence.tokens
        start, stop = chunk.num_context_tokens, chunk.num_context_tokens + chunk.num_tokens
        if not sequence.is_begun:  # it begins again if it is retracted, behind what it had computed
            sequence.is_begun, sequence.num_cached_tokens = True, start
        table = array("i", self._instance.page_table(chunk.request_id))
        draw = _draw(sequence, stop) if chunk.is_last else None
        return PrefillInput(chunk.request_id, tokens[start:stop], start, table, draw)

    def _begin_decode(self, step: DecodeStep) -> DecodeBatch:
        left = set(step.left)
        self._running = [request_id for request_id in self._running if request_id not in left]
        for request_id in step.joined:
            self._sequences[request_id].page_table = array("i")
            self._running.append(request_id)
        sequences = [self._sequences[request_id] for request_id in self._running]
        for request_id, sequence in zip(self._running, sequences, strict=True):
            table = self._instance.page_table(request_id)
            if len(table) > len(sequence.page_table):
                sequence.page_table.extend(table[len(sequence.page_table) :])
        return DecodeBatch(
            tuple(sequence.tokens[-1] for sequence in sequences),
            tuple(sequence.num_kv_tokens for sequence in sequences),
            tuple(sequence.page_table for sequence in sequences),
            self._draws(sequences),
        )

    def _draws(self, sequences: Sequence[_Sequence]) -> tuple[Draw | None, ...]:
        if all(sequence.sampling.is_plain for sequence in sequences):
            return ()
        return tuple(_draw(sequence, len(sequence.tokens)) for sequence in sequences)

    def _take(self, made: list[NewToken]) -> Outcome:
        """Append tokens; those of requests that were forgotten meanwhile are dropped."""
        new_tokens, ended = [], []
        for new in made:
            if (sequence := self._sequences.get(new.request_id)) is None:
                continue
            sequence.tokens.append(new.token)
            new_tokens.append(new)
            if self._ends(sequence):
                ended.append((new.request_id, sequence.output))
        return Outcome(StepResult(1, tuple(ended)), new_tokens)

    def _ends(self, sequence: _Sequence) -> bool:
        sampling, last = sequence.sampling, sequence.tokens[-1]
        limit = sampling.max_tokens
        if sampling.stop_after_tokens is not None:
            limit = min(limit, sampling.stop_after_tokens)
        if sequence.num_output_tokens >= limit or last in sampling.stop_token_ids:
            return True
        return last in self._end_tokens and not sampling.ignore_eos


def _draw(sequence: _Sequence, position: int) -> Draw | None:
    """The same for a token whoever makes it, and however often its sequence was retracted."""
    sampling = sequence.sampling
    if sampling.is_plain:
        return None
    shape = sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p
    return Draw(*shape, sampling.seed, position, sampling.num_logprobs)
