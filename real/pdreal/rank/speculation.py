"""The leader's part of speculative decoding: how many drafts each sequence of an instance accepts, and the step's new
tokens.

The scenario decides how many tokens a step gives to a sequence, by the same random stream as in the simulation. The
drafts that the step accepts repeat the request's reference output, if it has one, or are the head's own proposals.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pdreal.control.requests import NO_DRAFTS, Drafted
from pdreal.control.tasks import DraftRows, Seed
from pdsim.scenario.schema import Scenario
from pdsim.workload.request_spec import Streams


@dataclass(slots=True)
class _State:
    slot: int = 0
    """Index of the entry in which ranks keep the sequence's draft state. 0: the sequence does not run."""
    seed: Seed | None = None
    """Where the sequence's first drafts start: a proposal and a hidden state from its prefill forward. None: drafts
    start from zeros, or the sequence has joined the batch.
    """
    accepted: Iterator[int] | None = None
    """Yields, for each further step, the number of tokens that the step gives to the sequence. None: no step has
    begun.
    """
    drafted: Drafted = NO_DRAFTS
    """Counts of the sequence's drafts so far: accepted, of these equal to the target's choice, or near its score."""


@dataclass(frozen=True)
class SequenceToVerify:
    """Data of one sequence before a step that verifies its drafts, by which the leader decides how many drafts the
    step accepts, and which tokens the step verifies as drafts.
    """

    request_id: int
    num_output_tokens: int
    """Number of output tokens so far."""
    num_lacking: int
    """Number of output tokens until the request reaches its maximum output."""
    reference: Sequence[int]
    """Output token ids that the request has without drafts. Empty: not known."""


class Speculation:
    def __init__(self, num_verified: int, accepted: Callable[[int], Iterator[int]]) -> None:
        """num_verified: number of tokens that a step verifies for each sequence, including its last token.

        accepted: function that gets a request id and returns an iterator. For each decode step, the iterator yields how
        many tokens the request gets.
        """
        self.num_verified = num_verified
        self._accepted = accepted
        self._states: dict[int, _State] = {}
        self._rows: list[tuple[_State, int]] = []
        """State of each sequence of the batch, and number of output tokens that the present step adds to it: its
        accepted drafts and one more."""
        self._free_slots: list[int] = []
        self._num_slots = 0

    @classmethod
    def of(cls, scenario: Scenario) -> "Speculation | None":
        """Makes the Speculation of a resolved scenario. Each step accepts as many drafts as in the simulation, because
        the numbers come from the same random streams (Simulation._executor_of). None: the scenario has no speculative
        decoding.
        """
        acceptance, streams = scenario.acceptance, Streams(scenario.seed)
        if acceptance is None:
            return None
        return cls(acceptance.draft_tokens, lambda i: acceptance.stream(streams.named(f"accepted/{i}")))

    def keep_seed(self, request_id: int, seed: Seed | None) -> None:
        """Keeps the first draft token and the hidden state (Seed) from a sequence's prefill forward, with which
        drafting begins. None: drafting begins with zeros.
        """
        self._states.setdefault(request_id, _State()).seed = seed

    def seed(self, request_id: int) -> Seed | None:
        state = self._states.get(request_id)
        return None if state is None else state.seed

    def leave(self, request_id: int) -> None:
        """Frees the entry for the draft state of a sequence that leaves the batch. Has no effect if the sequence does
        not run.
        """
        if (state := self._states.get(request_id)) is not None and state.slot:
            self._free_slots.append(state.slot)
            state.slot = 0

    def forget(self, request_id: int) -> None:
        self.leave(request_id)
        self._states.pop(request_id, None)

    def begin(self, rows: Sequence[SequenceToVerify]) -> DraftRows:
        """Decides how many drafts of each sequence a step accepts. Gives sequences that join the batch an entry for
        their draft state. rows: the batch's sequences.
        """
        slots, taught, seeds = [], [], []
        self._rows = []
        for row in rows:
            state = self._states.setdefault(row.request_id, _State())
            if not state.slot:
                state.slot = self._new_slot()
                seeds.append((state.slot, state.seed))
                state.seed = None
            if state.accepted is None:
                state.accepted = self._accepted(row.request_id)
            num_tokens = min(next(state.accepted), row.num_lacking)
            slots.append(state.slot)
            taught.append(tuple(row.reference[row.num_output_tokens :][: num_tokens - 1]))
            self._rows.append((state, num_tokens))
        num_accepted = tuple(num_tokens for _, num_tokens in self._rows)
        return DraftRows(tuple(slots), num_accepted, tuple(taught), tuple(seeds))

    def new_tokens(self, computed: Sequence[int]) -> list[list[int]]:
        """Returns the step's new tokens of each sequence: the accepted drafts, and the token that the target chose
        after them. computed: integers from the ranks (Drafter.step). They are, for each sequence, its drafts, the
        target's choices, and for each draft 1 if its score is at most one step of bf16 below the choice's, else 0.
        """
        made, end = [], 0
        for state, num_tokens in self._rows:
            begin, middle = end, end + self.num_verified - 1
            behind = middle + self.num_verified
            end = behind + self.num_verified - 1
            accepted = computed[begin : begin + num_tokens - 1]
            *confirming, chosen = computed[middle : middle + num_tokens]
            is_other = [a != b for a, b in zip(accepted, confirming, strict=True)]
            num_near = sum(other and near for other, near in zip(is_other, computed[behind:end], strict=False))
            state.drafted = state.drafted.plus(Drafted(len(accepted), is_other.count(False), num_near))
            made.append([*accepted, chosen])
        return made

    def drafted(self, request_id: int) -> Drafted:
        """Returns how many drafts of a request were accepted so far, how many of these the target model chose, too, and
        how many of the others have nearly the score of the target's choice (Drafted.num_near).
        """
        state = self._states.get(request_id)
        return NO_DRAFTS if state is None else state.drafted

    def _new_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        self._num_slots += 1
        return self._num_slots
