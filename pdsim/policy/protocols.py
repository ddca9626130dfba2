"""Protocols of policies, one for each decision. A policy proposes; the core checks and applies.

A policy is a dataclass whose fields are its settings. It may keep private state, because every instance gets its own
copy. It must not change objects that a view returns.
"""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol

from pdsim.dataclass import dataclass
from pdsim.policy import views


@dataclass(frozen=True, slots=True)
class Pick:
    """One choice of a prefill policy: compute this prompt next, at most max_tokens of it. None: no such limit. The core
    makes the chunk shorter if tokens or pages are lacking.
    """

    request_id: int
    max_tokens: int | None = None


class HoldUntil(NamedTuple):
    """Answer of a prefill policy: begin no prompt before time_ns or the next message, although prompts wait."""

    time_ns: int


class PrefillPolicy(Protocol):
    """Decides which prompts the next forward begins."""

    def select(self, view: views.PrefillView) -> Iterable[Pick] | HoldUntil:
        """Returns waiting prompts in the order in which to begin them, or HoldUntil to begin none for now. The core
        stops at the first prompt that does not fit. A partly computed prompt always continues first, and is not among
        the waiting prompts. If sorting is expensive, return a generator: the core takes no more picks than it needs.
        """


class Admitted(NamedTuple):
    """Answer of an admission policy: reserve the pages, and ask prefill to compute the prompt."""


ADMITTED = Admitted()


class Deferred(NamedTuple):
    """Answer of an admission policy: do not admit the request now. The core asks again after a message, the end of a
    request, or ask_again_steps decode steps.
    """

    ask_again_steps: int | None = 1
    """Number of decode steps after which the core asks the policy again about the request. None: decode steps alone
    cannot change the answer.
    """


class AdmissionPolicy(Protocol):
    """Decides whether the first queued request of a decode instance gets its pages now."""

    def admit(self, candidate: views.Candidate, view: views.DecodeView) -> Admitted | Deferred: ...


class PreemptionPolicy(Protocol):
    """Decides which request loses its pages if the pool has too few for the next decode step."""

    def victim(self, view: views.DecodeView) -> int:
        """Returns the request_id of the request to preempt, one of view.running."""


class EvictionPolicy(Protocol):
    """Decides which unused leaf of the prefix cache is evicted first."""

    def key(self, leaf: views.CachedLeaf) -> Any:
        """Returns the sort key of a leaf. Leaves with smaller keys are evicted first. The key may depend on the leaf
        alone.
        """


class TransferPolicy(Protocol):
    """Decides how much of a prompt's KV is sent when the prompt begins and after each computed chunk."""

    def send_until(self, request: views.SendingPrefill) -> int:
        """Returns how many of the prompt's first tokens may have their KV sent by now, at most
        request.num_computed_tokens. KV that was sent already is included. After the last chunk all KV is sent in any
        case.
        """


Scope = Literal["agent", "siblings", "run"]
"""Which requests of an agent run stay together as one session. agent: the requests of each agent. siblings: the main
agent's requests are one session, and the requests of all sub-agents are another. run: all requests of the run.
"""


class RoutingPolicy(Protocol):
    """Chooses an instance of one role. Prefill and decode have separate policies, as in SGLang's gateway."""

    def pick(self, prompt: views.TokenSequence, view: views.RoutingView) -> str:
        """Returns the instance_id of the chosen instance, one of view.instances. If a role has only one instance, the
        router does not call this method.
        """


class SheddingPolicy(Protocol):
    """Decides which request the router refuses, if any, when a request arrives."""

    def shed(self, request: views.WaitingRequest, view: views.SheddingView) -> int | None:
        """Returns the id of the request to refuse: the arriving request, or one of view.waiting. None: no request is
        refused.
        """


class QueuePolicy(Protocol):
    """Decides when arriving requests wait in the router, and in which order they leave it."""

    def all_busy(self, view: views.RoutingView, forward_tokens: int) -> bool:
        """Returns True if no instance may get another request now. forward_tokens: maximum number of prompt tokens in
        one forward.
        """

    def rank(self, request: views.HeldRequest, view: views.RoutingView) -> float:
        """Returns the rank of a request that begins to wait. The request with the lowest rank leaves the router's queue
        first. Requests of equal rank leave in the order of arrival.
        """


class DisaggregationPolicy(Protocol):
    """Decides where a prompt is computed: on a prefill instance, or on its decode instance."""

    def is_remote(self, prompt: views.TokenSequence, view: views.PairView) -> bool:
        """Returns True if a prefill instance computes the prompt and sends its KV, False if the decode instance
        computes the prompt.
        """


class Servers(NamedTuple):
    """Number of servers of each role."""

    prefill: int
    decode: int


class ScalingPolicy(Protocol):
    """Decides at each interval of an autoscaler how many servers prefill and how many decode."""

    def servers(self, view: views.ScalingView) -> Servers:
        """Returns the wanted number of servers of each role: each at least one, together at most view.max_servers."""
