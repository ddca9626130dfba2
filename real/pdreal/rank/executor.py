"""Translates an instance's steps to its ranks' work, and the ranks' tokens to results of steps. Keeps the token ids of
the instance's requests.

step -> begin -> batch -> ModelRunner of every rank -> tokens -> finish -> result and new tokens

All calls come from the thread that calls the instance. Page tables are read when a step begins, so the step's batch
stays valid whatever the instance does meanwhile.
"""

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, Protocol

from pdreal.control.requests import NO_DRAFTS, Drafted, Draw, Logprobs, Sampling
from pdreal.control.tasks import (
    DecodeBatch,
    DraftRows,
    ForgetKv,
    PageTableChange,
    PrefillBatch,
    PrefillInput,
    RestoreKv,
    SaveKv,
    Seed,
)
from pdreal.memory.state_slots import StateSlots
from pdreal.rank.speculation import SequenceToVerify, Speculation
from pdsim.core import messages as m
from pdsim.core.memory.kv_cache import Lease
from pdsim.core.messages import DecodeStep, PrefillChunk, PrefillStep, PureStep, Result, StepResult, Verified
from pdsim.core.sequence import TokenIds


class HasPageTables(Protocol):
    """An instance that gives the lease of a request. The lease has the request's page table."""

    def lease(self, request_id: int) -> Lease: ...


class NewToken(NamedTuple):
    """A token that a step computed for a request. Prefill sends the token to decode, other instances stream the token
    to the client.
    """

    request_id: int
    token: int
    """Id of the token."""
    logprobs: Logprobs | None = None
    """Log probabilities of the token. None: the request asks for none."""


class Outcome(NamedTuple):
    result: Result
    """The result of the step, for the instance."""
    new_tokens: list[NewToken]
    """New tokens of the step, without those of requests that were dropped during the step."""


@dataclass(slots=True)
class _Sequence:
    request_id: int
    sampling: Sampling
    num_prompt_tokens: int
    tokens: "array[int]"
    """Ids of the tokens of the prompt and of the output so far."""
    most_tokens: int
    """Number of tokens, prompt and output together, at which the sequence ends at the latest."""
    ends: frozenset[int]
    """Token ids that end the sequence."""
    is_plain: bool
    """True if the likeliest tokens are chosen, and no log probabilities are requested."""
    num_pages: int = 0
    """Number of pages in the sequence's page table that earlier decode batches have told the ranks. While a sequence
    runs, its page table only grows.
    """
    is_saved: bool = False
    """True: the sequence is retracted, and its KV is in host memory."""
    state_slot: int = 0
    """Slot of the sequence's linear-attention state at its last grant, transfer, load or decode step. 0: none."""
    num_cached_tokens: int = 0
    """Number of prompt tokens whose KV came from the prefix cache of the instance that computed the prompt. 0 until the
    number is known.
    """
    is_begun: bool = False
    """True: this instance has begun to compute the prompt, so num_cached_tokens is known. A retraction keeps True."""
    first_logprobs: Logprobs | None = None
    """Log probabilities of the first token. None: this instance made the token, or the request asks for none."""

    @property
    def num_kv_tokens(self) -> int:
        """Number of tokens with KV, once the prompt is computed: all but the last output token, which gets its KV in
        the next step.
        """
        return len(self.tokens) - 1

    @property
    def to_verify(self) -> SequenceToVerify:
        """The sequence's data that speculative decoding needs before a step: how many output tokens the sequence
        has and may still get, and the reference output.
        """
        num_output_tokens = len(self.tokens) - self.num_prompt_tokens
        num_lacking = self.most_tokens - len(self.tokens)
        return SequenceToVerify(self.request_id, num_output_tokens, num_lacking, self.sampling.reference)

    @property
    def output(self) -> TokenIds:
        return TokenIds(data=self.tokens[self.num_prompt_tokens :].tobytes())


class _Rows:
    """Rows of the decode batch: a row is the batch's entry for one sequence. When a sequence leaves, the sequence of
    the last row moves to the free row.
    """

    def __init__(self) -> None:
        self.sequences: list[_Sequence] = []
        self.renewed: set[int] = set()
        """Rows of the batch that hold another sequence than the ranks know."""
        self._rows: dict[int, int] = {}
        """Row of each request in the decode batch, in the order in which requests joined."""

    @property
    def request_ids(self) -> list[int]:
        """Ids of the batch's requests in the order in which they joined, as in the instance's batch."""
        return list(self._rows)

    def join(self, sequence: _Sequence) -> None:
        self._put(len(self.sequences), sequence)

    def leave(self, request_id: int) -> None:
        """Removes a request. The sequence of the last row moves to the request's row. Does nothing if the request is
        not in the batch.
        """
        if (row := self._rows.pop(request_id, None)) is None:
            return
        last = self.sequences.pop()
        self.renewed.discard(len(self.sequences))
        if last.request_id != request_id:
            self._put(row, last)

    def _put(self, row: int, sequence: _Sequence) -> None:
        self.sequences[row : row + 1] = [sequence]
        self._rows[sequence.request_id] = row
        self.renewed.add(row)


class Executor:
    def __init__(
        self,
        instance: HasPageTables,
        page_size: int,
        end_tokens: Collection[int] = (),
        speculation: Speculation | None = None,
        states: StateSlots | None = None,
    ) -> None:
        """instance: scheduler that knows the page table of each request. page_size: tokens per page. end_tokens: ids of
        tokens that end an answer. speculation: drafts that decode steps verify; None: a decode step gives each request
        one token. states: slots of linear-attention states; None: the model has none.
        """
        self._instance = instance
        self._page_size = page_size
        self._end_tokens = frozenset(end_tokens)
        self._speculation = speculation
        self._states = states
        self._sequences: dict[int, _Sequence] = {}
        self._batch = _Rows()

    # What comes and goes.

    def add(self, request_id: int, prompt: TokenIds, sampling: Sampling) -> None:
        """Adds a request. Callers do so before the instance gets the NewRequest."""
        tokens = array("i", bytes(prompt))
        limit, stop_after = sampling.max_tokens, sampling.stop_after_tokens
        most_tokens = len(tokens) + (limit if stop_after is None else min(limit, stop_after))
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._end_tokens)
        self._sequences[request_id] = _Sequence(
            request_id, sampling, len(tokens), tokens, most_tokens, ends, sampling.is_plain
        )

    def add_first_token(
        self,
        request_id: int,
        token: int,
        num_cached_tokens: int,
        logprobs: Logprobs | None = None,
        seed: Seed | None = None,
    ) -> None:
        """Adds the data that reach a decode instance with KvArrived: the first token with its log probabilities,
        prefill's number of cached tokens, and the start of drafting (Seed). Does nothing if the request was dropped.
        """
        if sequence := self._sequences.get(request_id):
            sequence.tokens.append(token)
            sequence.first_logprobs = logprobs
            sequence.num_cached_tokens = num_cached_tokens
            if self._speculation is not None:
                self._speculation.keep_seed(request_id, seed)

    @property
    def num_requests(self) -> int:
        return len(self._sequences)

    def others_than(self, request_ids: Collection[int]) -> list[int]:
        """Returns the ids of this executor's requests that are not in request_ids. If request_ids are the requests that
        the instance has, the instance has given up the returned ones.
        """
        return [request_id for request_id in self._sequences if request_id not in request_ids]

    def num_prompt_tokens(self, request_id: int) -> int:
        return self._sequences[request_id].num_prompt_tokens

    def num_cached_tokens(self, request_id: int) -> int:
        """Returns the number of prompt tokens that were in the prefix cache of the instance that computed the
        prompt.
        """
        return self._sequences[request_id].num_cached_tokens

    def first_logprobs(self, request_id: int) -> Logprobs | None:
        return self._sequences[request_id].first_logprobs

    def seed(self, request_id: int) -> Seed | None:
        """Returns the values from which the drafting of a request's tokens starts. None: the request's prompt is not
        computed, the request has joined the decode batch, or there are no drafts.
        """
        return None if self._speculation is None else self._speculation.seed(request_id)

    def drafted(self, request_id: int) -> Drafted:
        """Returns how many drafts of a request were accepted so far, how many of these the target model chose, too, and
        how many others have nearly the score of the target model's choice.
        """
        return NO_DRAFTS if self._speculation is None else self._speculation.drafted(request_id)

    def last_token(self, request_id: int) -> int:
        return self._sequences[request_id].tokens[-1]

    def save(self, command: m.SaveKv) -> SaveKv:
        """Returns the task that saves a request's KV, and its linear-attention state if there is one, to host memory.
        All ranks do this task before later copies and steps of the instance.
        """
        sequence = self._sequences[command.request_id]
        sequence.is_saved = True
        return SaveKv(command.request_id, sequence.num_kv_tokens, array("i", command.pages), sequence.state_slot)

    def load(self, command: m.LoadKv) -> RestoreKv:
        """Returns the task that copies a request's KV and linear-attention state back from host memory, and drops the
        saved copy. All ranks do this task before later copies and steps of the instance.
        """
        self._sequences[command.request_id].is_saved = False
        return RestoreKv(command.request_id, array("i", command.pages), self.state_slot(command.request_id))

    def state_slot(self, request_id: int) -> int:
        """Returns the slot of a request's linear-attention state; takes one if it has none. 0: no such layers."""
        if self._states is None:
            return 0
        self._sequences[request_id].state_slot = slot = self._states.own(request_id)
        return slot

    def output(self, request_id: int) -> list[int]:
        """Returns the ids of all output tokens of a request so far."""
        sequence = self._sequences[request_id]
        return sequence.tokens[sequence.num_prompt_tokens :].tolist()

    def forget(self, request_id: int) -> ForgetKv | None:
        """Drops a request that the instance no longer has. Returns a task for all ranks that drops the saved KV of the
        request. None: no KV of the request is saved.
        """
        sequence = self._sequences.pop(request_id, None)
        if self._speculation is not None:
            self._speculation.forget(request_id)
        return ForgetKv(request_id) if sequence is not None and sequence.is_saved else None

    # Steps.

    def begin(self, step: PureStep) -> PrefillBatch | DecodeBatch:
        if isinstance(step, PrefillStep):
            return PrefillBatch(tuple(map(self._prefill_input, step.chunks)))
        return self._begin_decode(step)

    def finish(
        self,
        step: PureStep,
        tokens: Sequence[int],
        logprobs: Sequence[Logprobs | None] = (),
        seeds: Sequence[Seed] = (),
    ) -> Outcome:
        """Returns an Outcome: the result of a step as the instance reads it, and the new tokens.

        tokens: the ranks' tokens, one for each chunk of a prefill step or sequence of a decode step. If the step
        verifies drafts, these are integers that `Speculation.new_tokens` reads. logprobs: for each token, or empty if
        no request asks for log probabilities. seeds: start of drafting for each chunk, or empty if there are none.
        """
        likely = logprobs or [None] * len(tokens)
        if isinstance(step, PrefillStep):
            for chunk, seed in zip(step.chunks, seeds, strict=False):
                if chunk.is_last and self._speculation is not None and chunk.request_id in self._sequences:
                    self._speculation.keep_seed(chunk.request_id, seed)
            made = zip(step.chunks, tokens, likely, strict=True)
            return self._take([NewToken(chunk.request_id, token, told) for chunk, token, told in made if chunk.is_last])
        if self._speculation is None:
            of_rows = zip(self._batch.sequences, tokens, likely, strict=True)
            outcome = self._take([NewToken(sequence.request_id, token, told) for sequence, token, told in of_rows])
        else:
            outcome = self._take_verified(self._speculation, tokens)
        for request_id, _ in outcome.result.ended:
            self._leave(request_id)
        return outcome

    def _take_verified(self, speculation: Speculation, tokens: Sequence[int]) -> Outcome:
        """Returns the Outcome of a step that verified drafts, with requests in the order in which they joined the
        batch. Tokens after a sequence's end are dropped. tokens: integers that `Speculation.new_tokens` reads.
        """
        rows = zip(self._batch.sequences, speculation.new_tokens(tokens), strict=True)
        made = {sequence.request_id: new for sequence, new in rows}
        new_tokens: list[NewToken] = []
        ended: list[tuple[int, TokenIds]] = []
        counts = []
        for request_id in self._batch.request_ids:
            num_before = len(new_tokens)
            for token in made[request_id]:
                one = self._take([NewToken(request_id, token)])
                new_tokens += one.new_tokens
                ended += one.result.ended
                if one.result.ended:
                    break
            counts.append(len(new_tokens) - num_before or len(made[request_id]))
        return Outcome(Verified(tuple(counts), tuple(ended)), new_tokens)

    def _prefill_input(self, chunk: PrefillChunk) -> PrefillInput:
        sequence = self._sequences[chunk.request_id]
        tokens = sequence.tokens
        start, stop = chunk.num_context_tokens, chunk.num_context_tokens + chunk.num_tokens
        if not sequence.is_begun:  # it begins again if it is retracted, behind what it had computed
            sequence.is_begun, sequence.num_cached_tokens = True, start
        table = array("i", self._instance.lease(chunk.request_id).table)
        draw = _draw(sequence, stop) if chunk.is_last else None
        next_token = tokens[stop] if stop < len(tokens) else None
        state = None if self._states is None else self._states.of_chunk(chunk.request_id, start, stop)
        return PrefillInput(chunk.request_id, tokens[start:stop], start, table, draw, next_token, state)

    def _begin_decode(self, step: DecodeStep) -> DecodeBatch:
        for request_id in step.left:
            self._leave(request_id)
        for request_id in step.joined:
            self._batch.join(self._sequences[request_id])
        sequences = self._batch.sequences
        return DecodeBatch(
            tuple([sequence.tokens[-1] for sequence in sequences]),
            tuple([len(sequence.tokens) - 1 for sequence in sequences]),
            self._changes(),
            self._draws(sequences),
            self._drafts(sequences),
            self._step_states(sequences),
        )

    def _step_states(self, sequences: Sequence[_Sequence]) -> tuple[tuple[int, int], ...]:
        if self._states is None:
            return ()
        states = [self._states.of_step(sequence.request_id, len(sequence.tokens)) for sequence in sequences]
        for sequence, (own, _) in zip(sequences, states, strict=True):
            sequence.state_slot = own
        return tuple(states)

    def _leave(self, request_id: int) -> None:
        self._batch.leave(request_id)
        if self._speculation is not None:
            self._speculation.leave(request_id)

    def _drafts(self, sequences: Sequence[_Sequence]) -> DraftRows | None:
        if self._speculation is None:
            return None
        return self._speculation.begin([sequence.to_verify for sequence in sequences])

    def _changes(self) -> tuple[PageTableChange, ...]:
        """Returns changes of page tables since the last step: for rows of the batch that hold another sequence than
        before, and for sequences that need more pages than the ranks know.
        """
        sequences, renewed, page_size = self._batch.sequences, self._batch.renewed, self._page_size
        num_drafts = 0 if self._speculation is None else self._speculation.num_verified - 1
        for row in renewed:
            sequences[row].num_pages = 0
        changes = []
        for row, sequence in enumerate(sequences):
            if (known := sequence.num_pages) * page_size < len(sequence.tokens) + num_drafts:
                table = self._instance.lease(sequence.request_id).table
                sequence.num_pages = len(table)
                changes.append(PageTableChange(row, known, array("i", table[known:])))
        renewed.clear()
        return tuple(changes)

    def _draws(self, sequences: Sequence[_Sequence]) -> tuple[Draw | None, ...]:
        if all(map(attrgetter("is_plain"), sequences)):
            return ()
        return tuple(_draw(sequence, len(sequence.tokens)) for sequence in sequences)

    def _take(self, made: list[NewToken]) -> Outcome:
        """Appends new tokens to their sequences, and returns the step's result: ended requests and new tokens. Tokens
        of requests that were dropped during the step are ignored.
        """
        new_tokens, ended = [], []
        for new in made:
            if (sequence := self._sequences.get(new.request_id)) is None:
                continue
            sequence.tokens.append(new.token)
            new_tokens.append(new)
            if len(sequence.tokens) >= sequence.most_tokens or new.token in sequence.ends:
                ended.append((new.request_id, sequence.output))
        return Outcome(StepResult(1, tuple(ended)), new_tokens)


def _draw(sequence: _Sequence, position: int) -> Draw | None:
    """Returns the rule by which the token at this position of the sequence is drawn. None: the likeliest token is
    chosen, and no log probabilities are requested. The rule depends neither on the instance nor on earlier retractions,
    so another instance draws the same token.
    """
    sampling = sequence.sampling
    if sampling.is_plain:
        return None
    shape = sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p
    return Draw(*shape, sampling.seed, position, sampling.num_logprobs)
