"""The KV router of Dynamo. It picks the instance with the lowest cost, counted in blocks. A block is a page. With
router_temperature, it draws an instance at random instead, where lower costs are more probable.

Rule and defaults of ai-dynamo 1.6.1: lib/kv-router/src/scheduling/selector/default.rs (worker_logit,
softmax_sample_index, minimum_cost_index at 07a6c9c) and components/src/dynamo/common/configuration/groups/
kv_router_args.py. Conformance: experiments/conformance/dynamo.
"""

from collections.abc import Sequence
from dataclasses import field
from itertools import accumulate
from math import ceil, exp, floor, isfinite
from typing import ClassVar

from pdsim.dataclass import dataclass
from pdsim.policy.draws import Draws
from pdsim.policy.views import InstanceLoad, RoutingView, TokenSequence

_FINE = 1 << 53


@dataclass
class DynamoKv:
    """Picks the instance with the lowest cost: weighted blocks to compute plus blocks in use. Ties are broken at
    random.

    On prefill only blocks to compute count, and on decode only blocks in use (types.rs, build_decode_router_override;
    prefill routers have router_track_active_blocks false). On aggregated instances, a block that several prompts share
    counts once.
    """

    overlap_score_credit: float = 1.0
    """Number of blocks by which a cached block lowers the cost."""
    overlap_score_credit_decay: float = 0.0
    """Lowers the credit that an instance gets for cached blocks of the prompt (with kv_events: for blocks in GPU
    memory), if the instance has more uncached prompt tokens to compute than the instance with the fewest. 1: the credit
    is halved if the difference is as large as the prompt.
    """
    prefill_load_scale: float = 1.0
    """Weight of blocks to compute, relative to blocks in use."""
    decode_active_request_weight: float = 0.0
    """Additional cost, in blocks, of each unfinished request at an instance."""
    kv_events: bool = False
    """True: the router knows by KV events which blocks the instances have, in GPU and in host memory
    (--router-kv-events, Dynamo's default). False: the router remembers the prompts that it sent."""
    host_cache_hit_weight: float = 0.75
    """Discount on the cost, in blocks, for each block of the prompt that only host memory has, behind those in GPU
    memory (lib/kv-router/src/scheduling/overlap.rs). With kv_events only. Blocks in storage give no discount, because
    SGLang's events name GPU and host memory only (0.5.23, mem_cache/unified_cache/unified_tree_core.py:2438).
    """
    router_temperature: float = 0.0
    """Temperature of a softmax over costs that are scaled to [0, 1]. 0: the instance with the lowest cost is picked."""
    seed: int = 0
    """Seed of the random choices."""
    is_kv_aware: ClassVar[bool] = True
    _draws: Draws = field(default_factory=Draws, init=False)

    def __post_init__(self) -> None:
        settings = {name: value for name, value in vars(self).items() if isinstance(value, float)}
        for name, value in settings.items():
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"{name} is at least 0, found {value}")

    @property
    def reads_caches(self) -> bool:
        return self.kv_events

    def num_credited_tokens(self, num_device_tokens: int, num_host_tokens: int) -> int:
        """Number of prompt tokens that the router does not count as work of the instance that gets the prompt.
        num_device_tokens: tokens cached in GPU memory. num_host_tokens: further tokens behind these in host memory.
        """
        return floor(num_device_tokens + self.host_cache_hit_weight * num_host_tokens + 0.5)

    def pick(self, prompt: TokenSequence, view: RoutingView) -> str:
        costs = self.costs(prompt, view)
        return view.instances[self._sampled(costs) if self.router_temperature else self._least(costs)].instance_id

    def costs(self, prompt: TokenSequence, view: RoutingView) -> list[float]:
        """Returns the cost in blocks of each instance in view.instances, in their order."""
        num_blocks, weight = len(prompt) // view.page_size, self.decode_active_request_weight
        used: list[int] = []
        for load in view.instances:
            if view.role == "decode":
                used.append(load.num_pages + num_blocks)
            else:
                used.append(view.num_pages_with(prompt, load.instance_id) if view.role == "aggregated" else 0)
        extra = [blocks + weight * load.num_requests for blocks, load in zip(used, view.instances, strict=True)]
        if view.role == "decode":
            return extra
        return [blocks + other for blocks, other in zip(self._to_compute(prompt, view), extra, strict=True)]

    def _to_compute(self, prompt: TokenSequence, view: RoutingView) -> list[float]:
        """Returns, for each instance in view.instances, the weighted number of blocks that it has to compute if it gets
        this prompt.
        """
        page = view.page_size
        holders = () if self.kv_events else view.holders(prompt)
        queued = [view.num_uncached_tokens(load.instance_id) for load in view.instances]
        least, size = min(queued), ceil(len(prompt) / page)

        def overlap(name: str) -> tuple[int, int]:
            if self.kv_events:
                device, host = view.tier_tokens(name)
                return device // page, host // page
            return (view.num_cached_tokens(prompt, name) // page if name in holders else 0), 0

        def blocks(load: InstanceLoad, tokens: int) -> float:
            device, host = overlap(load.instance_id)
            credit = self.overlap_score_credit
            if self.overlap_score_credit_decay:
                credit /= 1 + self.overlap_score_credit_decay * ((tokens - least) / page / size)
            credit_blocks = credit * device + self.host_cache_hit_weight * host
            return self.prefill_load_scale * max(0.0, (tokens + len(prompt)) / page - credit_blocks)

        return [blocks(load, tokens) for load, tokens in zip(view.instances, queued, strict=True)]

    def _least(self, costs: Sequence[float]) -> int:
        least = min(costs)
        rows = [row for row, cost in enumerate(costs) if cost == least]
        return self._draws.one_of(rows, self.seed)

    def _sampled(self, costs: Sequence[float]) -> int:
        least, span = min(costs), max(costs) - min(costs)
        weights = [exp(-(cost - least) / span / self.router_temperature) if span else 1.0 for cost in costs]
        *most, total = accumulate(weights)
        drawn = self._draws.below(_FINE, self.seed) / _FINE * total
        return next((row for row, until in enumerate(most) if drawn < until), len(most))
