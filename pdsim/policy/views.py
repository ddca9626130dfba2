"""Read-only views with everything that a policy may see.

They are Protocols, not copies: the core passes its own objects, and the type checker rejects a write. No view contains
facts that a real system cannot know, such as the output length or the exact duration of a step.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class TokenSequence(Protocol):
    """Tokens of a prompt or output, without their values."""

    def __len__(self) -> int: ...

    def page_key(self, start: int, size: int) -> Hashable:
        """Key of tokens [start, start + size). Equal tokens have equal keys."""

    def common_prefix(self, start: int, other: Any, other_start: int) -> int:
        """Number of tokens from `start` that equal those of `other` from `other_start`."""

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
        """Priority; larger values go first. 0 unless the scenario gives the request's class a priority."""


class QueuedPrefill(QueuedRequest, Protocol):
    """A prompt that waits for its first prefill chunk."""

    @property
    def prompt(self) -> TokenSequence: ...
    @property
    def entry(self) -> int:
        """Place in the order in which prompts last joined the queue."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens to compute or to find in the cache: the prompt, and outputs whose KV was lost."""

    @property
    def num_asked_tokens(self) -> int:
        """Longest output that the client asks for. Prefill: 1, as in SGLang (disaggregation/prefill.py:482)."""


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
        """Waiting prompts. Prefill: in the order of decode's grants. Aggregated: in the order of arrival or
        retraction.
        """

    def num_cached_tokens(self, request: QueuedPrefill) -> int:
        """Number of prompt tokens that the prefix cache holds now. Costs a tree walk."""

    def use_cached_tokens(self, request: QueuedPrefill) -> int:
        """Number of cached prompt tokens. Counts as a use, so that they are not evicted soon."""

    def cached_path(self, request: QueuedPrefill) -> tuple[int, ...]:
        """Path of the cached prefix in the prefix tree: the place of each node among its siblings, by age."""

    def num_waited_tokens(self, request: QueuedPrefill) -> int:
        """Number of prompt tokens that forwards have taken since the request joined the queue."""


class SendingPrefill(Protocol):
    """A prompt whose KV is being computed and sent."""

    @property
    def request_id(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens found in the prefill instance's prefix cache. Set when the prompt is begun."""

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
    """View of a decode instance for its policies, or of an aggregated instance for its preemption policy."""

    @property
    def num_active(self) -> int:
        """Number of requests that run, are ready to run, or wait for their KV: len(active)."""

    @property
    def num_ahead_tokens(self) -> int:
        """Number of tokens beyond its KV for which a running request needs pages: 1, or more with speculative
        decoding.
        """

    @property
    def num_running_tokens(self) -> int:
        """Prompt and output tokens of all running requests."""

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
    """A request at the head of the admission queue, with its cached prefix matched and locked."""

    request: QueuedDecode
    num_tokens: int
    """Tokens whose KV the decode instance must hold before the request can run."""
    num_cached_tokens: int
    """Prompt tokens that the decode prefix cache holds."""
    num_new_pages: int
    """Number of pages to allocate for the uncached tokens."""
    resumes: bool = False
    """True for a retracted request that resumes."""


class CachedLeaf(Protocol):
    """A leaf of the prefix cache that no request uses."""

    @property
    def last_access(self) -> int:
        """Number of the last access. It grows with every access to the tree."""

    @property
    def num_hits(self) -> int:
        """Number of requests that inserted the leaf."""

    @property
    def born(self) -> int:
        """Number of the access at which the leaf was inserted."""

    @property
    def num_pages(self) -> int: ...


class InstanceLoad(Protocol):
    """The router's knowledge of one instance."""

    @property
    def instance_id(self) -> str: ...
    @property
    def num_requests(self) -> int:
        """Number of unfinished requests that were routed to the instance."""

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of these requests."""

    @property
    def num_pages(self) -> int:
        """Number of distinct whole pages of these prompts. 0 unless the policy is KV-aware."""

    @property
    def num_queued(self) -> int:
        """Number of waiting requests when the metrics were last read. 0 unless the policy has a metrics_interval_ns."""

    @property
    def page_use(self) -> float:
        """Share of the instance's pages that requests held when the metrics were last read."""


class RoutingView(Protocol):
    """View of the instances of one role for routing policies.

    A policy whose class has `is_kv_aware = True` may use `num_uncached_tokens` and `num_pages_with`. For such a policy
    the router remembers prompts in pages of the instances' size, and as many tokens as their pools hold. For a policy
    with a `metrics_interval_ns` above 0, the metrics of instances are read at this interval.
    """

    @property
    def now_ns(self) -> int: ...
    @property
    def role(self) -> str:
        """prefill, decode or aggregated."""

    @property
    def page_size(self) -> int:
        """Page size in tokens at which prompts are remembered."""

    @property
    def instances(self) -> Sequence[InstanceLoad]:
        """Instances of the role; never empty, always in the same order."""

    def num_cached_tokens(self, prompt: TokenSequence, instance_id: str) -> int:
        """Number of prompt tokens that the router remembers to have sent to this instance."""

    def holders(self, prompt: TokenSequence) -> Collection[str]:
        """Instances that may have some of these tokens. Other instances have none. Supports `in`."""

    def num_uncached_tokens(self, instance_id: str) -> int:
        """Number of tokens to compute for prompts that were sent to this instance and are not computed yet.

        Tokens that the router remembered when the prompt was sent do not count.
        """

    def session_instance(self, ttl_ns: int) -> str:
        """The instance that serves this request's session. Empty: no request of the session is left, and the last left
        ttl_ns ago or earlier. For a policy whose class says `reads_sessions = True`.
        """

    def num_pages_with(self, prompt: TokenSequence, instance_id: str) -> int:
        """Number of distinct whole pages of this prompt and of the prompts of the instance's requests."""


class WaitingRequest(Protocol):
    """A waiting request, as the router sees it."""

    @property
    def request_id(self) -> int: ...
    @property
    def num_tokens(self) -> int:
        """Length of the prompt in tokens."""

    @property
    def priority(self) -> int: ...


class SheddingView(Protocol):
    """The router's knowledge when a request arrives."""

    @property
    def waiting(self) -> Sequence[WaitingRequest]:
        """Requests whose clients have no token yet, in the order in which they were routed."""


class PairView(Protocol):
    """The router's knowledge of a prompt whose decode instance is chosen, and whose prefill instance is not."""

    @property
    def num_decode_cached_tokens(self) -> int:
        """Number of prompt tokens that the router remembers to have sent to this decode instance."""

    @property
    def decode(self) -> InstanceLoad:
        """Load of the chosen decode instance, without this prompt."""

    @property
    def prefill(self) -> Sequence[InstanceLoad]: ...


class RoleSeen(Protocol):
    """View of the servers of one role for scaling policies."""

    @property
    def num_servers(self) -> int:
        """Number of servers that have the role, start in it, or switch to it."""

    @property
    def num_serving(self) -> int:
        """Number of servers that serve or drain in the role."""

    @property
    def num_requests(self) -> int:
        """Unfinished requests at servers that serve or drain."""

    @property
    def num_queued(self) -> int: ...
    @property
    def page_use(self) -> float:
        """Mean share of the servers' pages that requests hold."""


class ScalingView(Protocol):
    """The autoscaler's view: the servers of both roles, and counts since its last decision."""

    @property
    def now_ns(self) -> int: ...
    @property
    def interval_ns(self) -> int: ...
    @property
    def max_servers(self) -> int:
        """Maximum number of servers of both roles together."""

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
        """Mean TTFT of finished requests in ns; 0 if no request finished."""

    @property
    def mean_tpot_ns(self) -> float: ...
