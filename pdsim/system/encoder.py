"""Sizes and work of a model's image encoder: a vision transformer over patches, and mergers that make prompt tokens of
them. Names follow `vision_config` of Qwen's config.json.
"""

from dataclasses import dataclass

_ELEMENT_BYTES = 2
"""Encoders compute and send bf16 (SGLang 0.5.23, disaggregation/encoder/server.py:654: the type of the weights)."""


@dataclass(frozen=True, kw_only=True)
class VisionEncoder:
    """An image encoder. An image of n prompt tokens has n * merge_size**2 patches."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_mlp_matrices: int = 2
    """Number of matrices of a layer's MLP: 3 if it has a gate."""
    patch_size: int
    """Width of a patch in pixels."""
    temporal_patch_size: int = 2
    """Number of frames of a patch. A single image is repeated."""
    merge_size: int = 2
    """Number of patches in each direction that a prompt token merges."""
    out_hidden_size: int
    """Width of an embedding: the hidden size of the text model."""
    num_deepstack_layers: int = 0
    """Number of layers whose output also goes to the text model. Each adds an embedding to every token
    (SGLang 0.5.23, models/qwen3_vl.py, deepstack_merger_list)."""
    num_window_layers: int = 0
    """Number of layers in which a patch attends to the patches of its window only."""
    window_patches: int = 0
    """Number of patches of a window."""

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

    @property
    def matrix_flops_per_token(self) -> int:
        """FLOPs of one prompt token in matrix products: its patches in all layers, then the mergers."""
        of_patches = self._num_layer_params * self.num_layers + self._num_patch_params
        return 2 * (self.patches_per_token * of_patches + self.num_params - of_patches)

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
