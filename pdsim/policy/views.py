"""Read-only views. A policy sees nothing but the arguments of its methods: views, token sequences and numbers.

Views are Protocols, except Candidate. The core passes its own objects, not copies, and the type checker rejects a
policy that writes to the properties of a view. No view contains facts that a real system cannot know, such as the
output length or the exact duration of a step.
"""

from collections.abc import Collection, Hashable, Sequence
from typing import Any, Protocol

from pdsim.dataclass import dataclass


class TokenSequence(Protocol):
    """Tokens of a prompt or output. Sequences can be compared, but their token ids cannot be read."""

    def __len__(self) -> int: ...

    def page_key(self, start: int, size: int) -> Hashable:
        """Returns the key of the page of tokens [start, start + size). Pages of equal tokens have equal keys."""

    def common_prefix(self, start: int, other: Any, other_start: int) -> int:
        """Compares this sequence from position `start` with the sequence `other` from position other_start. Returns the
        number of equal tokens before the first difference.
        """

    def then(self, other: Any) -> "TokenSequence":
        """Returns this sequence followed by another sequence."""


class QueuedRequest(Protocol):
    """A request in an instance, as policies see it."""

    @property
    def request_id(self) -> int: ...
    @property
    def arrival_ns(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def priority(self) -> int:
        """Priority of the request. Higher priorities go first. 0 unless the scenario gives the request's class a
        priority.
        """


class QueuedPrefill(QueuedRequest, Protocol):
    """A waiting prompt. No forward has taken tokens of the prompt since it last joined the queue."""

    @property
    def prompt(self) -> TokenSequence: ...
    @property
    def entry(self) -> int:
        """Sequence number that the prompt got when it last joined the queue. Prompts that joined later have higher
        numbers.
        """

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the cache must hold or a forward must compute: the prompt, and outputs whose KV was
        lost.
        """

    @property
    def num_asked_tokens(self) -> int:
        """Maximum number of output tokens that the client requests. Prefill instances, as in SGLang
        (disaggregation/prefill.py:482), and aggregated instances of vLLM always see 1.
        """


class InstanceView(Protocol):
    """View of an instance for all its policies."""

    @property
    def now_ns(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def num_available_pages(self) -> int:
        """Number of free pages and of cached pages that no request uses."""


class PrefillView(InstanceView, Protocol):
    """View of a prefill or aggregated instance for its prefill policy."""

    @property
    def waiting(self) -> Collection[QueuedPrefill]:
        """Waiting prompts in queue order. A prompt joins the end of the queue: on a prefill instance after decode's
        grant, or on arrival if it may begin without a grant; on an aggregated instance on arrival or retraction.
        Preempted prompts of vLLM, and prompts that stop because others have a grant, join at the front. A policy that
        sorts by cached tokens also sorts the queue.
        """

    def num_cached_tokens(self, request: QueuedPrefill) -> int:
        """Number of the request's first tokens that the prefix cache holds now: of the prompt, and of outputs whose KV
        was lost. 0 without a prefix cache. Each call walks the tree.
        """

    def use_cached_tokens(self, request: QueuedPrefill) -> int:
        """Number of the request's first tokens that the prefix cache holds now. With EngineRules.computes_last_token,
        the request's last token does not count. Except with vLLM's prefix cache, the call marks the tokens as used, so
        that they are not evicted soon.
        """

    def cached_path(self, request: QueuedPrefill) -> tuple[int, ...]:
        """Path of the prompt's cached prefix in the prefix tree, from the root on. Each number is the index of a node
        among its siblings, in the order of the tree's list of children. A node that matches only partly is left out.
        Empty without a prefix cache.
        """

    def num_waited_tokens(self, request: QueuedPrefill) -> int:
        """Number of prompt tokens, of all requests together, that forwards have taken since this request joined the
        queue.
        """


class SendingPrefill(Protocol):
    """A prompt whose KV is being computed and sent."""

    @property
    def request_id(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int:
        """Number of the prompt's first tokens whose KV prefill had on the GPU or in its host cache when the prompt
        began.
        """

    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_sent_tokens(self) -> int: ...


class QueuedDecode(QueuedRequest, Protocol):
    """A request of a decode or an aggregated instance, as policies see it: queued, waiting for its KV, ready to run,
    running or retracted.
    """

    @property
    def num_output_tokens(self) -> int: ...
    @property
    def max_output_tokens(self) -> int: ...


class DecodeView(InstanceView, Protocol):
    """View of a decode instance for its policies, and of an aggregated instance for its preemption policy."""

    @property
    def num_active(self) -> int:
        """Number of requests that run, are ready to run, or wait for their KV. A decode instance also counts requests
        that have ended or failed, but that SGLang still counts until its next check: then the number exceeds
        len(active).
        """

    @property
    def num_ahead_tokens(self) -> int:
        """Number of tokens beyond its present KV for which a running request needs pages before a decode step: 1, or
        more with speculative decoding.
        """

    @property
    def num_running_tokens(self) -> int:
        """Number of prompt and output tokens of all requests in the batch, and of the ended requests that `running`
        lists.
        """

    @property
    def resume_unit_tokens(self) -> int:
        """A retracted request needs room for its tokens, rounded up to a multiple of this number: the page size, or 1
        in SGLang 0.5.12.
        """

    @property
    def running(self) -> Sequence[QueuedDecode]:
        """Running requests in batch order, then ended requests that SGLang still counts as running. vLLM: running
        requests and partly computed prompts, in the order in which they began to run. The call takes time in proportion
        to the batch.
        """

    @property
    def active(self) -> Collection[QueuedDecode]:
        """Requests that run, are ready to run, or wait for their KV. The call takes time in proportion to their
        number.
        """

    @property
    def retracted(self) -> Collection[QueuedDecode]: ...


@dataclass(slots=True)
class Candidate:
    """A request about which an admission policy decides: the first request of the admission queue, whose cached prefix
    is already locked, or the first retracted request (`resumes`).
    """

    request: QueuedDecode
    num_tokens: int
    """Number of tokens whose KV the decode instance must hold before the request can run."""
    num_cached_tokens: int
    """Number of prompt tokens that decode's prefix cache holds. 0 for a retracted request, which does not use the
    prefix cache."""
    num_new_pages: int
    """Number of pages to allocate for the request's uncached tokens."""
    resumes: bool = False
    """True: the request was retracted, and would resume."""


class CachedLeaf(Protocol):
    """A node of the prefix tree that may be evicted: a leaf that no request uses or, with vLLM, a node whose users all
    have their own copies of its pages.
    """

    @property
    def last_access(self) -> int:
        """Serial number of the last access to the leaf. The tree counts its accesses, so a later access has a higher
        number.
        """

    @property
    def num_hits(self) -> int:
        """Number of uses of the leaf by requests."""

    @property
    def born(self) -> int:
        """Serial number of the leaf's insertion, on the same scale as last_access: a later insertion has a higher
        number.
        """

    @property
    def num_pages(self) -> int: ...


class InstanceLoad(Protocol):
    """Load of one instance, as the router knows it. If servers choose among their data-parallel ranks themselves, the
    router's instances are servers.
    """

    @property
    def instance_id(self) -> str: ...
    @property
    def num_requests(self) -> int:
        """Number of unfinished requests that were routed to the instance. With router.counts: streams, only requests
        whose clients receive tokens count.
        """

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens of the requests that num_requests counts."""

    @property
    def num_sessions(self) -> int:
        """Number of sessions with unfinished requests at the instance. 0 if the policy lacks `reads_sessions =
        True`, and always 0 with router.counts: streams.
        """

    @property
    def num_pages(self) -> int:
        """Number of whole pages of the instance's unfinished prompts. A page that n prompts share counts n times, as in
        Dynamo's decode router (assume_kv_reuse is false there). 0 unless the policy has `is_kv_aware = True`.
        """

    @property
    def num_queued(self) -> int:
        """Number of waiting and retracted requests when the router last read metrics. 0 if no routing policy of the
        router has a metrics_interval_ns above 0.
        """

    @property
    def page_use(self) -> float:
        """Share of the instance's pages that requests held when the router last read metrics. 0 if no routing policy of
        the router has a metrics_interval_ns above 0.
        """


class RoutingView(Protocol):
    """View of the instances of one role for routing policies.

    Only a policy that has `is_kv_aware = True` may use `num_uncached_tokens` and `num_pages_with`; for other policies
    they raise PolicyError. For a policy with `is_kv_aware = True`, the router remembers prompts in pages of the
    instances' page size, up to the number of tokens that an instance's KV pool holds. If policies have a
    `metrics_interval_ns` above 0, the router reads all instances' metrics at the shortest of these intervals.
    """

    @property
    def now_ns(self) -> int: ...
    @property
    def role(self) -> str:
        """Role of the instances: "prefill", "decode" or "aggregated"."""

    @property
    def page_size(self) -> int:
        """Page size in tokens of the router's memory of prompts."""

    @property
    def session(self) -> int:
        """Id of the request's session. -1: the request has no session, or the policy lacks `reads_sessions = True`."""

    @property
    def instances(self) -> Sequence[InstanceLoad]:
        """Instances of the role that accept requests. Never empty, and always in the same order. On a retry, the last
        attempt's instance is left out if another instance accepts requests.
        """

    def num_cached_tokens(self, prompt: TokenSequence, instance_id: str) -> int:
        """Number of the prompt's first tokens, in whole pages, that the router remembers having sent to this instance.
        The router begins to remember prompts when a policy first asks for them.
        """

    def holders(self, prompt: TokenSequence) -> Collection[str]:
        """Ids of the instances to which the router remembers having sent a prompt with the same first page. For other
        instances, num_cached_tokens is 0. Use `in` only: the order of the ids differs between processes.
        """

    def num_uncached_tokens(self, instance_id: str) -> int:
        """Number of prompt tokens of routed requests that this instance still has to compute. Excludes tokens that the
        router assumed to be cached when it routed the request. A partly computed prompt counts like one that has not
        begun.
        """

    def tier_tokens(self, instance_id: str) -> tuple[int, int]:
        """Numbers of the prompt's tokens that this instance had cached when the request arrived, as its KV events say:
        (first tokens in GPU memory, further tokens behind these in host memory). (0, 0) for decode instances, and
        unless the policy has `reads_caches = True`. A policy with `reads_caches = True` also has a method
        num_credited_tokens.
        """

    def session_instance(self, ttl_ns: int) -> str:
        """Id of the instance that serves this request's session. Empty: the session is new, or its last request ended
        at least ttl_ns ago, or the request has no session, or the policy lacks `reads_sessions = True`.
        """

    def num_pages_with(self, prompt: TokenSequence, instance_id: str) -> int:
        """Number of distinct whole pages of the instance's unfinished prompts, if this prompt joins them."""


class WaitingRequest(Protocol):
    """An arriving request, or a request that waits for its first token, as the router sees it."""

    @property
    def request_id(self) -> int: ...
    @property
    def num_tokens(self) -> int:
        """Length of the prompt in tokens."""

    @property
    def priority(self) -> int: ...


class HeldRequest(Protocol):
    """A request that begins to wait in the router's queue."""

    @property
    def prompt(self) -> TokenSequence: ...
    @property
    def priority(self) -> int: ...


class SheddingView(Protocol):
    """View of the router for shedding policies, at the moment when a new request arrives."""

    @property
    def waiting(self) -> Sequence[WaitingRequest]:
        """Requests whose clients have no token yet, in the order in which they were routed or began to wait in the
        router's queue. Requests that wait for a retry are left out.
        """


class PairView(Protocol):
    """View of a prompt for a disaggregation policy. A decode instance is chosen already, and no prefill instance
    yet.
    """

    @property
    def num_decode_cached_tokens(self) -> int:
        """Number of the prompt's first tokens that the router remembers having sent to the chosen decode instance."""

    @property
    def decode(self) -> InstanceLoad:
        """Load of the chosen decode instance, without this prompt: num_requests and num_tokens. All other numbers are
        0.
        """

    @property
    def prefill(self) -> Sequence[InstanceLoad]:
        """Loads of the prefill instances that accept requests."""


class RoleSeen(Protocol):
    """View of the servers of one role, for scaling policies."""

    @property
    def num_servers(self) -> int:
        """Number of servers that serve in the role, start up in the role, or drain in order to change to the role.
        Excludes servers that drain in order to leave the role.
        """

    @property
    def num_serving(self) -> int:
        """Number of servers that serve or drain in the role."""

    @property
    def num_requests(self) -> int:
        """Number of unfinished requests at the role's servers that serve or drain."""

    @property
    def num_queued(self) -> int: ...
    @property
    def page_use(self) -> float:
        """Mean share of a server's KV capacity that requests hold (InstanceSeen.page_use), over the servers that serve
        or drain in the role. 0 if there are none.
        """


class ScalingView(Protocol):
    """View for scaling policies: the servers of both roles, and counts since the policy's last decision."""

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
        """Number of output tokens of requests that finished since the last decision."""

    @property
    def mean_ttft_ns(self) -> float:
        """Mean TTFT in ns of requests that finished since the last decision; 0 if there are none."""

    @property
    def mean_tpot_ns(self) -> float: ...
