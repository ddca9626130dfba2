"""Protocols of policies, one for each decision. A policy proposes; the core checks and applies.

A policy is a dataclass whose fields are its settings. It may keep private state, because every instance gets its own
copy. It must not change objects behind a view.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from pdsim.policy import views


class Pick(NamedTuple):
    """A policy's choice: compute this prompt next, at most max_tokens of it. The core cuts the chunk to the budgets and
    the pages.
    """

    request_id: int
    max_tokens: int | None = None


class HoldUntil(NamedTuple):
    """A policy's choice: begin no new prompt before this time or the next message, although prompts wait."""

    time_ns: int


class PrefillPolicy(Protocol):
    """Decides which prompts the next forward computes."""

    def select(self, view: views.PrefillView) -> Iterable[Pick] | HoldUntil:
        """Waiting prompts in the order in which to begin them. The core stops at the first prompt that does not fit. A
        partly computed prompt always continues first, and is not among the waiting prompts. Return a generator if the
        order is expensive: the core pulls no more picks than it can use.
        """


class Admitted(NamedTuple):
    """Answer of an admission policy: reserve the pages and ask prefill to compute."""


ADMITTED = Admitted()


class Deferred(NamedTuple):
    """Answer of an admission policy: not now. The policy is asked again after a message, the end of a request, or this
    number of decode steps.
    """

    ask_again_steps: int | None = 1
    """Number of decode steps after which to ask again. None: decode steps alone cannot change the answer."""


class AdmissionPolicy(Protocol):
    """Decides whether the head of a decode instance's queue gets its pages now."""

    def admit(self, candidate: views.Candidate, view: views.DecodeView) -> Admitted | Deferred: ...


class PreemptionPolicy(Protocol):
    """Decides which request loses its pages when the next decode step does not fit."""

    def victim(self, view: views.DecodeView) -> int:
        """Returns the request_id of one of view.running."""


class EvictionPolicy(Protocol):
    """Decides which unused leaf of the prefix cache is evicted first."""

    def key(self, leaf: views.CachedLeaf) -> Any:
        """Sort key of a leaf; smaller keys are evicted first. The key may depend on the leaf alone."""


class TransferPolicy(Protocol):
    """Decides how much of a prompt's KV to send as it begins, and after each computed chunk."""

    def send_until(self, request: views.SendingPrefill) -> int:
        """The number of tokens to send so far, at most request.num_computed_tokens. The end of a prompt is
        always sent.
        """


class RoutingPolicy(Protocol):
    """Chooses the instance of one role. Prefill and decode have separate policies, as in SGLang's gateway."""

    def pick(self, prompt: views.TokenSequence, view: views.RoutingView) -> str:
        """Returns the instance_id of one of view.instances."""


class SheddingPolicy(Protocol):
    """Decides which request the router refuses when a request arrives."""

    def shed(self, request: views.WaitingRequest, view: views.SheddingView) -> int | None:
        """Id of the request to refuse: the arriving one, or one of view.waiting. None: refuse no request."""


class DisaggregationPolicy(Protocol):
    """Decides where a prompt is computed: on a prefill instance, or on its decode instance."""

    def is_remote(self, prompt: views.TokenSequence, view: views.PairView) -> bool:
        """True: a prefill instance computes the prompt, and sends its KV. False: the decode instance computes it."""


class Servers(NamedTuple):
    """Numbers of servers that each role should have."""

    prefill: int
    decode: int


class ScalingPolicy(Protocol):
    """Decides how many servers prefill and decode, at each interval of an autoscaler."""

    def servers(self, view: views.ScalingView) -> Servers:
        """Returns at least one server of each role, and at most view.max_servers together."""
