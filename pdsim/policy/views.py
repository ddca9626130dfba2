"""Read-only views: all that a policy may see.

They are Protocols, not copies: the core passes its own objects, and the type checker rejects a write.
Ground truth that a real system cannot know (the output length, the exact duration of a step) is in no view.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class TokenSequence(Protocol):
    """Tokens of a prompt or output, without their values."""

    def __len__(self) -> int: ...

    def page_key(self, start: int, size: int) -> Hashable:
        """Equal for equal tokens: identifies tokens [start, start + size)."""

    def common_prefix(self, start: int, other: Any, other_start: int) -> int:
        """Count the tokens from `start` that equal those of `other` from `other_start`."""

    def then(self, other: Any) -> "TokenSequence":
        """This sequence followed by another sequence."""


class QueuedRequest(Protocol):
    """A request in an instance."""

    @property
    def request_id(self) -> int: ...
    @property
    def arrival_ns(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def priority(self) -> int:
        """Priority; larger goes first. 0 unless the scenario gives the request's class a priority."""


class QueuedPrefill(QueuedRequest, Protocol):
    """A prompt that waits for its first prefill chunk."""

    @property
    def prompt(self) -> TokenSequence: ...


class InstanceView(Protocol):
    """View of an instance for its policies."""

    @property
    def now_ns(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def num_available_pages(self) -> int:
        """Free pages, and cached pages that no request uses."""


class PrefillView(InstanceView, Protocol):
    """View of a prefill or aggregated instance for prefill policies."""

    @property
    def waiting(self) -> Collection[QueuedPrefill]:
        """Ordered as decode granted them; aggregated: as they came or were retracted."""

    def num_cached_tokens(self, request: QueuedPrefill) -> int:
        """Prompt tokens that the prefix cache holds now. Costs a tree walk."""

    def use_cached_tokens(self, request: QueuedPrefill) -> int:
        """Number of cached prompt tokens. Counts as a use, so that they are not evicted soon."""


class SendingPrefill(Protocol):
    """A prompt whose KV is being computed and sent."""

    @property
    def request_id(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int:
        """Found in the prefill instance's prefix cache; computed, as soon as the prompt has begun."""

    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_sent_tokens(self) -> int: ...


class QueuedDecode(QueuedRequest, Protocol):
    """A request in a decode or an aggregated instance, in any state."""

    @property
    def num_output_tokens(self) -> int: ...
    @property
    def max_output_tokens(self) -> int: ...


class DecodeView(InstanceView, Protocol):
    """A decode instance as its policies see it, or an aggregated one as its preemption policy does."""

    @property
    def num_active(self) -> int:
        """Requests that run, are ready to run, or wait for their KV: len(active)."""

    @property
    def num_ahead_tokens(self) -> int:
        """Tokens beyond its KV for which a running request needs pages: 1, or more with speculative decoding."""

    @property
    def num_running_tokens(self) -> int:
        """Prompt and output tokens of everything that runs."""

    @property
    def resume_unit_tokens(self) -> int:
        """A retracted request asks for a multiple of this number of tokens: a page, or 1 in SGLang 0.5.12."""

    @property
    def running(self) -> Sequence[QueuedDecode]:
        """Running requests in batch order. Costs time in proportion to the batch."""

    @property
    def active(self) -> Collection[QueuedDecode]:
        """Requests that run, are ready to run, or wait for their KV. Costs time in proportion to their number."""

    @property
    def retracted(self) -> Collection[QueuedDecode]: ...


@dataclass(slots=True)
class Candidate:
    """A request at the head of the admission queue, its cached prefix matched and locked."""

    request: QueuedDecode
    num_tokens: int
    """Tokens whose KV the decode instance must hold before the request can run."""
    num_cached_tokens: int
    """Prompt tokens that the decode prefix cache holds."""
    num_new_pages: int
    """Pages to allocate for the rest."""
    resumes: bool = False
    """True for a retracted request that comes back."""


class CachedLeaf(Protocol):
    """A leaf of the prefix cache that no request uses."""

    @property
    def last_access(self) -> int:
        """Grows with every access to the tree."""

    @property
    def num_hits(self) -> int:
        """Number of requests that inserted the leaf."""

    @property
    def born(self) -> int:
        """The access at which it was inserted."""

    @property
    def num_pages(self) -> int: ...


class InstanceLoad(Protocol):
    """A router's knowledge of one instance."""

    @property
    def instance_id(self) -> str: ...
    @property
    def num_requests(self) -> int:
        """Routed there and not done."""

    @property
    def num_tokens(self) -> int:
        """Their prompt tokens."""

    @property
    def num_pages(self) -> int:
        """Whole pages of their prompts. 0 unless the policy is KV-aware."""

    @property
    def num_queued(self) -> int:
        """Requests that waited there as its metrics were last read. 0 unless the policy has a metrics_interval_ns."""

    @property
    def page_use(self) -> float:
        """Share of its pages that requests held then."""


class RoutingView(Protocol):
    """View of the instances of one role for routing policies.

    A policy whose class says `is_kv_aware = True` may use `num_uncached_tokens` and `num_pages_with`. For such a policy
    the router remembers prompts in pages of the instances' size, and as many tokens as their pools hold. A policy with
    a `metrics_interval_ns` above 0 has the metrics of instances read so often.
    """

    @property
    def now_ns(self) -> int: ...
    @property
    def role(self) -> str:
        """prefill, decode or aggregated."""

    @property
    def page_size(self) -> int:
        """Tokens of a page in which prompts are remembered."""

    @property
    def instances(self) -> Sequence[InstanceLoad]:
        """Instances of the role; never empty, always in the same order."""

    def num_cached_tokens(self, prompt: TokenSequence, instance_id: str) -> int:
        """Prompt tokens that the router remembers to have sent to this instance."""

    def holders(self, prompt: TokenSequence) -> Collection[str]:
        """Instances that may have some of these tokens; other instances have none of them. Supports `in`."""

    def num_uncached_tokens(self, instance_id: str) -> int:
        """Tokens to compute of the prompts that were sent to this instance and are not computed yet.

        What the router remembered of a prompt as it was sent is not to compute.
        """

    def num_pages_with(self, prompt: TokenSequence, instance_id: str) -> int:
        """Distinct whole pages of this prompt and of those of the instance's requests."""


class WaitingRequest(Protocol):
    """A waiting request, as the router sees it."""

    @property
    def request_id(self) -> int: ...
    @property
    def num_tokens(self) -> int:
        """Length of its prompt."""

    @property
    def priority(self) -> int: ...


class SheddingView(Protocol):
    """Knowledge of a router as a request arrives."""

    @property
    def waiting(self) -> Sequence[WaitingRequest]:
        """Requests whose clients have no token yet, in the order in which they were routed."""


class PairView(Protocol):
    """Knowledge of a router of a prompt whose decode instance is chosen, and whose prefill instance is not."""

    @property
    def num_decode_cached_tokens(self) -> int:
        """Prompt tokens that the router remembers to have sent to this decode instance."""

    @property
    def decode(self) -> InstanceLoad:
        """The chosen decode instance, without this prompt."""

    @property
    def prefill(self) -> Sequence[InstanceLoad]: ...


class RoleSeen(Protocol):
    """View of the servers of one role for scaling policies."""

    @property
    def num_servers(self) -> int:
        """Number of servers that have the role, start in it, or switch to it."""

    @property
    def num_requests(self) -> int:
        """Requests at servers that serve or drain: routed there and not done."""

    @property
    def num_queued(self) -> int: ...
    @property
    def page_use(self) -> float:
        """Mean share of their pages that requests hold."""


class ScalingView(Protocol):
    """An autoscaler's view: the servers of both roles, and counts since it last decided."""

    @property
    def now_ns(self) -> int: ...
    @property
    def interval_ns(self) -> int: ...
    @property
    def max_servers(self) -> int:
        """Servers of both roles together."""

    @property
    def prefill(self) -> RoleSeen: ...
    @property
    def decode(self) -> RoleSeen: ...
    @property
    def num_arrived(self) -> int: ...
    @property
    def num_arrived_tokens(self) -> int: ...
    @property
    def num_finished(self) -> int: ...
    @property
    def num_output_tokens(self) -> int:
        """Output tokens of finished requests."""

    @property
    def mean_ttft_ns(self) -> float:
        """Mean over finished requests; 0 if none did."""

    @property
    def mean_tpot_ns(self) -> float: ...
