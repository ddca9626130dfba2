"""The groups of a tail are all of it, and name the cause where it is known."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdsim.core.encode.media_item import MediaItem
from pdsim.metrics.explanation.explain import CriticalPaths
from pdsim.metrics.explanation.stages import stage_spans
from pdsim.metrics.explanation.tail import METRICS, part_times_ms, tail
from pdsim.metrics.records import RunRecords
from tests.strategies import any_scenarios
from tests.support import MILLISECOND, request, run, small, small_aggregated

SECOND = 1000 * MILLISECOND


@settings(max_examples=60)
@given(any_scenarios(), st.sampled_from(list(METRICS)), st.sampled_from([1, 10, 35, 100]))
def test_groups_partition_the_slowest_and_their_times_add_up(scenario, metric, percent):
    records = run(scenario, levels=True).records
    found = tail(records, metric, percent=percent)
    done = [r for r in records.requests if r.outcome == "finished" and (metric != "tpot" or r.num_output_tokens > 1)]
    assert found.num_all == len(done)
    assert found.num_requests == sum(group.num_requests for group in found.groups)
    assert found.num_requests == (max(1, len(done) * percent // 100) if done else 0)
    assert sum(group.share for group in found.groups) == pytest.approx(min(1, len(done)))
    assert len({(group.cause, group.part, group.resource) for group in found.groups}) == len(found.groups)
    by_id = {r.request_id: r for r in done}
    slower = sorted(map(METRICS[metric], done))[-found.num_requests :]
    for group in found.groups:
        assert sum(group.instances.values()) in {0, group.num_requests}
        assert METRICS[metric](by_id[group.example]) >= found.from_ms == slower[0]
        assert 0 <= group.window_share <= 1
    if len(found.groups) == 1:
        first, last = found.groups[0].first_s * SECOND, found.groups[0].last_s * SECOND
        mine = sorted(done, key=lambda r: (METRICS[metric](r), r.request_id))[-found.num_requests :]
        assert sum(first - 1 <= r.arrival_ns <= last + 1 for r in mine) >= 0.9 * len(mine)
    paths = CriticalPaths(records)
    for one in done:
        assert sum(part_times_ms(paths, one, metric).values()) == pytest.approx(METRICS[metric](one))


def steady(count=60, prompt=20, output=5):
    """One request every half second: none waits for another."""
    return [request(i, prompt, output, arrival_ns=i * SECOND // 2) for i in range(count)]


def test_nine_of_ten_of_few_are_all():
    group = only_group(small(*steady(count=6)), percent=100)
    assert (group.num_requests, group.first_s, group.last_s) == (6, 0, 2.5)


def replaced(spec, *, prompt=20, output=5):
    return request(spec.request_id, prompt, output, arrival_ns=spec.arrival_ns)


def only_group(scenario, metric="ttft", percent=5.0):
    (group,) = tail(run(scenario, levels=True).records, metric, percent=percent).groups
    return group


def test_a_burst_of_long_prompts_at_one_prefill_instance():
    burst = [request(100 + i, 200 if i % 2 else 4, 5, arrival_ns=10 * SECOND) for i in range(20)]
    requests = sorted([*steady(), *burst], key=lambda spec: spec.arrival_ns)
    numbered = [spec._replace(request_id=i) for i, spec in enumerate(requests)]
    group = only_group(small(*numbered, prefill__instances=2))
    assert (group.cause, group.resource) == ("queued for prefill behind others", "prefill compute")
    (name,) = group.instances
    assert name.startswith("prefill-")
    assert (group.first_s, group.last_s) == (10, 10)
    assert group.load > 3
    assert group.median_ms > 1000
    assert group.all_median_ms == 0


@pytest.mark.parametrize("share", [0.1, 0.45, 0.55, 0.9])
def test_what_was_lacking_for_most_of_the_wait_is_the_cause(share):
    """The slowest of a burst waited for prefill, and pages were lacking for this share of the wait."""
    burst = [request(60 + i, 200, 5, arrival_ns=30 * SECOND) for i in range(4)]
    records = run(small(*steady(), *burst), levels=True).records
    slowest = max(records.requests, key=METRICS["ttft"])
    begin_ns, end_ns = stage_spans(slowest)["prefill_waiting"]
    own = next(row for row in records.levels if row.instance_id == "prefill-0")
    lacks_ns = {begin_ns: "pages", round(begin_ns + share * (end_ns - begin_ns)): ""}
    records.levels = [row for row in records.levels if row.instance_id != "prefill-0"] + [
        own._replace(time_ns=time_ns, levels=own.levels._replace(blocked_by=lack)) for time_ns, lack in lacks_ns.items()
    ]
    (group,) = tail(records, percent=1.0).groups
    assert group.resource == ("prefill KV" if share > 0.5 else "prefill compute")


def test_a_steady_load_is_no_burst():
    group = only_group(small(*steady()), percent=100.0)
    assert group.load == pytest.approx(1, abs=0.1)
    assert group.window_share == pytest.approx(0.9, abs=0.05)


CROWD = [request(i, 100, 20, arrival_ns=i * 150 * MILLISECOND) for i in range(30)]


def test_a_tiny_decode_pool():
    group = only_group(small(*CROWD, decode__pool_tokens=200))
    assert (group.cause, group.resource) == ("decode pool full: waited for a grant", "decode KV")
    assert list(group.instances) == ["decode-0"]


def test_too_few_decode_slots():
    group = only_group(small(*CROWD, decode__max_running_requests=1))
    assert (group.cause, group.resource) == ("no decode slot: max_running_requests reached", "decode slots")


def test_a_prefill_pool_that_is_full_because_the_link_is_slow():
    few = {"prefill__pool_tokens": 300, "network__bandwidth": "50 MB/s"}
    group = only_group(small(*CROWD, **few))
    assert (group.cause, group.resource) == ("prefill pool full: waited for pages", "prefill KV")


@pytest.mark.parametrize(
    ("tokens", "cause"), [(60, "transfer over the link"), (200, "KV queued behind earlier transfers")]
)
def test_a_slow_link(tokens, cause):
    """10 ms a token: ten times as long as prefill. The second chunk of the longer prompt waits for the first."""
    requests = [replaced(spec, prompt=tokens) if i == 30 else spec for i, spec in enumerate(steady(prompt=4))]
    group = only_group(small(*requests, network__bandwidth="11 MB/s"), percent=1.0)
    assert (group.cause, group.resource, group.example) == (cause, "link", 30)
    assert group.instances == {"prefill-0 -> decode-0": 1}


@pytest.mark.parametrize(
    ("num_images", "factor", "transport", "group"),
    [
        (1, 1, "mooncake-rdma", ("encoding of its images or audio", "encoding")),
        (1, 0.01, "zmq-tcp", ("transfer of its embeddings", "embedding link")),
        (9, 1, "mooncake-rdma", ("queued for encoding behind others", "encoding")),
    ],
)
def test_images_that_an_encode_instance_encodes(num_images, factor, transport, group):
    """Nine requests with images arrive at the same time."""
    specs = [request(i, 1000, 5, arrival_ns=i * 5 * SECOND) for i in range(10)]
    specs += [request(10 + i, 1000, 5, arrival_ns=60 * SECOND + i) for i in range(num_images)]
    specs[10:] = [spec._replace(media=(MediaItem(0, 1000, spec.request_id),)) for spec in specs[10:]]
    encode = {"gpu": "l40s", "max_batch_size": 1, "transport": transport}
    times = {"use": "affine", "prefill_per_token": "1 us", "decode_base": "10 ms"}
    cost = {"prefill": times, "decode": times, "encode_factor": factor}
    scenario = small(*specs, model="qwen3-vl-8b", encode=encode, cost=cost)
    found = only_group(scenario)
    assert (found.cause, found.resource) == group


def test_its_own_long_prompt():
    requests = [replaced(spec, prompt=400) if i == 30 else spec for i, spec in enumerate(steady())]
    group = only_group(small(*requests), percent=1.0)
    assert (group.cause, group.tokens, group.all_tokens, group.example) == ("its own prompt", 400, 20, 30)
    assert (group.first_s, group.last_s) == (15, 15)


def test_a_prompt_that_is_computed_together_with_a_longer_one():
    """A first prompt keeps prefill busy for 50 ms; then one forward has the other two."""
    late = [request(60 + i, tokens, 5, arrival_ns=40 * SECOND) for i, tokens in enumerate((50, 4, 400))]
    scenario = small(*steady(), *late, prefill__chunked_prefill_tokens=0)
    groups = tail(run(scenario, levels=True).records, percent=4).groups
    assert {group.example: group.cause for group in groups} == {
        61: "computed together with other prompts",
        62: "its own prompt",
    }


def test_its_own_long_output():
    requests = [replaced(spec, output=50) if i == 30 else spec for i, spec in enumerate(steady())]
    group = only_group(small(*requests), "e2e", percent=1.0)
    assert (group.cause, group.tokens, group.all_tokens) == ("its own output", 50, 5)


def test_retraction_lengthens_tpot():
    """Six of one length in a pool that holds them as they come, and not as they grow."""
    crowd = [request(i, 8, 40, arrival_ns=i * 20 * MILLISECOND) for i in range(6)]
    records = run(small(*crowd, decode__pool_tokens=120), levels=True).records
    assert any(one.num_retractions for one in records.requests)
    (group,) = tail(records, "tpot").groups
    assert (group.cause, group.resource) == ("retracted: lost its KV pages while decoding", "decode KV")


def test_prompts_of_others_on_an_aggregated_instance():
    requests = [*steady(20, output=30), request(20, 1000, 2, arrival_ns=9 * SECOND + SECOND // 2 + 100 * MILLISECOND)]
    group = only_group(small_aggregated(*requests), "tpot", percent=5)
    assert (group.cause, group.resource) == ("decode steps wait for prompts of others", "prefill compute")
    assert list(group.instances) == ["aggregated-0"]


def test_a_run_without_finished_requests_has_no_groups():
    assert tail(RunRecords()).groups == []
    with pytest.raises(ValueError, match="percent=0"):
        tail(RunRecords(), percent=0)
