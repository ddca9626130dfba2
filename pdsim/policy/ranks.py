"""Policies by which a server with data-parallel attention picks a rank for each request.

Names are SGLang's (--load-balance-method; 0.5.23, managers/data_parallel_controller.py and arg_groups/serving_hook.py).
"""

from operator import attrgetter
from typing import Literal

from pdsim.dataclass import dataclass
from pdsim.policy.protocols import RoutingPolicy
from pdsim.policy.routing import RandomChoice, RoundRobin
from pdsim.policy.views import RoutingView, TokenSequence

LoadBalanceMethod = Literal["round_robin", "follow_bootstrap_room", "total_requests", "total_tokens"]

_REQUESTS = attrgetter("num_requests")
_TOKENS = attrgetter("num_tokens", "num_requests")


@dataclass
class FewestRequests:
    """Picks the rank with the fewest requests. Ties go to the first rank (DPBudget.dispatch)."""

    def pick(self, prompt: TokenSequence, view: RoutingView) -> str:
        return min(view.instances, key=_REQUESTS).instance_id


@dataclass
class FewestTokens:
    """Picks the rank with the fewest tokens, then with the fewest requests. Ties go to the first rank
    (DPBudget.dispatch).
    """

    def pick(self, prompt: TokenSequence, view: RoutingView) -> str:
        return min(view.instances, key=_TOKENS).instance_id


def rank_policy(method: LoadBalanceMethod, seed: int) -> RoutingPolicy:
    """Returns the policy by which a server picks one of its data-parallel ranks for a request. With method
    follow_bootstrap_room, the rank is random: SGLang derives it from the request's bootstrap room, a number that the
    gateway draws at random.
    """
    match method:
        case "round_robin":
            return RoundRobin()
        case "follow_bootstrap_room":
            return RandomChoice(seed)
        case "total_requests":
            return FewestRequests()
        case "total_tokens":
            return FewestTokens()
