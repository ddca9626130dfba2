"""The endpoint picker of llm-d. A filter excludes instances, weighted scorers score the remaining instances, and the
highest score wins.

Rules of llm-d-router, below pkg/epp/framework/plugins: scheduling/scorer/{prefix/plugin.go,queuedepth/queue.go,
kvcacheutilization/kvcache_utilization.go,activerequest/active_request.go,tokenload/token_load.go} at 2342697,
scheduling/filter/prefixcacheaffinity/plugin.go at 066c20e, scheduling/picker/maxscore/picker.go at 0fa77a0 and
requestcontrol/dataproducer/inflightload at 2f1de8c, scheduling/scorer/preciseprefixcache at 83a9aea (with
kvblock_scorer.go of llm-d-kv-cache), scheduling/scorer/sessionaffinity/session_id_header_strategy.go at 2edc268. Each
score lies in [0, 1].
"""

from collections.abc import Callable, Sequence
from dataclasses import field
from math import isfinite
from typing import ClassVar

from pdsim.dataclass import dataclass
from pdsim.policy.draws import Draws
from pdsim.policy.sessions import BoundSessions
from pdsim.policy.views import InstanceLoad, RoutingView, TokenSequence

_SECOND_NS = 1_000_000_000
_MS_NS = 1_000_000
_SWEEP_NS = 30 * _SECOND_NS
"""Interval at which the router removes sessions that were not used for a long time (evictionSweepSeconds)."""
_FULL_QUEUE_TOKENS = 4_194_304
"""Number of uncached prompt tokens at an instance for which token-load-scorer gives 0 (queueThresholdTokens)."""


@dataclass
class _Sessions(BoundSessions):
    """Remembers the instance of each session, and gives this instance the highest score."""

    turn: int = 0
    """How often the score 1 went to one of the instances with the fewest sessions, for taking turns."""
    looked_ns: int = 0
    """Time in ns for which the last removal of old sessions was due, a multiple of _SWEEP_NS."""

    def scores(self, view: RoutingView, offered: Sequence[InstanceLoad], ttl_ns: int) -> list[float]:
        """Returns a score for each instance of `offered`: 1 for the session's instance, 0 for every other instance. If
        the request has no session, its session is new, or the session's instance is not offered, the score 1 goes to
        one of the instances with the fewest sessions, to each of these in turn. ttl_ns: a session is forgotten if more
        than this time has passed since its last request, at the next removal (every _SWEEP_NS); 0: never.
        """
        looked_ns = view.now_ns // _SWEEP_NS * _SWEEP_NS
        if looked_ns > self.looked_ns and ttl_ns:
            self.looked_ns = looked_ns
            self.forget_before(looked_ns - ttl_ns)
        names = [load.instance_id for load in offered]
        wanted = self.instance_of(view.session)
        if wanted not in names:
            equal = self.with_fewest(sorted(names))
            self.turn += 1
            wanted = equal[self.turn % len(equal)]
        return [float(name == wanted) for name in names]


@dataclass
class LlmD:
    """Picks the instance with the highest weighted sum of scores. Ties are broken at random.

    The default weights are those of the sample deploy/config/pd-epp-config.yaml. llm-d's guide to prefill-decode
    disaggregation instead filters by affinity, and scores by token_load_scorer on prefill and by active_request_scorer
    on decode.
    """

    prefix_cache_scorer: float = 2.0
    """Weight of a score for cached tokens: the cached share of the prompt."""
    queue_scorer: float = 1.0
    """Weight of a score for short queues: 1 for the shortest queue, 0 for the longest."""
    kv_cache_utilization_scorer: float = 0.0
    """Weight of a score for free pages: the share of pages that no request holds."""
    active_request_scorer: float = 0.0
    """Weight of a score for few requests: 1 for none, 0 for the instance with the most."""
    token_load_scorer: float = 0.0
    """Weight of a score for few tokens to compute, including this prompt's: 1 for none, 0 for 4,194,304 (128 times
    32,768)."""
    precise_prefix_cache_scorer: float = 0.0
    """Weight of a score for cached tokens by KV events: the share of the prompt's blocks in GPU memory, plus cpu_weight
    times the share of blocks behind these in host memory."""
    cpu_weight: float = 0.8
    """Score of a block in host memory, relative to a block in GPU memory."""
    session_affinity_scorer: float = 0.0
    """Weight of a score for the instance that served the session's last request: 1 for this instance. If the session is
    new, or this instance is not offered, 1 for the instance with the fewest sessions (algorithm session_id_header)."""
    session_ttl_ns: int = 600 * _SECOND_NS
    """A session is forgotten if this time has passed since its last request arrived. The router looks for such sessions
    every 30 s. 0: sessions are never forgotten.
    """
    affinity_threshold: float = 0.0
    """Minimum cached share of a prompt. If some instances reach it, only these instances are scored
    (prefix-cache-affinity-filter; 0.8 in the guide). 0: all instances are scored."""
    max_ttft_penalty_ns: int = 18 * _SECOND_NS
    """Maximum additional queueing time for a cached prompt: by how much the shortest queueing time among the instances
    that reach affinity_threshold may exceed the shortest among the other instances. If the difference is larger, all
    instances are scored. 0: no maximum.
    """
    peak_prefill_tokens_per_s: float = 15928.0
    """Prefill rate in tokens per second that converts uncached tokens at an instance into queueing time."""
    refresh_metrics_interval_ns: int = 50 * _MS_NS
    """Interval at which the router reads queue length and page use of the instances."""
    seed: int = 0
    """Seed of the random choices."""
    is_kv_aware: ClassVar[bool] = True
    _draws: Draws = field(default_factory=Draws, init=False)
    _sessions: _Sessions = field(default_factory=_Sessions, init=False)

    def __post_init__(self) -> None:
        for name in (*_SCORERS, "session_affinity_scorer", "cpu_weight", "affinity_threshold"):
            if not (isfinite(weight := getattr(self, name)) and weight >= 0):
                raise ValueError(f"{name} is at least 0, found {weight}")
        if self.affinity_threshold > 1:
            raise ValueError(f"affinity_threshold is at most 1, found {self.affinity_threshold}")
        if self.max_ttft_penalty_ns < 0 or not self.peak_prefill_tokens_per_s > 0:
            raise ValueError(f"needs max_ttft_penalty >= 0 and peak_prefill_tokens > 0, found {self}")
        if self.refresh_metrics_interval_ns < _MS_NS or self.session_ttl_ns < 0:
            raise ValueError(f"needs refresh_metrics_interval >= 1 ms and session_ttl >= 0, found {self}")

    @property
    def metrics_interval_ns(self) -> int:
        """Interval in ns at which the router reads metrics. 0: no scorer with a weight needs metrics."""
        return self.refresh_metrics_interval_ns if self.queue_scorer or self.kv_cache_utilization_scorer else 0

    @property
    def reads_caches(self) -> bool:
        return self.precise_prefix_cache_scorer > 0

    @property
    def reads_sessions(self) -> bool:
        return self.session_affinity_scorer > 0

    def num_credited_tokens(self, num_device_tokens: int, num_host_tokens: int) -> int:
        """Number of prompt tokens that the router does not count as work of the instance that gets the prompt:
        num_device_tokens, plus cpu_weight times num_host_tokens, rounded down.

        num_device_tokens: the prompt's first tokens that GPU memory has. num_host_tokens: the following tokens that
        only host memory has.
        """
        return int(num_device_tokens + self.cpu_weight * num_host_tokens)

    def pick(self, prompt: TokenSequence, view: RoutingView) -> str:
        offered = self._filtered(prompt, view)
        scores = self.scores(prompt, view, offered)
        if weight := self.session_affinity_scorer:
            scores = _plus(scores, weight, self._sessions.scores(view, offered, self.session_ttl_ns))
        best = max(scores)
        rows = [row for row, score in enumerate(scores) if score == best]
        row = self._draws.one_of(rows, self.seed)
        self._sessions.bind(view.session, offered[row].instance_id, view.now_ns)
        return offered[row].instance_id

    def scores(self, prompt: TokenSequence, view: RoutingView, offered: Sequence[InstanceLoad]) -> list[float]:
        """Returns the weighted sum of the scores of each instance in `offered`. The score for the session
        (session_affinity_scorer) is not included; `pick` adds it.
        """
        total = [0.0] * len(offered)
        for name, scorer in _SCORERS.items():
            if weight := getattr(self, name):
                total = _plus(total, weight, scorer(prompt, view, offered))
        if weight := self.precise_prefix_cache_scorer:
            total = _plus(total, weight, self._cached_shares(prompt, view, offered))
        return total

    def _cached_shares(self, prompt: TokenSequence, view: RoutingView, offered: Sequence[InstanceLoad]) -> list[float]:
        page, num_blocks = view.page_size, max(1, len(prompt) // view.page_size)
        tiers = [view.tier_tokens(load.instance_id) for load in offered]
        return [(device // page + self.cpu_weight * (host // page)) / num_blocks for device, host in tiers]

    def _filtered(self, prompt: TokenSequence, view: RoutingView) -> Sequence[InstanceLoad]:
        if not self.affinity_threshold or len(view.instances) == 1:
            return view.instances
        shares = self._cached_shares if self.reads_caches else _prefix_cache
        cached = shares(prompt, view, view.instances)
        sticky = [one for one, share in zip(view.instances, cached, strict=True) if share >= self.affinity_threshold]
        others = [one for one in view.instances if one not in sticky]
        if not sticky or not others or not self.max_ttft_penalty_ns:
            return sticky or view.instances
        queued, elsewhere = (min(_in_flight(view, one) for one in ones) for ones in (sticky, others))
        penalty_ns = (queued - elsewhere) / self.peak_prefill_tokens_per_s * _SECOND_NS
        return view.instances if penalty_ns > self.max_ttft_penalty_ns else sticky


def _plus(scores: Sequence[float], weight: float, own: Sequence[float]) -> list[float]:
    return [score + weight * min(1.0, max(0.0, one)) for score, one in zip(scores, own, strict=True)]


def _prefix_cache(prompt: TokenSequence, view: RoutingView, offered: Sequence[InstanceLoad]) -> list[float]:
    num_blocks, holders = len(prompt) // view.page_size, view.holders(prompt)
    names = [load.instance_id for load in offered]
    cached = [view.num_cached_tokens(prompt, name) // view.page_size if name in holders else 0 for name in names]
    return [blocks / num_blocks if num_blocks else 0.0 for blocks in cached]


def _queue(_prompt: TokenSequence, _view: RoutingView, offered: Sequence[InstanceLoad]) -> list[float]:
    queues = [load.num_queued for load in offered]
    span = max(queues) - min(queues)
    return [(max(queues) - queue) / span if span else 1.0 for queue in queues]


def _kv_cache_utilization(_prompt: TokenSequence, _view: RoutingView, offered: Sequence[InstanceLoad]) -> list[float]:
    return [1 - load.page_use for load in offered]


def _active_request(_prompt: TokenSequence, _view: RoutingView, offered: Sequence[InstanceLoad]) -> list[float]:
    most = max(load.num_requests for load in offered)
    return [(most - load.num_requests) / most if load.num_requests else 1.0 for load in offered]


def _token_load(prompt: TokenSequence, view: RoutingView, offered: Sequence[InstanceLoad]) -> list[float]:
    if view.role == "decode":
        return [1.0] * len(offered)
    holders = view.holders(prompt)
    names = [load.instance_id for load in offered]
    own = [len(prompt) - (view.num_cached_tokens(prompt, name) if name in holders else 0) for name in names]
    return [1 - (_in_flight(view, load) + new) / _FULL_QUEUE_TOKENS for load, new in zip(offered, own, strict=True)]


def _in_flight(view: RoutingView, load: InstanceLoad) -> int:
    """Number of uncached prompt tokens that an instance has to compute. 0 on decode instances, because their work is
    outputs of unknown length.
    """
    return 0 if view.role == "decode" else view.num_uncached_tokens(load.instance_id)


_Scorer = Callable[[TokenSequence, RoutingView, Sequence[InstanceLoad]], list[float]]
_SCORERS: dict[str, _Scorer] = {
    "prefix_cache_scorer": _prefix_cache,
    "queue_scorer": _queue,
    "kv_cache_utilization_scorer": _kv_cache_utilization,
    "active_request_scorer": _active_request,
    "token_load_scorer": _token_load,
}
