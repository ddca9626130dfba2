"""Durations of encoders of images and audio, by roofline. No encoder was measured."""

from collections.abc import Callable, Mapping, Sequence

from pdsim.core.encode.own_media import OwnMedia
from pdsim.core.messages import PrefillStep
from pdsim.cost.settings import Roofline
from pdsim.cost.step_times import StepTimes
from pdsim.dataclass import dataclass
from pdsim.system.catalog import GpuSpec
from pdsim.system.encoder import Encoder


class EncoderTimes:
    """Times of an encoder's forwards on one GPU, or on several GPUs that divide each forward."""

    def __init__(self, encoder: Encoder, gpu: GpuSpec, *, num_gpus: int = 1, factor: float = 1) -> None:
        """num_gpus: number of GPUs that divide each forward. factor: multiplies all times. The shares of nominal rates,
        and the time of launching a layer, are the defaults of the cost model roofline.
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
        """Duration in ns of one forward over images or audio clips. item_tokens: prompt tokens of each image or clip.
        Without items the duration is 0, otherwise at least 1.
        """
        if not item_tokens:
            return 0
        matrices_ns = 1e9 * sum(map(self._encoder.matrix_flops, item_tokens)) / self._matrix_flops
        attention = sum(map(self._encoder.attention_flops, item_tokens))
        work_ns = max(matrices_ns, self._reading_ns) + 1e9 * attention / self._attention_flops
        return max(1, round(self._factor * max(work_ns, self._launch_ns)))


class EmbeddingLoads:
    """Times of loads of embeddings from host memory to each GPU of a vLLM server. The forward waits for them (0.33.0,
    ec_connector/cpu/worker/__init__.py, start_load_caches).
    """

    def __init__(self, embedding_bytes: int, bandwidth: float) -> None:
        """embedding_bytes: bytes of the embeddings of one token. bandwidth: bytes per second from host memory to one
        GPU.
        """
        self._token_ns = 1e9 * embedding_bytes / bandwidth

    def ns(self, item_tokens: Sequence[int]) -> int:
        """Duration in ns of loading the embeddings of images or audio clips. item_tokens: prompt tokens of each image
        or clip.
        """
        return round(sum(item_tokens) * self._token_ns)


@dataclass(kw_only=True)
class EncodingStepTimes(StepTimes):
    """Step times of a server that encodes images and audio clips itself, within the forward that computes their tokens.

    A forward encodes its items in one call for each modality (vLLM 0.33.0: multimodal/utils.py:291,
    group_and_batch_mm_kwargs). If vLLM has encode instances, a forward of this server loads their embeddings instead.
    """

    encoders: Mapping[str, EncoderTimes | EmbeddingLoads]
    """Times of the model's encoders or of loading embeddings, by modality (image, audio)."""
    own: OwnMedia | None
    """Chooses the images and audio clips that a forward encodes. None: the step names them."""

    @property
    def forward_ns(self) -> Callable[[PrefillStep, int], int]:
        return self.prefill_ns

    def prefill_ns(
        self, step: PrefillStep, start_ns: int, expert_tokens: float | None = None, other_ns: int = 0
    ) -> int:
        """Duration in ns of a forward, including encoding its images and audio clips or loading their embeddings.
        start_ns: time in ns at which the forward begins. expert_tokens: number of tokens that experts compute; None:
        the step's own tokens. other_ns: time in ns of the forward's other work.
        """
        missing = step.media if self.own is None else self.own.to_encode(step)
        encoding_ns = sum(
            times.ns([item.num_tokens for item in missing if item.modality == modality])
            for modality, times in self.encoders.items()
        )
        return super().prefill_ns(step, start_ns, expert_tokens, other_ns + encoding_ns)

    def restart(self) -> None:
        super().restart()
        if self.own is not None:
            self.own.clear()
