"""Laws of images in vLLM's servers: which images a step encodes, and where chunks end."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.encode.media_item import MediaItem
from pdsim.core.instance import Request
from pdsim.core.journal.lines import from_lines, to_line
from pdsim.core.journal.replay import replay
from pdsim.core.messages import Cancel, MixedStep, NewRequest, PrefillStep, StepResult
from pdsim.core.prefill.forward_builder import Forward
from pdsim.core.sequence import Spans
from pdsim.core.vllm.encoder_cache import EncoderCache
from pdsim.cost.encoding import EncoderTimes
from pdsim.scenario.building.encoding import encoder_tokens
from pdsim.scenario.building.machines import build_machine, state_machines
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.catalog import load_gpu, load_model
from pdsim.workload.request_spec import RequestSpec
from tests.laws.test_encoding import MODEL, loads, with_images
from tests.support import MILLISECOND, Traced, examples, run, run_both_ways, small, small_aggregated

MOST_TOKENS = 60
"""Maximum tokens of an image that `loads` draws."""


@dataclass
class Twin:
    """vLLM's encoder cache as plain lists: embeddings in the order in which they fell out of use, and their users."""

    size: int
    kept: list[tuple[int, int]] = field(default_factory=list)
    """Content and tokens. Items out of use first, in the order in which their last use ended."""
    uses: list[tuple[int, int, int]] = field(default_factory=list)
    """Request, place and content."""
    encoded: list[int] = field(default_factory=list)

    def is_used(self, content: int) -> bool:
        return any(used == content for _, _, used in self.uses)

    def chunk(self, request: Request, start: int, num_tokens: int) -> int:
        """Takes a chunk token by token, and returns its length."""
        sizes = {item.media_id: item.num_tokens for item in request.media}
        new: list[tuple[int, int]] = []
        last_item, end = -1, start
        while end < start + num_tokens:
            inside = [n for n, one in enumerate(request.media) if one.is_in(end, 1)]
            if inside and inside[0] != last_item:
                (last_item,) = inside
                content = request.media[last_item].media_id
                if content not in [one for one, _ in self.kept] and content not in [one for one, _ in new]:
                    most = sum(sizes[one] for one in {one for one, _ in new}) + sizes[content]
                    used = sum(tokens for one, tokens in self.kept if self.is_used(one))
                    if most + sum(self.encoded) > self.size or most + used > self.size:
                        break
                    while most + sum(tokens for _, tokens in self.kept) > self.size:
                        self.kept.remove(next(one for one in self.kept if not self.is_used(one[0])))
                    new.append((content, last_item))
                elif content in [one for one, _ in self.kept]:
                    self.uses.append((request.request_id, last_item, content))
                else:
                    new.append((content, last_item))
            end += 1
        for content, place in new:
            if content not in [one for one, _ in self.kept]:
                self.kept.append((content, sizes[content]))
                self.encoded.append(sizes[content])
            self.uses.append((request.request_id, place, content))
        return end - start

    def free(self, request: Request, computed: int | None) -> None:
        """Ends the uses of items that lie before `computed`; None: all uses. Unused items go to the end."""
        for place, item in enumerate(request.media):
            use = (request.request_id, place, item.media_id)
            if use in self.uses and (computed is None or item.start_token + item.num_tokens <= computed):
                self.uses = [one for one in self.uses if one != use]
                if not self.is_used(item.media_id):
                    (entry,) = [one for one in self.kept if one[0] == item.media_id]
                    self.kept.remove(entry)
                    self.kept.append(entry)


@st.composite
def prompts(draw: st.DrawFn) -> list[Request]:
    tokens = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    found = []
    for i in range(draw(st.integers(1, 4))):
        items, end = [], 0
        for number in draw(st.lists(st.integers(0, len(tokens) - 1), max_size=5)):
            start = end + draw(st.integers(0, 4))
            items.append(MediaItem(start, tokens[number], number))
            end = start + tokens[number]
        num_tokens = end + draw(st.integers(1, 5))
        found.append(Request(i, 0, Spans([(i, 0, num_tokens)]), num_tokens, media=tuple(items)))
    return found


@given(prompts(), st.integers(12, 30), st.data())
@examples(200)
def test_the_encoder_cache_is_that_of_a_naive_twin(requests: list[Request], size: int, data: st.DataObject):
    cache, twin = EncoderCache(size), Twin(size)
    for _ in range(data.draw(st.integers(1, 12))):
        cache.begin_step()
        twin.encoded = []
        taken = []
        for request in requests:
            num_tokens = data.draw(st.integers(0, min(20, request.num_tokens - request.num_scheduled_tokens)))
            if num_tokens:
                trial = cache.trial()
                choice = cache.choose(request, num_tokens)
                cache.take(request, choice)
                assert choice.num_tokens == twin.chunk(request, request.num_scheduled_tokens, num_tokens)
                assert sum(item.num_tokens for item in trial.chosen) == 0
                request.num_scheduled_tokens += choice.num_tokens
                taken.append(request)
        assert [item.num_tokens for item in cache.chosen] == twin.encoded
        for request in taken:
            if data.draw(st.integers(0, 5)) == 0:  # it is preempted, and begins anew
                cache.drop(request.request_id)
                twin.free(request, None)
                request.num_scheduled_tokens = 0
                continue
            request.num_computed_tokens = request.num_scheduled_tokens
            cache.end_chunk(request)
            twin.free(request, request.num_computed_tokens)
        assert cache.num_free_tokens == size - sum(tokens for _, tokens in twin.kept)
        assert cache.num_used_tokens == sum(tokens for one, tokens in twin.kept if twin.is_used(one))


@st.composite
def servers(draw: st.DrawFn) -> Scenario:
    chunk = draw(st.sampled_from([16, 64, 200]))
    changes: dict[str, Any] = {"model": MODEL, "engine": "vllm"}
    is_aggregated, splits = draw(st.booleans()), chunk < MOST_TOKENS or draw(st.booleans())
    changes[("aggregated" if is_aggregated else "prefill") + "__chunked_media"] = splits
    if is_aggregated:
        pool = draw(st.sampled_from([1024, 4096]))
        changes |= {"aggregated__chunked_prefill_tokens": chunk, "aggregated__pool_tokens": pool}
        return small_aggregated(*draw(loads()), **changes, aggregated__max_running_requests=4)
    return small(*draw(loads()), **changes, prefill__chunked_prefill_tokens=chunk)


def prefills(traced: Traced, instance: str) -> list[PrefillStep]:
    steps = [entry.returned[0] for entry in traced.journal if entry.call == "next_step"]
    names = [entry.instance_id for entry in traced.journal if entry.call == "next_step"]
    parts = [step.prefill if isinstance(step, MixedStep) else step for step in steps]
    return [part for part, name in zip(parts, names, strict=True) if name == instance and isinstance(part, PrefillStep)]


@given(servers(), st.integers(MOST_TOKENS, 150))
@examples(40)
def test_tokens_of_images_are_computed_with_embeddings_of_this_or_an_earlier_step(scenario: Scenario, size: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdsim.scenario.building.machines.encoder_tokens", lambda *_: size)
        patch.setattr("pdsim.scenario.building.encoding._require_room", lambda *_: None)
        traced, _ = run_both_ways(scenario)
        lines = [to_line(entry) for entry in traced.journal]
        assert replay(from_lines(lines), state_machines(resolve(scenario))) == len(lines)
    assert all(r.outcome == "finished" for r in traced.records.requests)
    splits = (scenario.aggregated or scenario.prefill).chunked_media
    media = {spec.request_id: spec.media for spec in traced.cluster.requests}
    for instance in traced.cluster.instances:
        encoded: set[int] = set()
        for step in prefills(traced, instance.instance_id):
            assert sum(item.num_tokens for item in step.media) <= size
            new = [item.media_id for item in step.media]
            assert len(set(new)) == len(new)
            encoded |= set(new)
            for chunk in step.chunks:
                within = [i for i in media[chunk.request_id] if i.is_in(chunk.num_context_tokens, chunk.num_tokens)]
                assert {item.media_id for item in within} <= encoded
                end = chunk.num_context_tokens + chunk.num_tokens
                cut = [i for i in within if chunk.num_context_tokens <= i.start_token and end < i.end_token]
                assert splits or not cut
        if not instance.instance_id.startswith("decode"):
            assert instance._builder._encoder.num_used_tokens == 0
        else:
            assert not encoded  # decode gets KV, and nothing was preempted


def durations(scenario: Scenario) -> list[int]:
    return [step.duration_ns for step in run(scenario).records.steps]


def test_a_step_takes_the_time_of_encoding_its_images_in_one_call():
    times = EncoderTimes(load_model(MODEL).encoder, load_gpu("h100"))
    spec = with_images(0, [(0, 40), (1, 40)], text=20, output=1)
    found = durations(small_aggregated(spec, model=MODEL, engine="vllm"))
    assert found == [64 * MILLISECOND + times.ns([40, 40]), 36 * MILLISECOND]


def test_a_chunk_ends_before_an_image_that_does_not_fit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pdsim.scenario.building.machines.encoder_tokens", lambda *_: 50)
    times = EncoderTimes(load_model(MODEL).encoder, load_gpu("h100"))
    spec = with_images(0, [(0, 40), (1, 40)], text=20, output=1)
    found = durations(small_aggregated(spec, model=MODEL, engine="vllm"))
    assert found == [40 * MILLISECOND + times.ns([40]), 60 * MILLISECOND + times.ns([40])]


def test_no_chunk_ends_within_an_image_unless_images_may_be_split():
    spec = with_images(0, [(0, 40), (1, 40)], text=20, output=1)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("machines", "encoding"):
            patch.setattr(f"pdsim.scenario.building.{module}.encoder_tokens", lambda *_: 64)
        traced = run(small_aggregated(spec, model=MODEL, engine="vllm", aggregated__chunked_media=False))
    assert [chunk.num_tokens for step in prefills(traced, "aggregated-0") for chunk in step.chunks] == [40, 60]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "largest image of 16384 tokens exceeds a step"),
        ({"long_prefill_tokens": 40, "chunked_prefill_tokens": 16384}, "beside aggregated.long_prefill_tokens"),
    ],
)
def test_servers_that_cannot_compute_an_image_in_one_step_are_refused(changes: dict[str, int], message: str):
    """Whatever they are asked for: here a prompt of text."""
    changed = {f"aggregated__{name}": value for name, value in {"chunked_media": False, **changes}.items()}
    with pytest.raises(ConfigError, match=message):
        run(small_aggregated(with_images(0, [], 20, 1), model=MODEL, engine="vllm", **changed))


def test_a_prompt_whose_image_does_not_fit_lets_later_prompts_pass(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pdsim.scenario.building.machines.encoder_tokens", lambda *_: 50)
    specs = [with_images(0, [(0, 40)], 4, 1), with_images(1, [(1, 40)], 4, 1), with_images(2, [], 8, 1)]
    traced = run(small_aggregated(*specs, model=MODEL, engine="vllm", aggregated__chunked_prefill_tokens=200))
    assert [[chunk.request_id for chunk in step.chunks] for step in prefills(traced, "aggregated-0")] == [[0, 2], [1]]


def test_the_same_image_of_a_later_request_is_kept():
    first = with_images(0, [(0, 40)], 20, 1)
    again = with_images(1, [(0, 40)], 20, 1, arrival_ns=1000 * MILLISECOND)
    scenario = small_aggregated(first, again, model=MODEL, engine="vllm", aggregated__radix_cache=False)
    assert [len(step.media) for step in prefills(run(scenario), "aggregated-0")] == [1, 0]


def test_decode_encodes_the_images_of_a_preempted_request_again():
    specs: list[RequestSpec] = [with_images(i, [(i, 40)], 8, 60) for i in range(2)]
    decode = {"decode__pool_tokens": 160, "decode__radix_cache": False, "decode__admission": "free_pages"}
    scenario = small(*specs, model=MODEL, engine="vllm", **decode)
    traced = run(scenario, checked=True)
    assert sum(record.num_retractions for record in traced.records.requests) > 0
    assert [item.media_id for step in prefills(traced, "decode-0") for item in step.media] == [1]


def test_a_begun_prompt_uses_embeddings_until_it_is_cancelled():
    spec = with_images(0, [(0, 100)], 20, 1)
    instance = build_machine(resolve(small_aggregated(spec, model=MODEL, engine="vllm")), "aggregated-0")
    names = [instance.instance_id] * 2
    instance.on_message(NewRequest(0, 0, spec.prompt, 1, *names, media=spec.media), 0)
    step, _ = instance.next_step(0)
    instance.on_step_done(step, StepResult(), 0)
    builder = instance._builder
    assert not builder._compute(builder.partials[0], 0, Forward())  # other requests take all tokens of a step
    assert builder._encoder.num_used_tokens == 100
    instance.on_message(Cancel(0, "the client left"), 0)
    assert builder._encoder.num_used_tokens == 0


def test_a_prompt_that_is_cancelled_during_its_forward_uses_no_embeddings():
    spec = with_images(0, [(0, 100)], 20, 1)
    instance = build_machine(resolve(small(spec, model=MODEL, engine="vllm")), "prefill-0")
    instance.on_message(NewRequest(0, 0, spec.prompt, 1, "prefill-0", "decode-0", media=spec.media), 0)
    step, _ = instance.next_step(0)
    assert instance._builder._encoder.num_used_tokens == 100
    instance.on_message(Cancel(0, "the client left"), 0)
    instance.on_step_done(step, StepResult(), 0)
    assert instance._builder._encoder.num_used_tokens == 0


def test_a_step_may_encode_its_own_tokens_but_at_least_the_largest_image():
    for chunk, most in [(64, 16384), (20_000, 20_000)]:
        scenario = resolve(small_aggregated(model=MODEL, engine="vllm", aggregated__chunked_prefill_tokens=chunk))
        assert encoder_tokens(scenario, scenario.aggregated) == most


def test_an_image_larger_than_the_encoder_cache_is_refused():
    spec = with_images(0, [(0, 16385)], 20, 1)
    with pytest.raises(ConfigError, match="of 16385 tokens exceeds vLLM's encoder cache of 16384 tokens"):
        run(small_aggregated(spec, model=MODEL, engine="vllm", aggregated__pool_tokens=20_480))


def test_images_beside_pipeline_stages_are_refused():
    spec = with_images(0, [(0, 40)], 20, 1)
    with pytest.raises(ConfigError, match="aggregated: pdsim does not model media with pp or cp; leave them out"):
        run(small_aggregated(spec, model=MODEL, engine="vllm", aggregated__pp=2))
