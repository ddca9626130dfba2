"""Settings of decode steps beyond one token for each request: speculation, CUDA graphs, copies of retracted KV."""

from typing import Literal

from pydantic import Field, model_validator

from pdsim.core.running_batch import Speculation
from pdsim.cost.copies import HostCopies
from pdsim.scenario.quantity import Bandwidth, Duration, FineDuration
from pdsim.scenario.section import Section
from pdsim.system.memory import Layout
from pdsim.system.model import LatentAttention
from pdsim.workload.acceptance import Acceptance


class SpeculativeSettings(Section):
    """A draft model proposes tokens, and each decode step verifies them."""

    draft_tokens: int = Field(ge=2)
    """That a step verifies of each request, its last token among them (--speculative-num-draft-tokens)."""
    accept_length: float = Field(ge=1)
    """Tokens that a step gives a request, in the mean."""
    draws: Literal["chain", "even"] = "chain"
    reserved_steps: int = Field(default=2, ge=1)
    """For whose draft tokens a request has pages: 2 with SGLang's overlap schedule, 1 without."""
    draft: Duration = 0
    """What all drafting takes in one step."""
    draft_per_request: FineDuration = 0

    @model_validator(mode="after")
    def _accepts_what_is_drafted(self) -> "SpeculativeSettings":
        if self.accept_length > self.draft_tokens:
            raise ValueError(f"accept_length {self.accept_length:g} is more than the {self.draft_tokens} draft_tokens")
        return self

    def acceptance(self) -> Acceptance:
        return Acceptance(draft_tokens=self.draft_tokens, accept_length=self.accept_length, draws=self.draws)


class BackupSettings(Section):
    """KV of retracted requests is copied to host memory, and back when they resume; the decode loop waits for both.

    Defaults but of the link are measured: one H200, PyTorch 2.11, Qwen3-8B's KV in bf16, 64 to 64,000 tokens in pages
    of 64. Copies into memory that the process had pinned before reached 51 of 64 GB/s out and 47 back.
    """

    bandwidth: Bandwidth | None = Field(default=None, gt=0)
    """Of the link between GPU and host; None: the GPU's nominal one."""
    save_efficiency: float = Field(default=0.79, gt=0, le=1)
    load_efficiency: float = Field(default=0.74, gt=0, le=1)
    copy_launch: Duration = 39_000
    """The least that one copy takes; each layer has two."""
    pinning: Bandwidth = Field(default=1.4e9, gt=0)
    """At which the process pins host memory that it has not used before."""

    def costs(self, layout: Layout, page_size: int) -> HostCopies:
        bandwidth, attention = self.bandwidth or layout.gpu.host_bandwidth, layout.model.attention
        planes_per_layer = 1 if isinstance(attention, LatentAttention) else 2
        return HostCopies(
            page_bytes=layout.kv_token_bytes * page_size,
            num_planes=planes_per_layer * attention.num_layers,
            copy_ns=self.copy_launch,
            save_bandwidth=bandwidth * self.save_efficiency,
            load_bandwidth=bandwidth * self.load_efficiency,
            pinning_bandwidth=self.pinning,
        )


class GraphSettings(Section):
    """Decode steps run in the batch sizes that CUDA graphs were captured for. Fitted profiles have their own."""

    max_batch: int | None = Field(default=None, ge=1)
    """Larger batches run without graphs (--cuda-graph-max-bs); None: by the GPU's memory."""
    sizes: tuple[int, ...] | None = None
    """That are captured (--cuda-graph-bs); None: SGLang's."""
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
    return Speculation(draft_tokens=settings.draft_tokens, reserved_steps=settings.reserved_steps)


def num_ahead_tokens(settings: SpeculativeSettings | None) -> int:
    """For which a request needs pages before a decode step, beyond its KV."""
    found = speculation(settings)
    return 1 if found is None else found.num_ahead_tokens
