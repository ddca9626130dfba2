"""Durations of image encoders, by roofline. No row measured an encoder."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pdsim.core.encode.embedding_cache import EmbeddingCache
from pdsim.core.encode.image import Image
from pdsim.core.messages import PrefillStep
from pdsim.core.routing.router import request_of
from pdsim.cost.settings import Roofline
from pdsim.cost.step_times import StepTimes
from pdsim.system.catalog import GpuSpec
from pdsim.system.encoder import VisionEncoder


class EncoderTimes:
    """Times of forwards of an image encoder on one GPU, or divided over several."""

    def __init__(self, encoder: VisionEncoder, gpu: GpuSpec, *, num_gpus: int = 1, factor: float = 1) -> None:
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

    def ns(self, image_tokens: Sequence[int]) -> int:
        """Duration in ns of one forward over images with these numbers of tokens, at least 1. Without images: 0."""
        if not image_tokens:
            return 0
        matrices_ns = 1e9 * self._encoder.matrix_flops_per_token * sum(image_tokens) / self._matrix_flops
        attention = sum([self._encoder.attention_flops(num_tokens) for num_tokens in image_tokens])
        work_ns = max(matrices_ns, self._reading_ns) + 1e9 * attention / self._attention_flops
        return max(1, round(self._factor * max(work_ns, self._launch_ns)))


@dataclass(kw_only=True)
class EncodingStepTimes(StepTimes):
    """Step times of a server that encodes images itself, within the forward that computes their tokens.

    A forward encodes, in one call, each image of which it computes a token, unless the cache has its embeddings (SGLang
    0.5.23, managers/mm_schedule.py:541, _get_chunked_prefill_embedding). Without a cache, an image that two chunks
    share is encoded twice.
    """

    encoder: EncoderTimes
    images: Mapping[int, Sequence[Image]]
    """Images of each request that has any, by the client's id."""
    embedding_bytes: int
    """Bytes of the embeddings of one token."""
    cache: EmbeddingCache

    def prefill_ns(self, step: PrefillStep, start_ns: int, expert_tokens: float | None = None) -> int:
        """Duration in ns of a forward and of encoding its images."""
        encoding_ns = self.encoder.ns([image.num_tokens for image in self._missing(step)])
        return super().prefill_ns(step, start_ns, expert_tokens) + encoding_ns

    def restart(self) -> None:
        super().restart()
        self.cache.clear()

    def _missing(self, step: PrefillStep) -> Iterable[Image]:
        """Different images of the forward that the cache lacks. Then the cache has them, as far as they fit."""
        found = {
            image.image_id: image
            for chunk in step.chunks
            for image in self.images.get(request_of(chunk.request_id), ())
            if image.is_in(chunk.num_context_tokens, chunk.num_tokens)
        }
        missing = [image for image in found.values() if not self.cache.has(image.image_id)]
        for image in missing:
            self.cache.add(image.image_id, image.num_tokens * self.embedding_bytes)
        return missing
