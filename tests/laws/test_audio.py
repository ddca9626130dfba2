"""Laws of audio clips: how encode instances share them beside images, and what their encoding takes."""

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdsim.core.encode.embedding_cache import EmbeddingCache
from pdsim.core.encode.embedding_receiver import EmbeddingReceiver
from pdsim.core.encode.encode_instance import EncodeInstance
from pdsim.core.encode.media_item import MediaItem
from pdsim.core.encode.own_media import OwnMedia
from pdsim.core.messages import EncodeMedia, EncodeStep, NewRequest, PrefillChunk, PrefillStep, StepResult
from pdsim.core.sequence import Spans
from pdsim.cost.encoding import EncoderTimes
from pdsim.system.catalog import load_gpu, load_model
from pdsim.workload.lengths import Fixed, Uniform
from pdsim.workload.request_spec import Streams
from pdsim.workload.synthetic import RandomLengths
from tests.support import examples, request, run, small, small_aggregated

MODEL = "qwen3-asr-1.7b"
BYTES = {"image": 8, "audio": 4}


def media(num_images: int, num_clips: int) -> tuple[MediaItem, ...]:
    images = [MediaItem(i, 1, i) for i in range(num_images)]
    return (*images, *(MediaItem(num_images + i, 1, i, "audio") for i in range(num_clips)))


def assigned(counts: list[int], order: list[int]) -> list[list[int]]:
    """SGLang's rule, with its numbers: items of each modality by encoder. order: the encoders as they were shuffled."""
    offset, found = 0, []
    for num_items in counts:
        base, remainder = divmod(num_items, len(order))
        of_encoders = [0] * len(order)
        for i in range(len(order)):
            of_encoders[order[(offset + i) % len(order)]] = base + (1 if i < remainder else 0)
        found.append(of_encoders)
        offset = (offset + remainder) % len(order)
    return found


@given(st.integers(1, 5), st.integers(0, 12), st.integers(0, 12), st.integers(0, 99))
@example(4, 3, 3, 0)
@examples(60)
def test_clips_that_are_left_over_go_to_the_instances_after_those_of_images(encoders, num_images, num_clips, seed):
    names = [f"encode-{i}" for i in range(encoders)]
    new = NewRequest(7, 0, Spans.of(1, 100), 1, "a", "a", media=media(num_images, num_clips))
    sent = EmbeddingReceiver("a", names, seed=seed).on_message(new, 0)
    order = list(islice(EmbeddingReceiver("a", names, seed=seed)._order(), encoders))
    parts = [command.message for command in sent]
    shares = {(command.to, command.message.modality): len(command.message.items) for command in sent}
    found = [[shares.get((name, kind), 0) for name in names] for kind in ("image", "audio")]
    assert found == assigned([num_images, num_clips], order)
    assert [part.part for part in parts] == list(range(len(parts)))
    for kind in ("image", "audio"):
        items = [item for part in parts if part.modality == kind for item in part.items]
        assert items == [item for item in new.media if item.modality == kind]


@given(st.lists(st.sampled_from(["image", "audio"]), min_size=1, max_size=8), st.integers(1, 4))
@examples(60)
def test_a_batch_is_encoded_in_a_forward_for_each_modality(modalities, max_batch_size):
    """A naive twin: parts in groups of max_batch_size, each divided by modality in the order of its first parts."""
    instance = EncodeInstance("encode-0", max_batch_size=max_batch_size, embedding_bytes=BYTES, cache=None)
    parts = [EncodeMedia(i, 0, (MediaItem(0, 3, i, kind),), "a") for i, kind in enumerate(modalities)]
    for part in parts:
        instance.on_message(part, 0)
    batches = [parts[i : i + max_batch_size] for i in range(0, len(parts), max_batch_size)]
    kinds = [dict.fromkeys(part.modality for part in batch) for batch in batches]
    expected = [
        tuple(part for part in batch if part.modality == kind)
        for batch, of_batch in zip(batches, kinds, strict=True)
        for kind in of_batch
    ]
    found, sizes = [], []
    while isinstance(step := instance.next_step(0)[0], EncodeStep):
        assert instance.levels().num_queued + len(step.parts) == len(instance.waiting_for())
        found.append(step.parts)
        sizes += [command.num_bytes for command in instance.on_step_done(step, StepResult(), 0)]
    assert found == expected
    assert sizes == [3 * BYTES[part.modality] for step in expected for part in step]
    assert instance.waiting_for() == []


def test_qwen2_audio_pads_clips_to_thirty_seconds():
    """Its encoder is Whisper's large one, with 0.63 B parameters in layers."""
    encoder = load_model("qwen2-audio-7b").audio_encoder
    assert encoder is not None
    assert encoder.num_params == 32 * (4 * 1280**2 + 2 * 1280 * 5120) + 1280 * 4096
    assert encoder.attention_flops(1) == encoder.attention_flops(750) == 4 * 1280 * 32 * 1500**2
    assert encoder.matrix_flops(750) == 2 * (1500 * 32 * (4 * 1280**2 + 2 * 1280 * 5120) + 750 * 1280 * 4096)


def test_attention_of_qwen3_asr_stays_in_windows_of_eight_seconds():
    encoder = load_model(MODEL).audio_encoder
    assert encoder is not None
    assert encoder.attention_flops(250) == 4 * 1024 * 24 * (104**2 * 2 + 42**2)


def clip(num_tokens: int, **changes: Any) -> Any:
    prompt = Spans([(500, 0, num_tokens), (501, 0, 20)])
    return request(0, prompt, 2, **changes)._replace(media=(MediaItem(0, num_tokens, 0, "audio"),))


def test_a_server_encodes_clips_within_the_forward_unless_encode_instances_do():
    spec = clip(104)
    own, text = (run(small_aggregated(one, model=MODEL)).records for one in (spec, spec._replace(media=())))
    encoding_ns = EncoderTimes(load_model(MODEL).audio_encoder, load_gpu("h100")).ns([104])
    assert own.steps[0].duration_ns == text.steps[0].duration_ns + encoding_ns
    apart = run(small(spec, model=MODEL, encode={"gpu": "h100"}))
    record = apart.records.requests[0]
    assert (record.num_audio_tokens, record.num_image_tokens) == (104, 0)
    assert record.encode_end_ns - record.encode_start_ns == encoding_ns
    assert apart.result.summary()["total_input_text_tokens"] == 20
    assert any("audio clips: times of the encoder come from" in warning for warning in apart.result.warnings())


def test_each_encoder_takes_its_own_items_of_a_forward():
    spec = clip(10_000)._replace(media=(MediaItem(0, 4000, 0), MediaItem(4000, 6000, 0, "audio")))
    times = run(small_aggregated(spec, model="qwen3-vl-8b", aggregated__pool_tokens=20_480)).cluster.costs[
        "aggregated-0"
    ]
    encoders = [load_model("qwen3-vl-8b").encoder, load_model(MODEL).audio_encoder]
    image, audio = (EncoderTimes(encoder, load_gpu("h100")) for encoder in encoders)
    own = OwnMedia({0: spec.media}, BYTES, EmbeddingCache(0))
    both = replace(times, encoders={"image": image, "audio": audio}, own=own)
    none = replace(times, encoders={}, own=own)
    step = PrefillStep(1, (PrefillChunk(0, 0, 10_020, is_last=True),))
    assert both.prefill_ns(step, 0) - none.prefill_ns(step, 0) == image.ns([4000]) + audio.ns([6000])


def test_media_that_the_model_cannot_encode_count_as_tokens_beside_encode_instances():
    spec = clip(104)._replace(media=(MediaItem(0, 40, 0), MediaItem(40, 64, 0, "audio")))
    apart = run(small(spec, model="qwen3-vl-8b", encode={"gpu": "h100"}))
    record = apart.records.requests[0]
    assert (record.outcome, record.num_image_tokens, record.num_audio_tokens) == ("finished", 40, 64)
    image = EncoderTimes(load_model("qwen3-vl-8b").encoder, load_gpu("h100"))
    assert record.encode_end_ns - record.encode_start_ns == image.ns([40])
    assert any("has no audio encoder" in warning for warning in apart.result.warnings())


@pytest.mark.parametrize("num_distinct", [None, 3])
def test_a_prompt_has_its_images_then_its_clips_then_its_text(num_distinct):
    lengths = {"images": Uniform(1, 3), "image_tokens": Fixed(10), "distinct_images": num_distinct}
    lengths |= {"audio_clips": Uniform(1, 2), "audio_tokens": Uniform(5, 9), "distinct_audio_clips": num_distinct}
    lengths |= {"image_share": 0.6, "audio_share": 0.6}
    load = RandomLengths(num_requests=50, input_tokens=Fixed(7), output_tokens=Fixed(1), **lengths)
    streams: dict[int, tuple[str, int]] = {}
    for spec in load.requests(Streams(0)):
        assert [item.modality for item in spec.media] == sorted((i.modality for i in spec.media), reverse=True)
        ends = [item.start_token + item.num_tokens for item in spec.media]
        assert [item.start_token for item in spec.media] == [0, *ends][: len(ends)]
        assert len(spec.prompt) == max(ends, default=0) + 7
        for span, item in zip(spec.prompt.spans, spec.media, strict=False):
            assert span[2] == item.num_tokens
            assert streams.setdefault(span[0], (item.modality, item.media_id)) == (item.modality, item.media_id)
    assert len(streams) == len(set(streams.values()))
