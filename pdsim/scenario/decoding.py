"""Settings of decode steps beyond one token for each request: speculation and CUDA graphs."""

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


class GraphSettings(Section):
    """Decode steps run in the batch sizes that CUDA graphs were captured for. Fitted profiles have their own."""

    sizes: tuple[int, ...] | None = None
    """That are captured (--cuda-graph-bs); None: SGLang's. Larger batches run without graphs."""
    eager_layer: Duration = 310_000
    """The least that a layer takes without a graph: Qwen3-8B on H200, as prefill_layer_ns of the roofline."""
    empty_row_kv: float = Field(default=0, ge=0)
    """What each empty row of a graph takes, as a share of what a row takes to read its KV: parts of the context are
    dealt out as if all rows had one."""

    @model_validator(mode="after")
    def _has_positive_sizes(self) -> "GraphSettings":
        if self.sizes is not None and (not self.sizes or min(self.sizes) < 1):
            raise ValueError(f"sizes are batch sizes, at least one and each at least 1, found {list(self.sizes)}")
        return self


def speculation(settings: SpeculativeSettings | None) -> Speculation | None:
    if settings is None:
        return None
    return Speculation(draft_tokens=settings.draft_tokens)


def num_ahead_tokens(settings: SpeculativeSettings | None) -> int:
    """For which a request needs pages before a decode step, beyond its KV."""
    found = speculation(settings)
    return 1 if found is None else found.num_ahead_tokens
