"""Details of model architectures: RoPE, gates, routing and linear attention. Real mode needs these details. Cost models
use only GroupedRouting, for traffic between NVLink domains (pdsim/cost/host_traffic.py).
"""

from pdsim.dataclass import dataclass


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's scaling of rotary position embeddings: rope_scaling of type llama3 in config.json. Each field has the
    name and meaning of its field there.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN's scaling of rotary position embeddings and attention. Fields have the names and meanings of the fields of
    rope_scaling (with type yarn) in config.json.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, kw_only=True)
class GroupedRouting:
    """DeepSeek-V3's routing. The best groups of experts are chosen, then experts within them, by sigmoid scores plus a
    learned bias. The bias does not change the weights of the chosen experts.
    """

    num_groups: int
    """Number of groups of experts. A group's score is the sum of its two best experts' scores."""
    num_active_groups: int
    """Number of groups from which a token's experts are chosen."""
    scale: float
    """Factor on the sum of the chosen experts' outputs."""
    num_shared: int
    """Number of shared experts. Shared experts process every token."""


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """Details of Qwen3.5. All layers are gated delta nets, except that every attention_interval-th layer has attention.

    Other differences from Qwen3: attention outputs have gates, RoPE rotates only part of a head, and norms multiply by
    1 + weight, except the norm within a gated delta net.
    """

    num_key_heads: int
    num_value_heads: int
    """Number of value heads. Each has one state of key_dim x value_dim elements."""
    key_dim: int
    """Width of a key head."""
    value_dim: int
    """Width of a value head."""
    conv_tokens: int = 4
    """Number of tokens that the convolution before the recurrence sees, including the token itself."""
    attention_interval: int = 4
    rotated_share: float = 0.25
    """Share of the dimensions of a query or key head that RoPE rotates."""

    def has_attention(self, layer: int) -> bool:
        return (layer + 1) % self.attention_interval == 0

    @property
    def num_channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def parameters(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a gated delta net's matrices, convolution and norm, by their names within a layer of a checkpoint.
        hidden_size: width of the model's hidden states.
        """
        values = self.num_value_heads * self.value_dim
        return {
            "linear_attn.in_proj_qkv": (self.num_channels, hidden_size),
            "linear_attn.in_proj_z": (values, hidden_size),
            "linear_attn.in_proj_b": (self.num_value_heads, hidden_size),
            "linear_attn.in_proj_a": (self.num_value_heads, hidden_size),
            "linear_attn.conv1d": (self.num_channels, 1, self.conv_tokens),
            "linear_attn.norm": (self.value_dim,),
            "linear_attn.out_proj": (hidden_size, values),
        }


@dataclass(frozen=True, kw_only=True)
class LlamaArchitecture:
    """Details of Llama, Qwen3, Qwen3.5 and DeepSeek models."""

    intermediate_size: int
    """Inner width of MLPs in layers without experts."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    """Llama 3's scaling of rotary position embeddings. None: the model has no scaling of type llama3."""
    yarn: YarnScaling | None = None
    """YaRN's scaling of rotary position embeddings. None: the model has no scaling of type yarn."""
    qk_norm: bool = False
    """True: query and key heads are normalised before rotation, as in Qwen3."""
    query_rank: int = 0
    """With latent attention: width of the latent of queries. 0: queries have no latent."""
    routing: GroupedRouting | None = None
    """How tokens are routed to experts. None: softmax over all experts."""
    window_layers: tuple[int, ...] = ()
    """Indices of the layers that attend only to the last attention.window_tokens tokens. The first layer has index
    0."""
    delta: GatedDelta | None = None
    """Shapes of the layers with linear attention, and further details of models that have such layers. None: all layers
    have attention.
    """
