"""Settings of decode steps beyond one token for each request."""

from pydantic import Field, model_validator

from pdsim.core.running_batch import Speculation
from pdsim.scenario.quantity import Duration
from pdsim.scenario.section import Section
from pdsim.workload.acceptance import Acceptance


class SpeculativeSettings(Section):
    """A draft model proposes tokens, and each decode step verifies them."""

    draft_tokens: int = Field(ge=2)
    """That a step verifies of each request, its last token among them (--speculative-num-draft-tokens)."""
    accept_length: float = Field(ge=1)
    """Tokens that a step gives a request, in the mean."""
    draft: Duration = 0
    """What all drafting takes in one step."""

    @model_validator(mode="after")
    def _accepts_what_is_drafted(self) -> "SpeculativeSettings":
        if self.accept_length > self.draft_tokens:
            raise ValueError(f"accept_length {self.accept_length:g} is more than the {self.draft_tokens} draft_tokens")
        return self

    def acceptance(self) -> Acceptance:
        return Acceptance(draft_tokens=self.draft_tokens, accept_length=self.accept_length)


def speculation(settings: SpeculativeSettings | None) -> Speculation | None:
    if settings is None:
        return None
    return Speculation(draft_tokens=settings.draft_tokens)


def num_ahead_tokens(settings: SpeculativeSettings | None) -> int:
    """For which a request needs pages before a decode step, beyond its KV."""
    found = speculation(settings)
    return 1 if found is None else found.num_ahead_tokens
