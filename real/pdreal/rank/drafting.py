"""Speculative decoding on one rank: a draft head proposes tokens, and the target verifies them in one forward.

A step that verifies V tokens of each sequence of a batch:

- propose: V - 2 forwards of the head, each over one token of each sequence, follow the proposal of the step before
- verify: the target computes each sequence's last token and V - 1 drafts, and chooses a token behind each of the V
- extend: the head computes the V positions with the target's hidden states, and makes the next step's first proposal

The forwards are those of SGLang's EAGLE worker (0.5.23, speculative/eagle_worker_v2.py: draft_forward, verify,
_draft_extend_for_decode, _draft_extend_for_prefill). The number of accepted tokens is given, as with SGLang's
SGLANG_SIMULATE_ACC_LEN (speculative/spec_utils.py:276), because drafts of random weights are never right.
"""

import base64
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pdreal.control.tasks import DecodeBatch, PrefillBatch, PrefillInput, Seed
from pdreal.model.draft import DraftHead
from pdreal.model.transformer import Attend

UNTAUGHT = -1
"""Entry of VerifyRows.taught in place of a reference token. The step verifies the token that the draft head proposes.
"""


class VerifyRows(NamedTuple):
    """Inputs of a decode step that verifies drafts. Each tensor has one entry (row) per sequence of the batch. In a
    CUDA graph larger than the batch, the other rows are padding.
    """

    tokens: Tensor
    """Id of the last token of each sequence, [rows]."""
    positions: Tensor
    """Position of the last token of each sequence, which is the number of tokens before it, [rows]."""
    slots: Tensor
    """Index of the entry in which each sequence's draft state is kept, [rows]. Padding: 0."""
    num_accepted: Tensor
    """Number of output tokens that each sequence gains: its accepted drafts and one token of the target, [rows]. A
    random stream of the scenario determines this number before the step. Padding: 0.
    """
    taught: Tensor
    """Reference output tokens that the step verifies instead of the draft head's proposals, [rows, V - 1] if a step
    verifies V tokens of each row. UNTAUGHT: the step verifies the draft head's proposal.
    """


def columns_of(batch: DecodeBatch, num_verified: int) -> list[Sequence[int]]:
    """Returns a step's inputs as lists with one integer per sequence of the batch: tokens, positions, slots,
    num_accepted, and num_verified - 1 lists with the values of `taught` (see VerifyRows).
    """
    drafts = batch.drafts
    assert drafts is not None
    taught = [[*given, *[UNTAUGHT] * (num_verified - 1 - len(given))] for given in drafts.taught]
    return [batch.tokens, batch.num_kv_tokens, drafts.slots, drafts.num_accepted, *zip(*taught, strict=True)]


def rows_of(columns: Tensor) -> VerifyRows:
    """Returns the VerifyRows that a step reads. columns: the lists of columns_of as one tensor, [lists, sequences]."""
    tokens, positions, slots, num_accepted = columns[:4]
    return VerifyRows(tokens, positions, slots, num_accepted, columns[4:].t())


class Drafter:
    """Drafts and verifies the tokens of one rank's sequences, with a draft head and its target. Keeps a draft state for
    each running sequence: the head's proposal for the token after the sequence's last token, and the head's hidden
    state that made the proposal.
    """

    def __init__(self, head: DraftHead, num_verified: int, max_running_requests: int) -> None:
        """num_verified: number of tokens of each sequence that a step verifies, including its last token.
        max_running_requests: largest number of sequences that run.
        """
        target = head.target
        self.head = head
        self.num_verified = num_verified
        self._proposals = torch.zeros(max_running_requests + 1, dtype=torch.int64, device=target.device)
        self._hidden = torch.zeros(
            max_running_requests + 1, target.config.hidden_size, dtype=target.dtype, device=target.device
        )

    def plant(self, seeds: Sequence[tuple[int, Seed | None]]) -> None:
        """Sets the start of drafting for sequences that join the batch. seeds: pairs (slot, first proposal and hidden
        state); None instead of the second: drafting starts from zeros.
        """
        for slot, seed in seeds:
            self._proposals[slot] = 0 if seed is None else seed.token
            self._hidden[slot] = 0 if seed is None else self._state_of(seed)

    def prefill(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, last: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Computes the draft head's KV of prompt chunks. Returns the head's first proposals, [chunks], and the head's
        hidden states from which the proposals are made, [chunks, hidden].

        tokens: the token after each position. hidden: states of the target, [tokens, hidden]. last: index of each
        chunk's last token in `tokens`.
        """
        states = self.head.hidden(tokens, hidden, positions, attend).index_select(0, last)
        return self.head.propose(states), states

    def step(self, rows: VerifyRows, attend_one: Callable[[Tensor], Attend], attend_all: Attend) -> Tensor:
        """Computes a decode step that verifies V tokens of each sequence. Returns [sequences, 3 * V - 2]: each
        sequence's V - 1 drafts, the target's V choices, and for each draft 1 if the target's score of the draft is at
        most one step of bf16 below the score of the target's choice, else 0.

        attend_one: makes the attention of one token of each sequence, from the tokens' positions. attend_all: attention
        of V tokens of each sequence.
        """
        inputs = torch.cat((rows.tokens[:, None], self._propose(rows, attend_one)), dim=1)
        counted = torch.arange(self.num_verified, device=inputs.device)
        positions = (rows.positions[:, None] + counted).flatten()
        target = self.head.target
        hidden = target.hidden(inputs.flatten(), positions, attend_all)
        logits = target.logits_of(hidden)
        chosen, drafts = target.best_tokens(logits).view(inputs.shape), inputs[:, 1:]
        judges = logits.view(*inputs.shape, -1)[:, :-1].flatten(0, 1)
        is_near = target.are_near(judges, chosen[:, :-1].flatten(), drafts.flatten()).view(drafts.shape)
        self._extend(rows, inputs, chosen, hidden, positions, attend_all)
        return torch.cat((drafts, chosen, is_near), dim=1)

    def _propose(self, rows: VerifyRows, attend_one: Callable[[Tensor], Attend]) -> Tensor:
        """Returns the drafts of each sequence, [sequences, V - 1]. V: number of tokens of a sequence that a step
        verifies.
        """
        proposal, hidden = self._proposals.index_select(0, rows.slots), self._hidden.index_select(0, rows.slots)
        drafts: list[Tensor] = []
        for i in range(self.num_verified - 1):
            if drafts:
                positions = rows.positions + (i - 1)
                hidden = self.head.hidden(drafts[-1], hidden, positions, attend_one(positions))
                proposal = self.head.propose(hidden)
            taught = rows.taught[:, i].to(proposal.dtype)
            drafts.append(torch.where(taught == UNTAUGHT, proposal, taught))
        return torch.stack(drafts, dim=1)

    def _extend(
        self, rows: VerifyRows, inputs: Tensor, chosen: Tensor, hidden: Tensor, positions: Tensor, attend: Attend
    ) -> None:
        """Computes the draft head over all verified positions, and keeps the draft state of each sequence's last
        accepted token. rows: the sequences, with V tokens to verify each. inputs: these tokens, [sequences, V].
        chosen: the target's choices, [sequences, V]. hidden: the target's hidden states, [sequences * V, hidden].
        positions: [sequences * V]. attend: the draft head's attention.
        """
        counted = torch.arange(self.num_verified, device=inputs.device)
        is_accepted = counted < rows.num_accepted[:, None] - 1
        followers = torch.where(is_accepted, inputs.roll(-1, dims=1), chosen)
        states = self.head.hidden(followers.flatten(), hidden, positions, attend).view(*inputs.shape, -1)
        last = (rows.num_accepted - 1).clamp(min=0).long()
        states = states.gather(1, last[:, None, None].expand(-1, 1, states.shape[2]))[:, 0]
        slots = rows.slots.long()
        self._hidden.index_copy_(0, slots, states)
        self._proposals.index_copy_(0, slots, self.head.propose(states).long())

    def _state_of(self, seed: Seed) -> Tensor:
        state = torch.frombuffer(bytearray(base64.b64decode(seed.hidden)), dtype=self._hidden.dtype)
        return state.to(self._hidden.device)


def seeds_of(proposals: Tensor, hidden: Tensor) -> list[Seed]:
    """Returns a Seed, the start of drafting, for each chunk of a prefill forward. Prefill sends the Seed of a prompt's
    last chunk to decode together with the KV. proposals: the draft head's first proposal after each chunk, [chunks].
    hidden: the head's hidden states that made the proposals, [chunks, hidden]. Both tensors lie on the host.
    """
    states = hidden.contiguous().view(torch.uint8).numpy()
    return [
        Seed(token, base64.b64encode(state.tobytes()).decode())
        for token, state in zip(proposals.tolist(), states, strict=True)
    ]


def followers_of(batch: PrefillBatch, chosen: Sequence[int]) -> list[int]:
    """Returns, for each prompt token of a batch, the token that follows it in its sequence. chosen: the token that the
    target chose after each chunk.
    """
    pairs = zip(batch.chunks, chosen, strict=True)
    ends = ((chunk, token if chunk.next_token is None else chunk.next_token) for chunk, token in pairs)
    return [token for chunk, end in ends for token in (*chunk.tokens[1:], end)]


def verified_chunks(
    num_kv_tokens: Sequence[int], page_tables: Sequence[Sequence[int]], num_verified: int
) -> PrefillBatch:
    """Returns a batch with num_verified tokens of each sequence as chunks after their contexts. The token ids do not
    matter.
    """
    tokens = [0] * num_verified
    pairs = zip(num_kv_tokens, page_tables, strict=True)
    return PrefillBatch(tuple(PrefillInput(row, tokens, n, table) for row, (n, table) in enumerate(pairs)))
