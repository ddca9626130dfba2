"""Speculative decoding: durations of a draft model's forwards, which run in addition to those of the target model."""

from dataclasses import field
from typing import NamedTuple

from pdsim.core.messages import PrefillStep
from pdsim.cost.model import CostModel, DecodeLine
from pdsim.cost.roofline import RooflineModel
from pdsim.dataclass import dataclass


@dataclass(frozen=True)
class DraftTimes:
    """Durations of the draft forwards of SGLang's EAGLE worker (0.5.23, speculative/eagle_worker_v2.py). With DSPARK,
    one forward per decode step proposes a block instead (see computes_prompts).

    Before the target verifies a step's drafts, the draft proposes tokens in num_steps - 1 forwards (draft_forward: the
    last proposal needs no forward). After verification, one forward extends the draft's KV by all verified tokens and
    makes the next step's first proposal (_draft_extend_for_decode); only one row of each request passes the output
    projection. Each forward reads the KV of the draft's layers. After the target has computed a prompt, the draft's
    layers compute it, too (_draft_extend_for_prefill).
    """

    layers: CostModel
    """Cost model of the draft's layers without the output projection."""
    proposing: CostModel
    """Cost model of the draft's layers with the output projection."""
    num_steps: int
    """Number of draft tokens that the draft proposes one after another (--speculative-num-steps)."""
    num_rows: int
    """Number of tokens per request in a forward that proposes tokens: branches of the draft tree or, with DSPARK,
    tokens of the proposed block."""
    num_verified: int
    """Number of tokens per request that the target model verifies in a step."""
    computes_prompts: bool
    """True: the draft's layers also compute prompts. False: the draft proposes a block in one forward, from the
    target's hidden states (DSPARK). The draft makes its KV from these hidden states, in a time that is not counted.
    """
    _lines: dict[int, DecodeLine] = field(init=False, default_factory=dict, repr=False)
    """Lines that the method decode_line has computed for expert_share None, by number of requests."""

    def decode_line(self, num_requests: int, expert_share: float | None = None) -> DecodeLine:
        """Returns the time of all draft forwards of one decode step, as a line over the KV tokens that the batch reads.

        expert_share: number of tokens that experts compute, divided by the number of this instance's tokens; None: 1.
        """
        if expert_share is not None:
            return self._line(num_requests, expert_share)
        line = self._lines.get(num_requests)
        if line is None:
            line = self._lines[num_requests] = self._line(num_requests, None)
        return line

    def _line(self, num_requests: int, expert_share: float | None) -> DecodeLine:
        proposing = _line_of(self.proposing, num_requests * self.num_rows, expert_share)
        if not self.computes_prompts:
            return proposing
        one_row = [_line_of(model, num_requests, expert_share) for model in (self.proposing, self.layers)]
        extending = _line_of(self.layers, num_requests * self.num_verified, expert_share)
        projection = DecodeLine(one_row[0].base - one_row[1].base, 0, 0)
        return extending.plus(projection).plus(proposing, self.num_steps - 1)

    def prefill_ns(self, step: PrefillStep, start_ns: int) -> int:
        """Returns the time in ns that the draft's layers need for the prompts of a forward that begins at start_ns. 0:
        the draft does not compute prompts.
        """
        return self.layers.prefill_ns(step, start_ns) if self.computes_prompts else 0


def _line_of(model: CostModel, num_tokens: int, expert_share: float | None) -> DecodeLine:
    if expert_share is None or not isinstance(model, RooflineModel):
        return model.decode_line(num_tokens)
    return model.decode_line(num_tokens, expert_share * num_tokens)


class Drafting(NamedTuple):
    """Speculative decoding. The target model computes each drafted token as if it were a separate request, but reads a
    request's KV only once for all its drafted tokens.
    """

    tokens: int = 1
    """Number of tokens per request that the target model computes in a decode step. 1: no drafts."""
    step_ns: float = 0
    """Measured time in ns that drafting takes in each step."""
    model: DraftTimes | None = None
    """Durations of the draft model's forwards. None: no draft model, or measured times include these durations:
    step_ns, or the times of the cost models."""


NO_DRAFTING = Drafting()
