"""Durations of encoders of images and audio, by roofline. No encoder was measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdsim.core.encode.embedding_cache import EmbeddingCache
from pdsim.core.encode.media_item import MediaItem
from pdsim.core.messages import PrefillStep
from pdsim.core.routing.router import request_of
from pdsim.cost.settings import Roofline
from pdsim.cost.step_times import StepTimes
from pdsim.system.catalog import GpuSpec
from pdsim.system.encoder import Encoder


class EncoderTimes:
    """Times of forwards of an encoder on one GPU, or divided over several."""

    def __init__(self, encoder: Encoder, gpu: GpuSpec, *, num_gpus: int = 1, factor: float = 1) -> None:
        """factor: multiplies all times. The shares of nominal rates, and the time of launching a layer, are those of
        the cost model roofline.
        """
        rates = Roofline()
        flops = num_gpus * gpu.flops_for("bf16")
        self._encoder = encoder
        self._factor = factor
        self._matrix_flops = flops * rates.matrix_efficiency
        self._attention_flops = flops * rates.attention_efficiency
        self._reading_ns = 1e9 * encoder.weight_bytes / (num_gpus * gpu.memory_bandwidth * rates.memory_efficiency)
        self._launch_ns = rates.prefill_layer_ns * encoder.num_layers

    def ns(self, item_tokens: Sequence[int]) -> int:
        """Duration in ns of one forward over items with these numbers of tokens, at least 1. Without items: 0."""
        if not item_tokens:
            return 0
        matrices_ns = 1e9 * sum(map(self._encoder.matrix_flops, item_tokens)) / self._matrix_flops
        attention = sum(map(self._encoder.attention_flops, item_tokens))
        work_ns = max(matrices_ns, self._reading_ns) + 1e9 * attention / self._attention_flops
        return max(1, round(self._factor * max(work_ns, self._launch_ns)))


@dataclass(kw_only=True)
class EncodingStepTimes(StepTimes):
    """Step times of a server that encodes images and audio clips itself, within the forward that computes their tokens.

    A forward encodes each item of which it computes a token, unless the cache has its embeddings: in one call for each
    modality (SGLang 0.5.23, managers/mm_schedule.py:541, _get_chunked_prefill_embedding). Without a cache, an item that
    two chunks share is encoded twice.
    """

    encoders: Mapping[str, EncoderTimes]
    media: Mapping[int, Sequence[MediaItem]]
    """Images and audio clips of each request that has any, by the client's id."""
    embedding_bytes: Mapping[str, int]
    """Bytes of the embeddings of one token, by modality."""
    cache: EmbeddingCache

    def prefill_ns(self, step: PrefillStep, start_ns: int, expert_tokens: float | None = None) -> int:
        """Duration in ns of a forward and of encoding its images and audio clips."""
        missing = self._missing(step)
        encoding_ns = sum(
            times.ns([item.num_tokens for item in missing if item.modality == modality])
            for modality, times in self.encoders.items()
        )
        return super().prefill_ns(step, start_ns, expert_tokens) + encoding_ns

    def restart(self) -> None:
        super().restart()
        self.cache.clear()

    def _missing(self, step: PrefillStep) -> list[MediaItem]:
        """Returns the distinct items of the forward that the cache lacks. Also adds them to the cache, as far as they
        fit.
        """
        found = {
            (item.modality, item.media_id): item
            for chunk in step.chunks
            for item in self.media.get(request_of(chunk.request_id), ())
            if item.modality in self.encoders and item.is_in(chunk.num_context_tokens, chunk.num_tokens)
        }
        missing = {key: item for key, item in found.items() if not self.cache.has(key)}
        for key, item in missing.items():
            self.cache.add(key, item.num_tokens * self.embedding_bytes[item.modality])
        return list(missing.values())
