"""The queue of Dynamo's KV router: requests wait in the router while all instances that compute prompts are busy.

Rule of ai-dynamo 1.6.1: lib/kv-router/src/scheduling/queue.rs (should_queue, all_workers_prefill_busy_with) and
policy.rs (enqueue_key); options in components/src/dynamo/common/configuration/groups/kv_router_args.py.
"""

from typing import Literal

from pdsim.dataclass import dataclass
from pdsim.policy.views import HeldRequest, RoutingView


@dataclass
class BusyThreshold:
    """Holds requests back while all instances are busy, so that the router picks an instance later and knows more. An
    instance is busy if the uncached prompt tokens that it still has to compute exceed a multiple of the tokens of a
    forward (--router-queue-threshold, --router-queue-policy). Needs the routing policy dynamo_kv.
    """

    threshold: float
    """An instance is busy if it has more prompt tokens to compute than this number times the maximum tokens of a
    forward of one rank (vllm: chunked_prefill_tokens; sglang: max_prefill_tokens). 0: an instance with any prompt to
    compute is busy.
    """
    order: Literal["fcfs", "lcfs", "wspt"] = "fcfs"
    """Order of the held requests. fcfs: by arrival; a request of priority 5 goes before requests that came up to 5 s
    earlier. lcfs: the last to arrive goes first; a priority of 5 counts like an arrival 5 s later. wspt: the request
    with the fewest uncached prompt tokens goes first; tokens are divided by 1 plus the priority.
    """

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise ValueError(f"threshold is at least 0, found {self.threshold}")

    def all_busy(self, view: RoutingView, forward_tokens: int) -> bool:
        most = self.threshold * forward_tokens
        return all(view.num_uncached_tokens(load.instance_id) > most for load in view.instances)

    def rank(self, request: HeldRequest, view: RoutingView) -> float:
        ahead = max(0, request.priority)
        if self.order != "wspt":
            arrival_s = view.now_ns / 1e9
            return (arrival_s if self.order == "fcfs" else -arrival_s) - ahead
        holders = view.holders(request.prompt)
        names = [load.instance_id for load in view.instances if load.instance_id in holders]
        cached = max([view.num_cached_tokens(request.prompt, name) for name in names], default=0)
        return max(1, len(request.prompt) - cached) / (1 + ahead)
