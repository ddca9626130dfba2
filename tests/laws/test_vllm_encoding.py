"""Laws of vLLM's encode instances, and of servers that read embeddings from them."""

from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.encode.media_item import MediaItem
from pdsim.core.journal.lines import from_lines, to_line
from pdsim.core.journal.replay import replay
from pdsim.core.messages import (
    AskEmbeddings,
    EmbeddingsArrived,
    EmbeddingsGranted,
    EncodeMedia,
    PrefillStep,
    SendEmbeddings,
)
from pdsim.core.sequence import Spans
from pdsim.cost.encoding import EncoderTimes
from pdsim.metrics.explanation.stages import stage_spans
from pdsim.scenario.building.encoding import encoding
from pdsim.scenario.building.machines import state_machines
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.encoding import EncodeSettings
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.catalog import load_gpu, load_model
from tests.laws.test_encoding import MODEL, TOKEN_BYTES, loads, with_images
from tests.support import MILLISECOND, Traced, examples, parts, run, run_both_ways, small, small_aggregated

ENCODE = {"gpu": "h100", "transport": "nixl-rdma"}
TIMES = EncoderTimes(load_model(MODEL).encoder, load_gpu("h100"))
HOST_BANDWIDTH = 0.74 * load_gpu("h100").host_bandwidth


def cluster(*specs: Any, role: str = "aggregated", encode: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    make = small_aggregated if role == "aggregated" else small
    given = {"model": MODEL, "engine": "vllm", "encode": ENCODE | (encode or {})}
    admission = {} if role == "aggregated" else {"decode__admission": "free_pages"}
    return make(*specs, **given, **admission, **changes)


@st.composite
def clusters(draw: st.DrawFn) -> Scenario:
    encode = {"instances": draw(st.integers(1, 3)), "step_tokens": draw(st.sampled_from([20, 64, 8192]))}
    role = draw(st.sampled_from(["aggregated", "prefill"]))
    changes = {"prefill__instances": draw(st.integers(1, 2))} if role == "prefill" else {}
    return cluster(*draw(loads()), role=role, encode=encode, **changes)


@given(clusters())
@examples(30)
def test_a_server_computes_items_after_it_has_read_them_once(scenario: Scenario):
    traced, _ = run_both_ways(scenario)
    assert all(record.outcome == "finished" for record in traced.records.requests)
    media = {spec.request_id: spec.media for spec in traced.cluster.requests}
    arrived: dict[str, list[Any]] = defaultdict(list)
    for entry in traced.journal:
        if entry.call == "on_message" and isinstance(entry.args[0], EmbeddingsArrived):
            done = entry.args[0]
            arrived[entry.instance_id].append(media[done.request_id][done.part].media_id)
        if entry.call == "next_step" and entry.instance_id.startswith(("prefill", "aggregated")):
            steps = [part for part in parts(entry.returned[0]) if isinstance(part, PrefillStep)]
            assert {item.media_id for step in steps for item in step.media} <= set(arrived[entry.instance_id])
    assert all(len(set(ids)) == len(ids) for ids in arrived.values())


@given(clusters())
@examples(20)
def test_a_journal_replays_and_stages_follow_each_other(scenario: Scenario):
    traced = run(scenario, checked=True)
    lines = [to_line(entry) for entry in traced.journal]
    assert replay(from_lines(lines), state_machines(resolve(scenario))) == len(lines)
    for record in traced.records.requests:
        spans = list(stage_spans(record).values())
        assert all(before[1] == after[0] for before, after in pairwise(spans))
        if record.num_image_tokens:
            assert record.encode_end_ns <= record.embeddings_ns <= record.prefill_start_ns


@given(clusters())
@examples(20)
def test_a_request_has_its_embeddings_when_the_last_read_of_one_of_its_items_ends(scenario: Scenario):
    """The read may be that of another request with the same item. A server notes its end after the step under way."""
    traced = run(scenario)
    media = {spec.request_id: spec.media for spec in traced.cluster.requests}
    noted_ns = {
        (entry.instance_id, media[done.request_id][done.part].media_id): entry.args[1]
        for entry in traced.journal
        if entry.call == "on_message" and isinstance(done := entry.args[0], EmbeddingsArrived)
    }
    for record in traced.records.requests:
        if record.num_image_tokens:
            last_ns = max(noted_ns[record.prefill_id, item.media_id] for item in media[record.request_id])
            steps = [step for step in traced.records.steps if step.instance_id == record.prefill_id]
            assert last_ns <= record.embeddings_ns or any(
                step.start_ns <= record.embeddings_ns and last_ns == step.start_ns + step.duration_ns for step in steps
            )


@given(clusters())
@examples(30)
def test_a_step_takes_tokens_of_parts_in_order_and_encodes_an_item_with_its_first_token(scenario: Scenario):
    """A naive twin: a step takes all that waits, up to its tokens. Items that were encoded before are kept."""
    traced, most = run(scenario), scenario.encode.step_tokens
    arrived: dict[str, list[tuple[int, EncodeMedia]]] = defaultdict(list)
    for entry in traced.journal:
        if entry.call == "on_message" and isinstance(entry.args[0], EncodeMedia):
            arrived[entry.instance_id].append((entry.args[1], entry.args[0]))
    for name, messages in arrived.items():
        waiting = [(at_ns, [item for item in part.items for _ in range(item.num_tokens)]) for at_ns, part in messages]
        expected, kept, free_ns = [], set(), 0
        while waiting:
            start_ns, num_left, new = max(free_ns, waiting[0][0]), most, {}
            for at_ns, tokens in waiting:
                if at_ns <= start_ns:
                    new |= {item.media_id: item.num_tokens for item in tokens[:num_left]}
                    num_taken = min(num_left, len(tokens))
                    del tokens[:num_taken]
                    num_left -= num_taken
            sizes = [size for media_id, size in new.items() if media_id not in kept]
            kept |= set(new)
            free_ns = start_ns + TIMES.ns(sizes)
            expected.append((start_ns, free_ns - start_ns, sum(sizes)))
            waiting = [one for one in waiting if one[1]]
        records = [step for step in traced.records.steps if step.instance_id == name]
        assert [(step.start_ns, step.duration_ns, step.num_tokens) for step in records] == expected


@pytest.mark.parametrize("role", ["aggregated", "prefill"])
def test_one_image_is_encoded_asked_for_read_and_loaded(role: str):
    """TTFT of one request with one image, on an idle cluster, in closed form."""
    scenario = cluster(with_images(0, [(0, 50)], text=14, output=2), role=role)
    (record,) = run(scenario).records.requests
    pool = encoding(resolve(scenario))
    transport = pool.transport
    assert record.encode_start_ns == 2 * MILLISECOND  # router to proxy, proxy to encode instance
    assert record.encode_end_ns - record.encode_start_ns == TIMES.ns([50])
    asked_ns = record.encode_end_ns + 4 * MILLISECOND  # encode instance, proxy, server, question, answer
    moving_ns = max(transport.moving_each_ns, 50 * TOKEN_BYTES * 1e9 / min(pool.topology.capacity.values()))
    setup_ns = transport.batch_ns + round(transport.posting_each_ns)
    assert record.embeddings_ns - asked_ns - setup_ns == pytest.approx(moving_ns, abs=1)
    assert record.prefill_start_ns == record.embeddings_ns
    loading_ns = round(50 * TOKEN_BYTES * 1e9 / HOST_BANDWIDTH)
    assert record.prefill_end_ns - record.prefill_start_ns == 64 * MILLISECOND + loading_ns


def sent(traced: Traced, kind: type) -> list[tuple[int, Any]]:
    """Commands and sent messages of a kind, each with the time in ns of the call that returned it."""
    found = []
    for entry in traced.journal:
        commands = entry.returned[1] if entry.call == "next_step" else entry.returned
        found += [(entry.args[-1], getattr(command, "message", command)) for command in commands]
    return [one for one in found if isinstance(one[1], kind)]


def test_a_busy_encode_instance_answers_after_its_step_and_a_busy_server_looks_between_its_steps():
    texts = with_images(1, [], text=60, output=1, arrival_ns=TIMES.ns([50]) + 3 * MILLISECOND)
    other = with_images(2, [(1, 60)], text=4, output=1, arrival_ns=TIMES.ns([50]) + 2 * MILLISECOND)
    traced = run(cluster(with_images(0, [(0, 50)], text=14, output=1), texts, other))
    (_, second) = [step for step in traced.records.steps if step.kind == "encode"]
    busy = next(step for step in traced.records.steps if step.kind == "prefill" and step.num_tokens == 60)
    (asked_ns, _) = [entry.args[1] for entry in traced.journal if isinstance(entry.args[0], AskEmbeddings)]
    assert second.start_ns < asked_ns < second.start_ns + second.duration_ns < busy.start_ns + busy.duration_ns
    ((answered_ns, _), *_) = sent(traced, EmbeddingsGranted)
    assert answered_ns == second.start_ns + second.duration_ns
    ((read_ns, _), *_) = sent(traced, SendEmbeddings)
    assert busy.start_ns < answered_ns + MILLISECOND < busy.start_ns + busy.duration_ns == read_ns


@pytest.mark.parametrize("role", ["aggregated", "prefill"])
def test_a_request_waits_for_the_read_of_another_with_the_same_image(role: str):
    """The second request comes when the first has asked. Its image is encoded already."""
    later_ns = TIMES.ns([3000]) + 2 * MILLISECOND
    specs = [with_images(i, [(7, 3000)], 8, 1, arrival_ns=i * later_ns) for i in range(2)]
    first, second = run(cluster(*specs, role=role)).records.requests
    assert second.encode_end_ns < first.embeddings_ns == second.embeddings_ns


def test_audio_that_the_model_does_not_encode_hides_no_image():
    """Audio clips stand before the image in the prompt, and are tokens only for this model."""
    specs = []
    for i in range(2):
        image = with_images(i, [(7, 3000)], 8, 1, arrival_ns=i * (TIMES.ns([3000]) + 2 * MILLISECOND))
        prompt = Spans([(500 + i, 0, 8)]).then(image.prompt)
        specs.append(image._replace(prompt=prompt, media=(MediaItem(0, 8, i, "audio"), MediaItem(8, 3000, 7))))
    first, second = run(cluster(*specs)).records.requests
    assert second.encode_end_ns < first.embeddings_ns == second.embeddings_ns


def test_items_go_to_encode_instances_in_turn_across_requests():
    specs = [with_images(i, [(3 * i + j, 10) for j in range(3)], 4, 1, arrival_ns=i * MILLISECOND) for i in range(2)]
    traced = run(cluster(*specs, encode={"instances": 2}))
    given_parts = [
        (entry.instance_id, [item.media_id for item in entry.args[0].items])
        for entry in traced.journal
        if entry.call == "on_message" and isinstance(entry.args[0], EncodeMedia)
    ]
    assert given_parts == [("encode-0", [0, 2]), ("encode-1", [1]), ("encode-1", [3, 5]), ("encode-0", [4])]


def test_the_ranks_of_a_server_share_one_copy():
    spec = with_images(0, [(0, 600)], text=10, output=1)
    alone, both = (run(cluster(spec, aggregated__tp=tp)).records.requests[0] for tp in (1, 2))
    assert alone.embeddings_ns == both.embeddings_ns


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encode": {"transport": "zmq-tcp"}}, "vLLM's servers read embeddings with NIXL"),
        ({"encode": {"max_batch_size": 4}}, "encode.max_batch_size is a setting of SGLang"),
        ({"aggregated__host_cache": "1 GB"}, "encode beside aggregated.host_cache"),
        ({"aggregated__dp": 2, "aggregated__tp": 2}, "encode beside aggregated.dp"),
    ],
)
def test_what_is_not_modelled_beside_vllms_encode_instances_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        resolve(cluster(with_images(0, [(0, 8)], 8, 1), **changes))


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_kept_scenario_names_the_fields_of_both_engines(engine: str):
    kept = EncodeSettings(**ENCODE).model_dump()
    assert kept.keys() >= {"step_tokens", "max_batch_size"}
    assert EncodeSettings(**kept).wrong_for(engine) == ""


def test_an_item_beyond_the_encoder_cache_of_an_encode_instance_is_refused():
    with pytest.raises(ConfigError, match=r"raise encode\.step_tokens to 20000"):
        run(
            cluster(
                with_images(0, [(0, 20_000)], 8, 1),
                aggregated__pool_tokens=40_000,
                aggregated__chunked_prefill_tokens=30_000,
            )
        )
