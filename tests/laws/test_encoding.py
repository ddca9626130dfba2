"""Laws of encode instances, and of servers that encode images within their forwards."""

from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.encode.media_item import MediaItem
from pdsim.core.journal.lines import from_lines, to_line
from pdsim.core.journal.replay import replay
from pdsim.core.messages import EncodeMedia, EncodeStep, SendEmbeddings
from pdsim.core.sequence import Spans
from pdsim.cost.encoding import EncoderTimes
from pdsim.metrics.explanation.stages import stage_spans
from pdsim.scenario.building.encoding import encoding
from pdsim.scenario.building.machines import state_machines
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.catalog import load_gpu, load_model
from pdsim.workload.request_spec import RequestSpec
from tests.support import MILLISECOND, Traced, examples, request, run, run_both_ways, small, small_aggregated

MODEL = "qwen3-vl-8b"
TOKEN_BYTES = 4096 * 4 * 2
"""Three deepstack layers beside the last, in bf16."""


def with_images(i: int, sizes: list[tuple[int, int]], text: int, output: int, **changes: Any) -> RequestSpec:
    """A request whose prompt begins with images. sizes: number and tokens of each image."""
    images, start = [], 0
    for media_id, num_tokens in sizes:
        images.append(MediaItem(start, num_tokens, media_id))
        start += num_tokens
    spans = [(1000 + image.media_id, 0, image.num_tokens) for image in images]
    spec = request(i, Spans([*spans, (10_000 + 2 * i, 0, text)]), output, **changes)
    return spec._replace(media=tuple(images))


@st.composite
def loads(draw: st.DrawFn) -> list[RequestSpec]:
    tokens = draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))  # of each image
    specs = []
    for i in range(draw(st.integers(1, 8))):
        ids = draw(st.lists(st.integers(0, len(tokens) - 1), max_size=4))
        at_ns = draw(st.sampled_from([0, 1, 3, 200])) * MILLISECOND * i
        sizes = [(number, tokens[number]) for number in ids]
        specs.append(with_images(i, sizes, draw(st.integers(1, 80)), draw(st.integers(1, 4)), arrival_ns=at_ns))
    return specs


@st.composite
def clusters(draw: st.DrawFn) -> Scenario:
    make = draw(st.sampled_from([small, small_aggregated]))
    pool = {
        "gpu": "h100",
        "instances": draw(st.integers(1, 3)),
        "max_batch_size": draw(st.integers(1, 4)),
        "cache": draw(st.sampled_from([None, "1 MB", "10 MB"])),
        "transport": draw(st.sampled_from(["zmq-tcp", "mooncake-rdma"])),
    }
    changes = {"prefill__instances": draw(st.integers(1, 2))} if make is small else {}
    return make(*draw(loads()), model=MODEL, encode=pool, **changes)


def calls(traced: Traced, call: str) -> list[Any]:
    return [entry for entry in traced.journal if entry.instance_id.startswith("encode-") and entry.call == call]


def sent(traced: Traced) -> list[SendEmbeddings]:
    returned = [entry.returned[1] for entry in calls(traced, "next_step")]
    returned += [entry.returned for entry in calls(traced, "on_step_done")]
    return [command for commands in returned for command in commands]


def steps(traced: Traced) -> list[EncodeStep]:
    found = [entry.returned[0] for entry in calls(traced, "next_step")]
    return [step for step in found if isinstance(step, EncodeStep)]


@given(clusters())
@examples(30)
def test_each_image_is_encoded_once_or_was_cached_and_all_bytes_are_sent(scenario: Scenario):
    traced = run(scenario, checked=True)
    assert traced.result.stall == []
    assert all(r.outcome == "finished" for r in traced.records.requests)
    given_parts = [entry.args[0] for entry in calls(traced, "on_message")]
    asked = Counter((part.request_id, image) for part in given_parts for image in part.items)
    assert asked == Counter((spec.request_id, image) for spec in traced.cluster.requests for image in spec.media)
    encoded = [part for step in steps(traced) for part in step.parts]
    assert len(set(encoded)) == len(encoded)
    assert set(encoded) <= set(given_parts)
    if scenario.encode.cache is None:
        assert len(encoded) == len(given_parts)
    assert sum(command.num_bytes for command in sent(traced)) == TOKEN_BYTES * sum(
        spec.num_media_tokens("image") for spec in traced.cluster.requests
    )


@given(clusters())
@examples(30)
def test_an_encode_instance_takes_all_that_waits_as_soon_as_it_is_free(scenario: Scenario):
    """A naive twin: while nothing is cached, a batch begins when a part is there and the batch before has ended."""
    scenario = scenario.model_copy(update={"encode": scenario.encode.model_copy(update={"cache": None})})
    traced, times = run(scenario), EncoderTimes(load_model(MODEL).encoder, load_gpu("h100"))
    arrived: dict[str, list[tuple[int, EncodeMedia]]] = defaultdict(list)
    for entry in calls(traced, "on_message"):
        arrived[entry.instance_id].append((entry.args[1], entry.args[0]))
    for name, waiting in arrived.items():
        expected, free_ns = [], 0
        while waiting:
            start_ns = max(free_ns, waiting[0][0])
            here = [part for at_ns, part in waiting if at_ns <= start_ns][: scenario.encode.max_batch_size]
            del waiting[: len(here)]
            free_ns = start_ns + times.ns([image.num_tokens for part in here for image in part.items])
            expected.append((start_ns, free_ns - start_ns, len(here)))
        records = [step for step in traced.records.steps if step.instance_id == name]
        assert [(step.start_ns, step.duration_ns, step.num_requests) for step in records] == expected


@given(clusters())
@examples(30)
def test_a_prompt_is_computed_after_its_embeddings_and_stages_follow_each_other(scenario: Scenario):
    traced = run(scenario)
    for record in traced.records.requests:
        if record.num_image_tokens:
            assert record.routed_ns < record.encode_start_ns <= record.encode_end_ns < record.embeddings_ns
            assert record.embeddings_ns <= record.prefill_start_ns
        else:
            assert record.embeddings_ns is None
        spans = list(stage_spans(record).values())
        assert all(before[1] == after[0] for before, after in pairwise(spans))
        assert (spans[0][0], spans[-1][1]) == (record.arrival_ns, record.end_ns)
        assert all(begin <= end for begin, end in spans)


@given(clusters())
@examples(20)
def test_a_journal_replays_and_steps_may_be_joined(scenario: Scenario):
    traced, _ = run_both_ways(scenario)
    lines = [to_line(entry) for entry in traced.journal]
    assert replay(from_lines(lines), state_machines(resolve(scenario))) == len(lines)


@given(clusters())
@examples(20)
def test_without_images_encode_instances_change_nothing(scenario: Scenario):
    texts = tuple(spec._replace(media=()) for spec in scenario.workload.specs)
    workload = type(scenario.workload)(texts)
    with_pool = scenario.model_copy(update={"workload": workload})
    without = with_pool.model_copy(update={"encode": None})
    assert run(with_pool).records.requests == run(without).records.requests


def test_one_image_takes_queue_encoding_transfer_and_prefill():
    """TTFT of one request with one image, on an idle cluster, in closed form."""
    spec = with_images(0, [(0, 50)], text=14, output=2)
    scenario = small_aggregated(spec, model=MODEL, encode={"gpu": "h100"})
    (record,) = run(scenario).records.requests
    pool = encoding(resolve(scenario))
    encoding_ns = EncoderTimes(load_model(MODEL).encoder, load_gpu("h100")).ns([50])
    moving_ns = -(-50 * TOKEN_BYTES * 10**9 // 6_000_000_000)
    assert record.encode_start_ns == 2 * MILLISECOND  # router to server, server to encode instance
    assert record.encode_end_ns - record.encode_start_ns == encoding_ns
    assert record.embeddings_ns - record.encode_end_ns == pool.transport.batch_ns + moving_ns
    assert record.first_token_ns - record.embeddings_ns == 64 * MILLISECOND
    assert record.embeddings_ns == record.prefill_start_ns


def test_each_rank_of_a_server_gets_all_embeddings():
    spec = with_images(0, [(0, 600)], text=10, output=1)
    alone, both = (
        run(small_aggregated(spec, model=MODEL, encode={"gpu": "h100"}, aggregated__tp=tp)).records.requests[0]
        for tp in (1, 2)
    )
    (one_ns, two_ns) = ((r.embeddings_ns - r.encode_end_ns) for r in (alone, both))
    setup_ns = 100_000
    assert two_ns - setup_ns == pytest.approx(2 * (one_ns - setup_ns), rel=1e-6)


def test_images_are_spread_over_encode_instances_and_the_last_embeddings_count():
    sizes = [(number, 10 * (1 + number)) for number in range(5)]
    scenario = small_aggregated(with_images(0, sizes, 4, 1), model=MODEL, encode={"gpu": "h100", "instances": 2})
    traced = run(scenario)
    parts = [entry.args[0] for entry in calls(traced, "on_message")]
    assert sorted(len(part.items) for part in parts) == [2, 3]
    assert [image for part in parts for image in part.items] == list(traced.cluster.requests[0].media)
    last = max(steps(traced), key=lambda step: step.parts[0].num_tokens).parts[0]
    (record,) = traced.records.requests
    assert record.encode_id == next(c.source for c in sent(traced) if c.part == last.part)


@pytest.mark.parametrize(("cache", "num_forwards"), [(None, 3), ("10 MB", 2), ("1 MB", 3)])
def test_embeddings_of_the_same_images_are_kept_as_far_as_they_fit(cache: str | None, num_forwards: int):
    """1.6 MB for each list of images; a request with other images lies between. The cache holds both, or none."""
    sizes = [[(0, 50)], [(1, 50)], [(0, 50)]]
    specs = [with_images(i, one, 10, 1, arrival_ns=i * 500 * MILLISECOND) for i, one in enumerate(sizes)]
    traced = run(small_aggregated(*specs, model=MODEL, encode={"gpu": "h100", "cache": cache}))
    assert len(steps(traced)) == num_forwards
    assert len(sent(traced)) == 3


def own_encoding_ns(spec: RequestSpec, *others: RequestSpec, **changes: Any) -> list[int]:
    """Time in ns by which each forward of an aggregated server is longer than without images."""
    specs = (spec, *others)
    texts = tuple(one._replace(media=()) for one in specs)
    durations = [
        [step.duration_ns for step in run(small_aggregated(*these, model=MODEL, **changes)).records.steps]
        for these in (specs, texts)
    ]
    return [long - short for long, short in zip(*durations, strict=True)]


def test_a_server_encodes_images_within_the_forwards_that_compute_their_tokens():
    times = EncoderTimes(load_model(MODEL).encoder, load_gpu("h100"))
    spec = with_images(0, [(0, 40), (1, 40)], text=20, output=1)  # chunks of 64 tokens: the second image lies in both
    assert own_encoding_ns(spec) == [times.ns([40, 40]), 0]  # its embeddings are kept
    again = with_images(1, [(0, 40)], 8, 1, arrival_ns=1000 * MILLISECOND)
    assert own_encoding_ns(spec, again, aggregated__radix_cache=False) == [times.ns([40, 40]), 0, 0]


def test_a_server_without_room_for_embeddings_encodes_an_image_of_two_chunks_twice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pdsim.scenario.building.encoding.EMBEDDING_CACHE_BYTES", 0)
    times = EncoderTimes(load_model(MODEL).encoder, load_gpu("h100"))
    spec = with_images(0, [(0, 40), (1, 40)], text=20, output=1)
    assert own_encoding_ns(spec) == [times.ns([40, 40]), times.ns([40])]


def test_images_in_the_prefix_cache_are_not_encoded_by_the_server_itself():
    first = with_images(0, [(0, 40)], 24, 1)
    again = first._replace(request_id=1, arrival_ns=1000 * MILLISECOND)
    assert own_encoding_ns(first, again)[1:] == [0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine_version": "0.5.12"}, "0.5.23's rules of encode instances only"),
        ({"aggregated__dp": 2, "aggregated__tp": 2}, "encode beside aggregated.dp"),
        ({"faults": [{"kill": "aggregated-0", "at": "1 s"}]}, "encode beside faults"),
        ({"model": "qwen3-8b"}, "the catalog's entry of qwen3-8b has no encoder of images or audio"),
        ({"encode__gpu": "h1"}, "encode: no gpu 'h1'"),
        ({"encode__transport": "zmq"}, "encode: no transport 'zmq'"),
        ({"encode__step_tokens": 4000}, "encode.step_tokens is a setting of vLLM; give max_batch_size"),
    ],
)
def test_what_is_not_modelled_beside_encode_instances_is_refused(changes: dict[str, Any], message: str):
    data = {"model": MODEL, "encode": {"gpu": "h100"}, **changes}
    with pytest.raises(ConfigError, match=message):
        encoding(resolve(small_aggregated(with_images(0, [(0, 8)], 8, 1), **data)))


def test_images_of_a_model_without_an_encoder_take_no_time_and_the_run_says_so():
    spec = with_images(0, [(0, 40)], 24, 1)
    result = run(small_aggregated(spec, model="qwen3-8b")).result
    assert [step.duration_ns for step in result.records.steps] == [64 * MILLISECOND]
    assert any("has no image encoder" in warning for warning in result.warnings())
