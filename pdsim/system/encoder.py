"""Sizes and work of a model's encoders of images and audio. Names follow `vision_config` and `audio_config` of Qwen's
config.json.
"""

from itertools import pairwise

from pdsim.dataclass import dataclass

_ELEMENT_BYTES = 2
"""Bytes of one element of weights and embeddings. Encoders compute and send bf16 (SGLang 0.5.23,
disaggregation/encoder/server.py:654: the type of the weights).
"""


@dataclass(frozen=True, kw_only=True)
class VisionEncoder:
    """An image encoder: a vision transformer over patches, and mergers that make prompt tokens of them. An image of n
    prompt tokens has n * merge_size**2 patches.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_mlp_matrices: int = 2
    """Number of matrices of a layer's MLP: 3 if it has a gate."""
    patch_size: int
    """Width of a patch in pixels."""
    temporal_patch_size: int = 2
    """Number of video frames in one patch. A single image is repeated until it has as many frames."""
    merge_size: int = 2
    """Number of patches in each direction that a prompt token merges."""
    out_hidden_size: int
    """Width of an embedding: the hidden size of the text model."""
    num_deepstack_layers: int = 0
    """Number of layers whose output also goes to the text model. Each adds an embedding to every prompt token of an
    image (SGLang 0.5.23, models/qwen3_vl.py, deepstack_merger_list)."""
    num_window_layers: int = 0
    """Number of layers in which a patch attends to the patches of its window only."""
    window_patches: int = 0
    """Number of patches in one window of a layer with windows. 0: no layer has windows."""
    max_image_tokens: int = 0
    """Number of prompt tokens of the largest image. The image processor shrinks images with more pixels than its limit.
    0: this number is not known; vLLM's encoder cache then has room for as many tokens as one step computes.
    """

    @property
    def patches_per_token(self) -> int:
        return self.merge_size**2

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the embeddings of one prompt token."""
        return self.out_hidden_size * (1 + self.num_deepstack_layers) * _ELEMENT_BYTES

    @property
    def num_params(self) -> int:
        """Number of parameters, without norms, biases and position embeddings."""
        merged = self.patches_per_token * self.hidden_size
        mergers = (1 + self.num_deepstack_layers) * merged * (merged + self.out_hidden_size)
        return self._num_layer_params * self.num_layers + self._num_patch_params + mergers

    @property
    def weight_bytes(self) -> int:
        return self.num_params * _ELEMENT_BYTES

    def matrix_flops(self, num_tokens: int) -> int:
        """FLOPs of matrix products of an image of num_tokens prompt tokens: its patches in all layers, then the
        mergers.
        """
        of_patches = self._num_layer_params * self.num_layers + self._num_patch_params
        return 2 * num_tokens * (self.patches_per_token * of_patches + self.num_params - of_patches)

    def attention_flops(self, num_tokens: int) -> int:
        """FLOPs of attention between the patches of one image of num_tokens prompt tokens."""
        num_patches = num_tokens * self.patches_per_token
        nearby = min(num_patches, self.window_patches)
        seen = (self.num_layers - self.num_window_layers) * num_patches + self.num_window_layers * nearby
        return 4 * self.hidden_size * num_patches * seen

    @property
    def _num_layer_params(self) -> int:
        return self.hidden_size * (4 * self.hidden_size + self.num_mlp_matrices * self.intermediate_size)

    @property
    def _num_patch_params(self) -> int:
        return 3 * self.temporal_patch_size * self.patch_size**2 * self.hidden_size


@dataclass(frozen=True, kw_only=True)
class AudioEncoder:
    """An audio encoder: a transformer over positions in time, as in Whisper, and projections that make prompt tokens of
    them. Convolutions before the transformer are left out: in Qwen2-Audio they have 1 % of the parameters.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    positions_per_token: int = 1
    """Number of positions that are pooled into one prompt token."""
    padded_positions: int = 0
    """Each clip has at least this number of positions, because shorter clips are padded (Qwen2-Audio: 30 s; SGLang
    0.5.23, disaggregation/encoder/preprocessor.py:248)."""
    window_positions: int
    """Number of positions in a window. A position attends only to the positions of its own window."""
    projection_sizes: tuple[int, ...]
    """Widths of the layers that project a token, the last of them the width of an embedding."""

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the embeddings of one prompt token."""
        return self.projection_sizes[-1] * _ELEMENT_BYTES

    @property
    def num_params(self) -> int:
        """Number of parameters, without norms, biases, position embeddings and convolutions."""
        return self._num_layer_params * self.num_layers + self._num_projection_params

    @property
    def weight_bytes(self) -> int:
        return self.num_params * _ELEMENT_BYTES

    def matrix_flops(self, num_tokens: int) -> int:
        """FLOPs of all matrix products for an audio clip of num_tokens prompt tokens: in the encoder's layers for each
        position of the clip, and in the projections for each prompt token.
        """
        of_layers = self._num_positions(num_tokens) * self._num_layer_params * self.num_layers
        return 2 * (of_layers + num_tokens * self._num_projection_params)

    def attention_flops(self, num_tokens: int) -> int:
        """FLOPs of attention between the positions of a clip of num_tokens prompt tokens."""
        whole, rest = divmod(self._num_positions(num_tokens), self.window_positions)
        pairs = whole * self.window_positions**2 + rest**2
        return 4 * self.hidden_size * self.num_layers * pairs

    def _num_positions(self, num_tokens: int) -> int:
        return max(self.padded_positions, num_tokens * self.positions_per_token)

    @property
    def _num_layer_params(self) -> int:
        return self.hidden_size * (4 * self.hidden_size + 2 * self.intermediate_size)

    @property
    def _num_projection_params(self) -> int:
        widths = self.hidden_size, *self.projection_sizes
        return sum([first * second for first, second in pairwise(widths)])


Encoder = VisionEncoder | AudioEncoder
