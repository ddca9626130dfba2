"""Numbers of parameters of a model's linear modules, with their names in checkpoints. Norms and biases are not
counted.
"""

from collections.abc import Iterator

from pdsim.system.checkpoint.config import Config, delta_attention
from pdsim.system.checkpoint.layers import Layer


def modules_of(config: Config, layers: list[Layer]) -> Iterator[tuple[str, int]]:
    """Yields name and number of parameters of each linear module, except routed experts, embeddings of the vocabulary
    and output projection. Convolutions of linear attention, and the embeddings per layer of Gemma's small models, are
    included.
    """
    is_single = has_single_blocks(layers)
    for index, layer in enumerate(layers):
        mixer = "mixer" if is_single else "linear_attn" if layer.mixer == "state" else "self_attn"
        for name, params in _mixer(config, layer):
            yield f"model.layers.{index}.{mixer}.{name}", params
        for name, params in _feed(config, layer):
            yield f"model.layers.{index}.{'mixer' if is_single else 'mlp'}.{name}", params


def routed_of(layers: list[Layer]) -> list[str]:
    """Names of the modules of routed expert 0 in each layer that has experts."""
    at = "mixer." if has_single_blocks(layers) else "mlp."
    return [
        f"model.layers.{index}.{'' if layer.feed == 'both' else at}experts.0.{name}"
        for index, layer in enumerate(layers)
        if layer.feed in {"experts", "both"}
        for name in _PROJECTIONS
    ]


def has_single_blocks(layers: list[Layer]) -> bool:
    """True if no layer has both a mixer (attention or linear attention) and an MLP. Nemotron-H has such layers, and
    names both kinds of modules "mixer".
    """
    return not any(layer.mixer and layer.feed for layer in layers)


def _mixer(config: Config, layer: Layer) -> Iterator[tuple[str, int]]:
    hidden = config.hidden
    match layer.mixer:
        case "state":
            yield from _state(config)
        case "linear":
            yield "linear", hidden * hidden
        case "compressed":
            yield from _compressed(config, layer.ratio)
        case "full" | "window" if config.get("kv_lora_rank"):
            yield from _latent(config, layer)
        case "full" | "window" | "shared":
            yield from _grouped(config, layer)


def _grouped(config: Config, layer: Layer) -> Iterator[tuple[str, int]]:
    hidden, heads = config.hidden, config.heads
    kv_heads, dim, value_dim = grouped_sizes(config, layer.mixer)
    if layer.mixer == "window":
        heads = config.count("swa_num_attention_heads", default=heads)
    gates = 2 if config.get("attn_output_gate") else 1
    yield "q_proj", gates * hidden * heads * dim
    if layer.mixer != "shared":
        yield "k_proj", hidden * kv_heads * dim
    if layer.mixer != "shared" and not (config.get("attention_k_eq_v") and layer.mixer == "full"):
        yield "v_proj", hidden * kv_heads * value_dim
    yield "o_proj", heads * value_dim * hidden
    if isinstance(sparse := config.get("sparse_attention_config"), dict) and sparse.get("sparse_num_index_heads"):
        # MiniMax M3 (SGLang 0.5.23, models/minimax_m3.py): an indexer's queries and one key
        yield "index_proj", hidden * (sparse["sparse_num_index_heads"] + 1) * sparse["sparse_index_dim"]


def grouped_sizes(config: Config, mixer: str) -> tuple[int, int, int]:
    """Returns (number of KV heads, width of a key head, width of a value head) of layers with this mixer: "full",
    "window" for a sliding window, or "shared" for layers that use an earlier layer's KV.
    """
    kv_heads, dim = config.kv_heads, config.head_dim
    if (blocks := config.get("block_configs")) is not None and config.get("num_key_value_heads") is None:
        sizes = {b["attention"]["n_heads_in_group"] for b in blocks if b["attention"].get("n_heads_in_group")}
        kv_heads = config.heads // max(sizes)
    if mixer == "window":
        kv_heads = config.count("swa_num_key_value_heads", default=kv_heads)
        dim = config.count("swa_head_dim", default=dim)
        return kv_heads, dim, config.count("swa_v_head_dim", default=dim)
    if mixer == "full":
        kv_heads = config.count("num_global_key_value_heads", default=kv_heads)
        dim = config.count("global_head_dim", default=_own_head_dim(config) or dim)
    return kv_heads, dim, config.count("v_head_dim", default=dim)


def _own_head_dim(config: Config) -> int | None:
    """Width of heads in layers without a window, if per_layer_config gives these layers a width of their own (Gemma 4).
    None: per_layer_config gives none.
    """
    own = config.get("per_layer_config")
    sizes = {one["head_dim"] for one in own.values() if "head_dim" in one} if isinstance(own, dict) else set()
    return max(sizes, default=None)


def _latent(config: Config, layer: Layer) -> Iterator[tuple[str, int]]:
    hidden, heads, rank = config.hidden, config.heads, config.count("kv_lora_rank")
    rope, nope = config.count("qk_rope_head_dim"), config.count("qk_nope_head_dim")
    value, query = config.count("v_head_dim"), config.count("q_lora_rank", default=0)
    if query:
        yield "q_a_proj", hidden * query
        yield "q_b_proj", query * heads * (nope + rope)
    else:
        yield "q_proj", hidden * heads * (nope + rope)
    yield "kv_a_proj_with_mqa", hidden * (rank + rope)
    yield "kv_b_proj", rank * heads * (nope + value)
    yield "o_proj", heads * value * hidden
    if config.get("mla_use_output_gate"):
        yield "g_proj", hidden * heads * value
    if layer.has_indexer and (index_heads := config.count("index_n_heads", default=0)):
        dim = config.count("index_head_dim")
        yield "indexer.wq_b", query * index_heads * dim
        yield "indexer.wk", hidden * dim
        yield "indexer.weights_proj", hidden * index_heads


def _compressed(config: Config, ratio: int) -> Iterator[tuple[str, int]]:
    """Yields name and number of parameters of the modules of DeepSeek V4's attention, in a layer with this ratio of
    tokens per latent (SGLang 0.5.23, models/deepseek_v4.py: MqaAttentionBase; layers/attention/dsv4/compressor.py).
    """
    hidden, heads, dim = config.hidden, config.heads, config.head_dim
    query, out = config.count("q_lora_rank"), config.count("o_lora_rank")
    yield "wq_a", hidden * query
    yield "wq_b", query * heads * dim
    yield "wkv", hidden * dim
    yield "wo_a", heads * dim * out
    yield "wo_b", config.count("o_groups") * out * hidden
    if not ratio:
        return
    overlap = 2 if ratio == OVERLAPPING_RATIO else 1
    yield "compressor", 2 * hidden * overlap * dim
    if ratio == OVERLAPPING_RATIO:
        index_heads, index_dim = config.count("index_n_heads"), config.count("index_head_dim")
        yield "indexer", query * index_heads * index_dim + hidden * index_heads + 2 * hidden * overlap * index_dim


OVERLAPPING_RATIO = 4
"""DeepSeek V4's layers with this number of tokens per latent make each latent from two neighbouring blocks of tokens.
They also have an indexer, which chooses the latents that a token attends to."""


def _state(config: Config) -> Iterator[tuple[str, int]]:
    hidden = config.hidden
    if config.get("linear_num_value_heads") is not None:  # gated delta net
        value_heads, value_dim = config.count("linear_num_value_heads"), config.count("linear_value_head_dim")
        keys = config.count("linear_num_key_heads") * config.count("linear_key_head_dim")
        values, convolved = value_heads * value_dim, 2 * keys + value_heads * value_dim
        yield "in_proj_qkv", hidden * convolved
        yield "in_proj_z", hidden * values
        yield "in_proj_b", hidden * value_heads
        yield "in_proj_a", hidden * value_heads
        yield "conv1d", convolved * config.count("linear_conv_kernel_dim")
        yield "out_proj", values * hidden
        return
    if (delta := delta_attention(config)) is not None:
        heads, dim, kernel, is_full = delta
        width = heads * dim
        yield "qkv_proj", 3 * hidden * width
        yield "conv1d", 3 * width * kernel
        yield "f_proj", hidden * dim + dim * width
        yield "b_proj", hidden * heads
        yield "g_proj", hidden * width if is_full else hidden * dim + dim * width
        yield "o_proj", width * hidden
        return
    heads, dim, groups, state, kernel = mamba_sizes(config)
    yield "in_proj", hidden * (2 * heads * dim + 2 * groups * state + heads)
    yield "conv1d", (heads * dim + 2 * groups * state) * kernel
    yield "out_proj", heads * dim * hidden


def mamba_sizes(config: Config) -> tuple[int, int, int, int, int]:
    """Sizes of Mamba-2 layers: number of heads, width of a head, number of groups, width of the state, width of the
    convolution.
    """
    return (
        config.count("mamba_num_heads", "mamba_n_heads"),
        config.count("mamba_head_dim", "mamba_d_head"),
        config.count("n_groups", "mamba_n_groups", "mamba_ngroups"),
        config.count("ssm_state_size", "mamba_d_state", "mamba_state_dim"),
        config.count("conv_kernel", "mamba_d_conv"),
    )


def num_matrices(config: Config) -> int:
    """Number of matrices of an MLP: 3 with a gate (gate, up, down), 2 without a gate."""
    activation = config.get("mlp_hidden_act") or config.get("hidden_act") or config.get("hidden_activation")
    has_no_gate = config.family in _WITHOUT_GATE or activation in ("relu2", "relu", "gelu_new")
    return 2 if has_no_gate and config.family not in _WITH_GATE else 3


_WITHOUT_GATE = ("apertus", "apertus1p5_text", "biogpt", "gpt_neox", "starcoder2")
"""Model families whose MLPs have no gate, although their activation is one that gated MLPs use."""
_WITH_GATE = ("bitnet",)
"""Model families whose MLPs have a gate, although their activation is one that MLPs without a gate use."""


def _feed(config: Config, layer: Layer) -> Iterator[tuple[str, int]]:
    hidden, projections = config.hidden, _PROJECTIONS[-num_matrices(config) :]
    if layer.feed in {"dense", "both"}:
        width = (
            _searched_width(config.hidden, layer.feed_factor)
            if layer.feed_factor is not None
            else config.count("dense_size")
        )
        width *= 2 if layer.mixer == "shared" and config.get("use_double_wide_mlp") else 1
        yield from ((name, hidden * width) for name in projections)
    if own := config.count("hidden_size_per_layer_input", default=0):
        yield "per_layer_input", 2 * hidden * own
        yield "per_layer_projection", hidden * own
        yield "per_layer_embedding", config.count("vocab_size_per_layer_input") * own
    if layer.feed not in {"experts", "both"}:
        return
    yield "gate", hidden * config.count("experts")
    if latent := config.count("expert_input", default=0):
        yield "latent_proj", 2 * hidden * latent
    if width := shared_width(config):
        yield from ((f"shared_experts.{name}", hidden * width) for name in projections)


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _searched_width(hidden: int, factor: float) -> int:
    """Inner width of an MLP from architecture search: 2/3 of factor * hidden, rounded up to a multiple of 256 as in
    NVIDIA's code. hidden: hidden_size of the model. factor: feed_factor of the layer.
    """
    return -(-int(2 * factor * hidden / 3) // 256) * 256


def expert_size(config: Config) -> int:
    """Inner width of one routed expert: moe_intermediate_size, or the same field by another name (NAMES). If
    config.json has no width of its own for experts: intermediate_size.
    """
    return config.count("expert_size", "intermediate_size")


def shared_width(config: Config) -> int:
    """Sum of the inner widths of all shared experts, which process every token."""
    num_shared = config.count("shared_experts", default=0)
    if width := config.count("shared_size", default=0):
        return width * max(1, num_shared) if config.get("share_expert_dim") else width
    if config.get("interleave_moe_layer_step") is not None and not num_shared:
        return expert_size(config)  # Llama 4 has one beside its experts
    return num_shared * expert_size(config)
