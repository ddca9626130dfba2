"""Scaling policies of planners that know how many requests a server can serve."""

from collections.abc import Iterable
from dataclasses import field
from math import ceil, floor

from pdsim.dataclass import dataclass
from pdsim.policy.protocols import Servers
from pdsim.policy.views import RoleSeen, ScalingView


@dataclass
class ThroughputPlanner:
    """Divides the load of the last interval by the load that one server can serve within targets of TTFT and ITL. This
    is throughput scaling of Dynamo's planner (ai-dynamo 1.6.1, `dynamo/planner/core/throughput_scaling.py:317`), with
    its constant load predictor (`core/load/predictors.py:98`) and without cached prompts and drafts.

    Linear functions with the coefficients below give the times of forwards and decode steps. Dynamo fits such functions
    to measured steps (`core/perf_model/prefill.py`, `decode.py`).
    """

    prefill_token_ns: float
    """Additional time of a forward for each prompt token."""
    decode_kv_token_ns: float
    """Additional time of a decode step for each token of KV."""
    max_kv_tokens: int
    """Number of KV tokens that a decode server can hold."""
    prefill_base_ns: int = 0
    """Time of a forward without tokens."""
    decode_base_ns: int = 0
    """Time of a decode step without requests."""
    decode_request_ns: int = 0
    """Additional time of a decode step for each request."""
    max_batched_tokens: int = 8192
    """Maximum number of tokens in one forward."""
    max_requests: int = 256
    """Maximum number of requests in one forward or decode step."""
    ttft_ns: int = 500_000_000
    """Target for the mean TTFT (`config/defaults.py:77`)."""
    itl_ns: int = 50_000_000
    """Target for the mean ITL (`config/defaults.py:78`)."""
    max_change: int = 8
    """Maximum number of servers that one decision adds to or removes from a role (`config/defaults.py:30`)."""
    keep_servers: bool = False
    """True: the policy divides all servers between the roles, and no server starts or stops. Dynamo does the same if
    its options `min_gpu_budget` and `max_gpu_budget` are equal.
    """
    _input_tokens: float = field(default=0.0, init=False)
    """Mean tokens per prompt in the last interval with arrivals. 0: no request has arrived yet."""
    _output_tokens: float = field(default=0.0, init=False)
    """Mean tokens per output in the last interval in which requests finished. 0: no request has finished yet."""

    def __post_init__(self) -> None:
        step_ns = self.decode_base_ns + self.decode_request_ns + self.decode_kv_token_ns
        if min(self.prefill_token_ns, step_ns, self.max_kv_tokens) <= 0:
            raise ValueError(f"needs times of forwards and decode steps, and max_kv_tokens, above 0, found {self}")

    def servers(self, view: ScalingView) -> Servers:
        """Returns the wanted numbers of servers. They equal the present numbers until the mean lengths of prompts and
        of outputs are known.
        """
        if view.num_arrived:
            self._input_tokens = view.num_arrived_tokens / view.num_arrived
        if view.num_finished:
            self._output_tokens = view.num_output_tokens / view.num_finished
        now = Servers(view.prefill.num_servers, view.decode.num_servers)
        if not self._input_tokens or not self._output_tokens:
            return now
        demand_per_s = view.num_arrived * 1e9 / view.interval_ns
        wanted = ceil(demand_per_s / self.prefill_rate_per_s()), ceil(demand_per_s / self.decode_rate_per_s())
        changed = [
            max(1, min(max(want, have - self.max_change), have + self.max_change))
            for want, have in zip(wanted, now, strict=True)
        ]
        most = sum(now) if self.keep_servers else view.max_servers
        return _within(Servers(*changed), most if self.keep_servers else 0, most)

    def prefill_rate_per_s(self) -> float:
        """Number of requests per second that one prefill server can compute within the TTFT target
        (`core/perf_model/engine_query.py:370`).
        """
        tokens = max(1, ceil(self._input_tokens))
        full, rest = divmod(tokens, self.max_batched_tokens)
        num_forwards = full + (rest > 0)
        most = min(self.max_requests, self.max_batched_tokens // tokens) if num_forwards == 1 else 1
        return _best_rate_per_s(
            (
                (n, num_forwards * self.prefill_base_ns + n * tokens * self.prefill_token_ns)
                for n in range(1, max(1, most) + 1)
            ),
            self.ttft_ns,
        )

    def decode_rate_per_s(self) -> float:
        """Number of requests per second that one decode server can finish within the ITL target
        (`core/perf_model/engine_query.py:400`).
        """
        output_tokens = max(1, round(self._output_tokens))
        context_tokens = max(1, round(self._input_tokens) + output_tokens // 2)
        most = max(1, min(self.max_requests, self.max_kv_tokens // context_tokens))
        per_request_ns = self.decode_request_ns + context_tokens * self.decode_kv_token_ns
        steps = ((n, self.decode_base_ns + n * per_request_ns) for n in range(1, most + 1))
        return _best_rate_per_s(steps, self.itl_ns) / output_tokens


def _best_rate_per_s(batches: Iterable[tuple[int, float]], target_ns: int) -> float:
    """Returns the highest rate, in requests per second, among batches whose duration is at most target_ns; if there is
    no such batch, among all batches (`engine_query.py:819`).

    batches: for each batch, its number of requests and its duration in ns.
    """
    return max((duration_ns <= target_ns, n * 1e9 / duration_ns) for n, duration_ns in batches)[1]


def _within(wanted: Servers, least: int, most: int) -> Servers:
    """Scales the `wanted` numbers of servers of both roles in proportion, so that their sum is at least `least` and at
    most `most` (`core/budget.py:142`, `155`). Each role keeps at least one server.
    """
    total = sum(wanted)
    if least <= total <= most:
        return wanted
    goal, rounded = (most, floor) if total > most else (least, ceil)
    prefill = max(1, min(goal - 1, rounded(wanted.prefill * goal / total)))
    return Servers(prefill, goal - prefill)


@dataclass
class SpareSaturation:
    """Adds a server to a role whose servers have little spare capacity, and removes a server if the others would still
    have enough. While a server starts, drains or changes its role, nothing is added or removed
    (`CalculateSaturationTargets`). If both roles need a server and GPUs are left for one, prefill gets it.

    The rule is the first analyzer of llm-d's Workload Variant Autoscaler (llm-d-incubation/workload-variant-autoscaler,
    commit 36587f8, `internal/saturation/analyzer.go`). llm-d judges each server, and has no roles. This policy judges
    each role by the mean of its servers.
    """

    kv_threshold: float = 0.8
    """Share of used pages at which a server is saturated (the defaults of kv_threshold and queue_threshold:
    `internal/config/saturation_scaling.go`).
    """
    queue_threshold: float = 5.0
    """Number of waiting requests at which a server is saturated."""
    kv_spare_trigger: float = 0.1
    """Minimum spare share of pages: kv_threshold minus the mean share of used pages. If less is spare, a server is
    added."""
    queue_spare_trigger: float = 3.0
    """Minimum number of further requests that could wait before a server is saturated: queue_threshold minus the mean
    number of waiting requests per server. Below this number, a server is added.
    """
    keep_servers: bool = False
    """True: servers change their roles, but no server starts or stops."""

    def servers(self, view: ScalingView) -> Servers:
        now = Servers(view.prefill.num_servers, view.decode.num_servers)
        if now != (view.prefill.num_serving, view.decode.num_serving):
            return now
        prefill, decode = self._change(view.prefill), self._change(view.decode)
        if self.keep_servers:
            return Servers(now.prefill + prefill, now.decode + decode) if prefill + decode == 0 else now
        room = view.max_servers - sum(now)
        if prefill + decode > room:
            decode = min(decode, 0)
        if prefill + decode > room:
            prefill = min(prefill, 0)
        return Servers(now.prefill + prefill, now.decode + decode)

    def _change(self, role: RoleSeen) -> int:
        """Returns 1 if the role needs another server, -1 if a server can be removed, else 0 (`analyzer.go`,
        shouldScaleUp, isScaleDownSafe).
        """
        queue = role.num_queued / role.num_servers
        if not self._has_spare(role.page_use, queue):
            return 1
        if role.num_servers == 1:
            return 0
        more = role.num_servers / (role.num_servers - 1)
        return -self._has_spare(role.page_use * more, queue * more)

    def _has_spare(self, page_use: float, queue: float) -> bool:
        spare_kv, spare_queue = self.kv_threshold - page_use, self.queue_threshold - queue
        return spare_kv >= self.kv_spare_trigger and spare_queue >= self.queue_spare_trigger
