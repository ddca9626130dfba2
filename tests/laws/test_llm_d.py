"""Laws of llm-d's endpoint picker: scores against its formulas, and metrics as old as their reading."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.messages import CachedTokens, Drain, InstanceMetrics, MetricsSeen, Serve
from pdsim.core.routing.role_router import MemorySize, RoleRouter
from pdsim.core.sequence import Spans
from pdsim.policy.llm_d import LlmD
from pdsim.policy.views import RoutingView, TokenSequence
from tests.support import request, run, small, small_aggregated

NAMES = ["a", "b", "c"]
PAGE = 16
NOTHING = {"prefix_cache_scorer": 0.0, "queue_scorer": 0.0}


class Told(LlmD):
    told = ""

    def pick(self, prompt: TokenSequence, view: RoutingView) -> str:
        return self.told


def make(policy, role="prefill"):
    return RoleRouter(NAMES, policy, role, MemorySize(PAGE, 100_000))


stems = st.tuples(st.integers(0, 1), st.integers(0, 100), st.integers(1, 60))
metrics = st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1)), min_size=3, max_size=3)
weights = st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=5, max_size=5)
SCORERS = ("prefix_cache", "queue", "kv_cache_utilization", "active_request", "token_load")


@given(st.lists(st.tuples(stems, st.integers(0, 2)), max_size=12), stems, metrics, weights)
def test_scores_are_those_of_a_twin(load, stem, read, given_weights):
    told = Told()
    router, sent, counts = make(told), {name: [] for name in NAMES}, dict.fromkeys(NAMES, 0)
    queued = dict.fromkeys(NAMES, 0)

    def cached(tokens, name):
        pages = {tuple(one[: i + PAGE]) for one in sent[name] for i in range(0, len(one) - PAGE + 1, PAGE)}
        return sum(tuple(tokens[: i + PAGE]) in pages for i in range(0, len(tokens) - PAGE + 1, PAGE))

    def prompt_of(number, stem, shared, own):
        spans = [*([(stem, 0, shared)] if shared else []), (100 + number, 0, own)]
        return Spans(spans), [(stream, i) for stream, _, count in spans for i in range(count)]

    for number, (parts, place) in enumerate(load):
        prompt, tokens = prompt_of(number, *parts)
        told.told = name = NAMES[place]
        queued[name] += len(tokens) - PAGE * cached(tokens, name)
        counts[name] += 1
        router.pick(prompt, 0, request_id=number)
        sent[name].append(tokens)
    router.read([InstanceMetrics(name, *one) for name, one in zip(NAMES, read, strict=True)])
    prompt, tokens = prompt_of(99, *stem)
    of = dict(zip(SCORERS, given_weights, strict=True))
    found = LlmD(**{f"{name}_scorer": weight for name, weight in of.items()}).scores(prompt, router, router.loads)
    queues, most = [queue for queue, _ in read], max(counts.values())
    for name, score, (queue, use) in zip(NAMES, found, read, strict=True):
        parts = {
            "prefix_cache": cached(tokens, name) / max(1, len(tokens) // PAGE),
            "queue": (max(queues) - queue) / (max(queues) - min(queues)) if max(queues) > min(queues) else 1,
            "kv_cache_utilization": 1 - use,
            "active_request": (most - counts[name]) / most if counts[name] else 1,
            "token_load": 1 - (queued[name] + len(tokens) - PAGE * cached(tokens, name)) / (128 * 32768),
        }
        assert score == pytest.approx(sum(of[part] * parts[part] for part in parts))


def test_affinity_ends_where_the_cached_instance_queues_too_long():
    """a has the prompt cached and 1,000 tokens to compute: 1 s at 1,000 tokens/s."""
    for limit_ns, wanted in ((2_000_000_000, {"a"}), (500_000_000, {"b", "c"}), (0, {"a"})):
        policy = Told(**NOTHING, token_load_scorer=1.0, affinity_threshold=0.8, max_ttft_penalty_ns=limit_ns)
        policy.peak_prefill_tokens_per_s = 1000.0
        router = make(policy)
        policy.told = "a"
        router.pick(Spans.of(1, 160), 0, request_id=1)
        router.on_computed(1)
        router.pick(Spans.of(2, 1000), 0, request_id=2)
        picks = {LlmD.pick(policy, Spans.of(1, 160), router) for _ in range(20)}
        assert picks == wanted


tiers = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=3, max_size=3)


@given(tiers, st.integers(8 * PAGE, 9 * PAGE - 1), st.sampled_from([0.0, 0.8, 1.0]))
def test_precise_scores_weigh_the_tiers_of_blocks(tiers, num_tokens, cpu_weight):
    """The prompt has 8 whole blocks."""
    policy = LlmD(**NOTHING, precise_prefix_cache_scorer=2.0, cpu_weight=cpu_weight)
    router = make(policy)
    router.see([CachedTokens(name, PAGE * d, PAGE * h) for name, (d, h) in zip(NAMES, tiers, strict=True)])
    found = policy.scores(Spans.of(1, num_tokens), router, router.loads)
    assert found == pytest.approx([2 * (device + cpu_weight * host) / 8 for device, host in tiers])
    assert router.pick(Spans.of(1, num_tokens), 0) in [
        name for name, score in zip(NAMES, found, strict=True) if score == max(found)
    ]


SECOND = 1_000_000_000
gaps = st.sampled_from([0, 10 * SECOND, 30 * SECOND, 61 * SECOND])


@given(st.lists(st.tuples(st.integers(-1, 3), gaps, st.integers(0, 3)), max_size=30))
def test_sessions_stay_or_go_where_the_fewest_sessions_are(calls):
    """Twin: a list of the sessions' last requests. Each 30 s those older than the time to live leave it."""
    role = make(LlmD(**NOTHING, session_affinity_scorer=1.0, session_ttl_ns=60 * SECOND))
    requests, now_ns, down = [], 0, None
    for number, (session, gap_ns, turned) in enumerate(calls):
        for due_ns in range(now_ns // (30 * SECOND) * 30 * SECOND + 30 * SECOND, now_ns + gap_ns + 1, 30 * SECOND):
            requests = [one for one in requests if due_ns - one[2] <= 60 * SECOND]
        now_ns += gap_ns
        if turned < 3:
            if down is not None:
                role.note(Serve(down))
            down = None if NAMES[turned] == down else NAMES[turned]
            if down is not None:
                role.note(Drain(down))
        up = [name for name in NAMES if name != down]
        picked = role.pick(Spans.of(number, 10), now_ns, "", number, session)
        bound = {one: place for one, place, _ in requests}
        counts = {name: list(bound.values()).count(name) for name in up}
        if bound.get(session) in up:
            assert picked == bound[session]
        else:
            assert counts[picked] == min(counts.values())
        if session >= 0:
            requests = [*(one for one in requests if one[0] != session), (session, picked, now_ns)]


def test_new_sessions_go_round():
    role = make(LlmD(**NOTHING, session_affinity_scorer=1.0))
    assert [role.pick(Spans.of(i, 10), 0, "", i, i) for i in range(9)].count("a") == 3


@pytest.mark.parametrize("role", ["prefill", "aggregated"])
def test_tokens_count_until_the_prompt_is_computed(role):
    policy = LlmD(**NOTHING, token_load_scorer=1.0)
    router = make(policy, role)
    busy = router.pick(Spans.of(1, 5000), 0, request_id=1)
    assert all(router.pick(Spans.of(i, 16), 0, request_id=i) != busy for i in range(2, 30))
    router.on_computed(1)
    assert router.num_uncached_tokens(busy) == 0


def test_equal_scores_spread():
    router = make(LlmD())
    assert {router.pick(Spans.of(i, 16), 0, request_id=i) for i in range(40)} == set(NAMES)


def loaded(router, **changes):
    lengths = {"use": "uniform", "low": 20, "high": 600}
    workload = {"use": "random_lengths", "num_requests": 300, "input_tokens": lengths, "output_tokens": 2}
    client = {"use": "open_loop", "arrivals": {"use": "poisson", "rate": "8/s"}}
    return small(workload=workload, client=client, prefill__instances=3, router=router, **changes)


def mean_ttft_ns(router):
    requests = run(loaded(router)).records.requests
    return sum(one.first_token_ns - one.arrival_ns for one in requests) / len(requests)


def test_old_metrics_herd_requests():
    """Metrics read every 4 s send all requests of 4 s to what was the shortest queue."""
    fresh, old = ({"use": "llm_d", "refresh_metrics_interval": f"{ms} ms"} for ms in (50, 4000))
    assert 2 * mean_ttft_ns(fresh) < mean_ttft_ns(old)
    assert mean_ttft_ns(fresh) < mean_ttft_ns("random")


@pytest.mark.parametrize("made", [small, small_aggregated])
def test_the_router_is_told_of_metrics_at_the_interval_and_not_without_need(made):
    specs = [request(i, 300, 20) for i in range(6)]
    counts = {}
    for weight in (0, 1):
        ran = run(made(*specs, router={"use": "llm_d", "queue_scorer": weight, "refresh_metrics_interval": "100 ms"}))
        times = [entry.args[-1] for entry in ran.journal if type(entry.args[0]) is MetricsSeen]
        counts[weight] = len(times)
        assert times == [(100 * i + 1) * 1_000_000 for i in range(1, len(times) + 1)]
    assert counts[0] == 0 < counts[1]
