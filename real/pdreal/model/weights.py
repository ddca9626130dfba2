"""Weights of one rank, random or from a checkpoint. Ranks divide heads, MLPs, experts and the output projection."""

from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pdreal.model.block_scaled import BlockScaled, Matrix, cat, quantise, stack, widen
from pdreal.model.delta import DeltaWeights
from pdreal.model.operations import attention_scale
from pdreal.model.parallel import TensorParallel
from pdreal.settings.model import ModelConfig, ModelError
from pdreal.settings.options import Quantization
from pdsim.system.llama import GatedDelta, GroupedRouting
from pdsim.system.model import LatentAttention


class WeightSource(Protocol):
    def whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns a parameter, not divided among ranks, on any device. An fp8 parameter is widened to fp32."""
        ...

    def scaled(self, name: str, shape: tuple[int, ...]) -> BlockScaled | None:
        """Returns the parameter in fp8 with scales. None: the source does not have the parameter in fp8."""
        ...


@dataclass(frozen=True)
class RandomWeights:
    """Random weights by a seed. The values do not depend on the number of ranks. They differ between CPU and GPU,
    because the random generators differ.
    """

    seed: int
    device: torch.device

    def whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns random values: vectors around one (A_log: around -3), matrices that keep the scale of activations."""
        digest = blake2b(f"{self.seed}/{name}".encode(), digest_size=7).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest))
        normal = torch.randn(shape, generator=generator, device=self.device)
        if name.endswith("A_log"):
            return normal.sub_(3)  # states fade within tens of tokens, not at once
        return normal.mul_(0.1).add_(1) if len(shape) == 1 else normal.mul_(shape[-1] ** -0.5)

    def scaled(self, name: str, shape: tuple[int, ...]) -> BlockScaled | None:
        return None


@dataclass(frozen=True)
class QuantisedWeights:
    """Another source's weights, with the projections of all layers in fp8: quantised, unless the source has fp8."""

    source: WeightSource

    def whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        scaled = self.scaled(name, shape)
        return self.source.whole(name, shape) if scaled is None else widen(scaled)

    def scaled(self, name: str, shape: tuple[int, ...]) -> BlockScaled | None:
        return self.source.scaled(name, shape) or (
            quantise(self.source.whole(name, shape)) if "_proj" in name else None
        )


@dataclass(frozen=True)
class Checkpoint:
    """The *.safetensors files of a checkpoint's folder."""

    folder: Path
    _files: dict[str, Any] = field(default_factory=dict, repr=False)
    """Open file of each tensor, by the tensor's name. Empty until a parameter is read."""

    def whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if not self._files:
            self._open()
        if name not in self._files:
            raise ModelError(f"{self.folder} has no tensor {name}")
        tensor: Tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self.folder}: {name} is {list(tensor.shape)}, and config.json makes it {list(shape)}")
        return tensor if tensor.dtype != torch.float8_e4m3fn else widen(BlockScaled(tensor, self._scales(name)))

    def scaled(self, name: str, shape: tuple[int, ...]) -> BlockScaled | None:
        if not self._files:
            self._open()
        if f"{name}_scale_inv" not in self._files:
            return None
        return BlockScaled(self._files[name].get_tensor(name), self._scales(name))

    def _scales(self, name: str) -> Tensor:
        scales = f"{name}_scale_inv"
        if scales not in self._files:
            raise ModelError(f"{self.folder} has no tensor {scales}, which {name} in fp8 needs")
        return self._files[scales].get_tensor(scales).float()  # type: ignore[no-any-return]

    def _open(self) -> None:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415  random weights do without

        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as wrong:
                raise ModelError(f"{path} cannot be read: {wrong}") from None
            self._files.update(dict.fromkeys(file.keys(), file))


def weight_source(text: str, device: torch.device, quantization: Quantization | None = None) -> WeightSource:
    """Returns the source that --weights names: seed:N, or the folder of a checkpoint. device: where random weights are
    made. quantization: "fp8": projections are quantised; None: parameters keep their types. Raises ModelError if N is
    no whole number, or the folder does not exist.
    """
    source = _source(text, device)
    return source if quantization is None else QuantisedWeights(source)


def _source(text: str, device: torch.device) -> WeightSource:
    if text.startswith("seed:"):
        seed = text.removeprefix("seed:")
        if not seed.isdecimal():
            raise ModelError(f"weights {text!r}: a seed is a whole number, as in seed:0")
        return RandomWeights(int(seed), device)
    folder = Path(text)
    if not folder.is_dir():
        raise ModelError(f"weights {text!r} are neither seed:N nor a folder")
    return Checkpoint(folder)


@dataclass(frozen=True, kw_only=True)
class MlpWeights:
    gate_up: Matrix
    """Gate and up projections, joined to one matrix."""
    down: Matrix


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """A layer's experts as a rank holds them: a part of each expert, or some experts whole."""

    router: Tensor
    """Router matrix, [all experts, hidden]."""
    gate_up: Matrix
    """Gate and up projections, [own experts, gate | up, hidden]."""
    down: Matrix
    """Down projections of the rank's own experts, [own experts, hidden, inner]."""
    num_active: int
    """Number of experts that each token chooses."""
    own: range
    """Indices, among the layer's experts, of those that this rank holds."""
    routing: GroupedRouting | None = None
    bias: Tensor | None = None
    """Bias that changes which experts are chosen, but not their weights: [all experts] in fp32. None: no bias."""
    shared: MlpWeights | None = None
    """Experts that process every token, kept as one MLP. None: the layer has no such experts."""


@dataclass(frozen=True, kw_only=True)
class GroupedWeights:
    qkv: Matrix
    """Projections to queries, keys, values and, if the model has them, gates of this rank's heads, in this order."""
    head_norms: tuple[Tensor, Tensor] | None
    """Weights of the norms of query heads and of key heads, [head_dim] each. None: heads have no norms."""


@dataclass(frozen=True)
class LatentHeads:
    """The query heads of a rank with latent attention, where each token has one latent for all heads.

    Attention can be computed in two ways with equal results. `expand` makes keys and values from the latents, which is
    less work for prompts. `absorb` projects queries into the space of the latents, which reads less memory in decode. A
    latent is [latent rank | rotated key], a query [plain | rotated].
    """

    keys: Tensor
    """Projections from latents to keys, [heads, width, latent rank]. width: width of a key without its rotated part."""
    values: Tensor
    """Projections from latents to values, [heads, width of a value, latent rank]."""
    scale: float
    """Factor by which attention scores are multiplied."""

    @property
    def rank(self) -> int:
        return self.keys.shape[2]

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys [tokens, heads, plain | rotated] and values [tokens, heads, value]. latent: [tokens, 1, ...]."""
        low, rotated = latent[:, 0, : self.rank], latent[..., self.rank :]
        keys, values = (_each_head(low, part.flatten(0, 1), len(part)) for part in (self.keys, self.values))
        return torch.cat((keys, rotated.expand(-1, len(self.keys), -1)), dim=-1), values

    def absorb(self, query: Tensor) -> Tensor:
        """Returns queries that attend to latents directly, [tokens, heads, latent rank | rotated]."""
        plain, rotated = query.tensor_split((self.keys.shape[1],), dim=-1)
        low = torch.bmm(plain.transpose(0, 1), self.keys).transpose(0, 1)
        return torch.cat((low, rotated), dim=-1)

    def read_out(self, attended: Tensor) -> Tensor:
        """Returns the outputs of heads, [tokens, heads, value]. attended: sums of latents, weighted by attention."""
        return torch.bmm(attended.transpose(0, 1), self.values.transpose(1, 2)).transpose(0, 1)


def _each_head(low: Tensor, matrix: Tensor, num_heads: int) -> Tensor:
    return functional.linear(low, matrix).view(len(low), num_heads, -1)


@dataclass(frozen=True, kw_only=True)
class LatentWeights:
    into: Tensor
    """Projections of the hidden state, joined to one matrix [outputs, hidden]. Outputs: the queries (or the latent that
    queries are made from), then the KV latent, then the rotated part of the key."""
    query_norm: Tensor | None
    """Weight of the norm of the queries' latent. None: queries are not made from a latent."""
    query: Tensor | None
    """Query projection, [heads * (plain | rotated), query rank]. None: the projection `into` makes the queries."""
    latent_norm: Tensor
    heads: LatentHeads


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Weights of one layer. Matrices are [outputs, inputs]. The projections of the input of attention are joined into
    one matrix, and so are the gate and up projections of an MLP.
    """

    input_norm: Tensor
    attention: GroupedWeights | LatentWeights | DeltaWeights
    output: Matrix
    """Projection of the outputs of this rank's heads to the hidden state."""
    mlp_norm: Tensor
    mlp: MlpWeights | ExpertWeights


@dataclass(frozen=True, kw_only=True)
class ModelWeights:
    """The weights that one rank holds of a model."""

    embedding: Tensor
    """Embedding rows of the whole vocabulary."""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    """Weight of the norm after the last layer."""
    head: Tensor
    """Output projection rows of the rank's part of the vocabulary."""


def load_weights(
    config: ModelConfig,
    source: WeightSource,
    tp: TensorParallel,
    dtype: torch.dtype,
    device: torch.device,
    *,
    keeps_fp8: bool | None = None,
) -> ModelWeights:
    """Loads the weights of one rank. keeps_fp8: fp8 matrices of the source stay fp8 (except input projections of latent
    and of linear attention); None: only on a GPU. Raises ModelError if the model does not divide among the ranks,
    or an fp8 matrix not into whole blocks, or if the checkpoint cannot be read or belongs to another model.
    """
    tp.check(config)
    shapes = config.parameters

    keeps = device.type == "cuda" if keeps_fp8 is None else keeps_fp8
    load = _Loader(source, shapes, dtype, device, keeps, 0.0 if config.llama.delta is None else 1.0)
    embedding = load("model.embed_tokens")
    vocabulary = tp.part(config.vocab_size)
    return ModelWeights(
        embedding=embedding,
        layers=tuple(_load_layer(config, tp, load, i) for i in range(config.num_layers)),
        norm=load.norm("model.norm"),
        head=embedding[vocabulary] if config.tied_embeddings else load("lm_head", vocabulary),
    )


def load_draft_weights(
    config: ModelConfig, source: WeightSource, tp: TensorParallel, target: ModelWeights
) -> tuple[Tensor, ModelWeights]:
    """Loads a draft head: its projection [hidden, embedding | hidden], and its layer. The head shares embedding and
    output projection with the target model. config: shape of the head, which has one layer. Raises ModelError if the
    layer cannot be divided among the ranks of `tp`.
    """
    tp.check(config)
    shapes = {**config.parameters, "fc.weight": (config.hidden_size, 2 * config.hidden_size)}
    embedding = target.embedding
    load = _Loader(source, shapes, embedding.dtype, embedding.device, keeps_fp8=False)
    layers = (_load_layer(config, tp, load, 0),)
    return load("fc"), ModelWeights(embedding=embedding, layers=layers, norm=load("model.norm"), head=target.head)


@dataclass(frozen=True)
class _Loader:
    source: WeightSource
    shapes: dict[str, tuple[int, ...]]
    """Shape of each whole parameter, by its name in checkpoints."""
    dtype: torch.dtype
    device: torch.device
    keeps_fp8: bool
    """True: the method `matrix` leaves matrices in fp8 that the source has in fp8."""
    norm_offset: float = 0.0
    """Added to the weights that the method `norm` loads: 1 for Qwen3.5, whose checkpoints hold these weights minus one.
    The norm within a gated delta net has no offset."""

    def norm(self, name: str) -> Tensor:
        weight = self._whole(f"{name}.weight")
        return (weight.float() + self.norm_offset).to(self.device, self.dtype, copy=True)

    def __call__(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        tensor = self._whole(f"{name}.weight")
        part = tensor[rows] if tensor.dim() == 1 else tensor[rows, columns]
        return part.to(self.device, self.dtype, copy=True).contiguous()

    def matrix(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Matrix:
        if self.keeps_fp8:
            scaled = self.source.scaled(f"{name}.weight", self.shapes[f"{name}.weight"])
            if scaled is not None:
                try:
                    return scaled.part(rows, columns).to(self.device)
                except ValueError as wrong:
                    raise ModelError(f"{name}: {wrong}") from None
        return self(name, rows, columns)

    def heads(self, name: str, num_heads: int, part: slice) -> Tensor:
        """Returns the rows of a matrix that belong to some heads, [heads, rows of a head, inputs]. name: name of the
        parameter without the ending .weight. num_heads: number of heads in the whole matrix. part: indices of the heads
        to return.
        """
        whole = self._whole(f"{name}.weight")
        return whole.view(num_heads, -1, whole.shape[1])[part].to(self.device, self.dtype)

    def bias(self, name: str) -> Tensor:
        return self._whole(name).to(self.device, torch.float32, copy=True)

    def _whole(self, name: str) -> Tensor:
        return self.source.whole(name, self.shapes[name])


def _load_layer(config: ModelConfig, tp: TensorParallel, load: _Loader, index: int) -> LayerWeights:
    at = f"model.layers.{index}"
    attention, output, inputs = f"{at}.self_attn", "o_proj", config.output_inputs
    mixer: GroupedWeights | LatentWeights | DeltaWeights
    if (delta := config.llama.delta) is not None and not delta.has_attention(index):
        attention, output, inputs = f"{at}.linear_attn", "out_proj", delta.num_value_heads * delta.value_dim
        mixer = _load_delta(delta, tp, load, attention)
    elif config.latent is None:
        mixer = _load_grouped(config, tp, load, attention)
    else:
        mixer = _load_latent(config, config.latent, tp, load, attention)
    return LayerWeights(
        input_norm=load.norm(f"{at}.input_layernorm"),
        attention=mixer,
        output=load.matrix(f"{attention}.{output}", columns=tp.part(inputs)),
        mlp_norm=load.norm(f"{at}.post_attention_layernorm"),
        mlp=_load_mlp(config, tp, load, index),
    )


def _load_delta(delta: GatedDelta, tp: TensorParallel, load: _Loader, at: str) -> DeltaWeights:
    keys, values = tp.part(delta.num_key_heads), tp.part(delta.num_value_heads)
    channels, begin = [], 0  # of queries, keys and values
    for heads, dim, num in ((keys, delta.key_dim, delta.num_key_heads),) * 2 + (
        (values, delta.value_dim, delta.num_value_heads),
    ):
        channels.append(slice(begin + heads.start * dim, begin + heads.stop * dim))
        begin += num * dim
    parts = [load(f"{at}.in_proj_qkv", rows) for rows in channels]
    parts.append(load(f"{at}.in_proj_z", _rows(values, delta.value_dim)))
    parts += [load(f"{at}.in_proj_{name}", values) for name in ("b", "a")]
    return DeltaWeights(
        into=torch.cat(parts),
        conv=torch.cat([load(f"{at}.conv1d", rows) for rows in channels])[:, 0],
        rate=-load.bias(f"{at}.A_log").exp()[values],
        bias=load.bias(f"{at}.dt_bias")[values],
        norm=load(f"{at}.norm"),
        num_key_heads=keys.stop - keys.start,
        num_value_heads=values.stop - values.start,
        key_dim=delta.key_dim,
        value_dim=delta.value_dim,
    )


def _load_grouped(config: ModelConfig, tp: TensorParallel, load: _Loader, at: str) -> GroupedWeights:
    query = _rows(tp.part(config.num_query_heads), config.head_dim)
    kv = _rows(tp.kv_heads(config.num_kv_heads), config.head_dim)
    norms = (load.norm(f"{at}.q_norm"), load.norm(f"{at}.k_norm")) if config.llama.qk_norm else None
    if config.llama.delta is not None:  # each head's query, then its gate; all widened, as in _load_delta
        own = load.heads(f"{at}.q_proj", config.num_query_heads, tp.part(config.num_query_heads))
        queries, gates = (part.flatten(0, 1) for part in own.split(config.head_dim, dim=1))
        keys, values = (load(f"{at}.{name}_proj", kv) for name in ("k", "v"))
        return GroupedWeights(qkv=torch.cat((queries, keys, values, gates)), head_norms=norms)
    parts = [load.matrix(f"{at}.{name}_proj", rows) for name, rows in (("q", query), ("k", kv), ("v", kv))]
    return GroupedWeights(qkv=cat(parts), head_norms=norms)


def _load_latent(
    config: ModelConfig, latent: LatentAttention, tp: TensorParallel, load: _Loader, at: str
) -> LatentWeights:
    """Loads the latent attention of one layer. at: prefix of the attention's parameter names. Checkpoints rotate pairs
    of neighbouring dimensions, but real mode rotates the first half with the second, so rows are reordered here, once.
    """
    heads, rank = config.num_query_heads, config.llama.query_rank
    part = tp.part(heads)
    query = _halved(load.heads(f"{at}.q_b_proj" if rank else f"{at}.q_proj", heads, part), latent.nope_dim).flatten(
        0, 1
    )
    into = load(f"{at}.q_a_proj") if rank else query
    of_latent = _halved(load(f"{at}.kv_a_proj_with_mqa")[None], latent.kv_lora_rank)[0]
    keys, values = load.heads(f"{at}.kv_b_proj", heads, part).split((latent.nope_dim, latent.value_dim), dim=1)
    return LatentWeights(
        into=torch.cat((into, of_latent)),
        query_norm=load(f"{at}.q_a_layernorm") if rank else None,
        query=query if rank else None,
        latent_norm=load(f"{at}.kv_a_layernorm"),
        heads=LatentHeads(keys.contiguous(), values.contiguous(), attention_scale(config.llama, latent)),
    )


def _halved(heads: Tensor, num_plain: int) -> Tensor:
    """Returns each head's first num_plain rows, then of its other rows those at 0, 2, ..., then those at 1, 3, ..."""
    return torch.cat((heads[:, :num_plain], heads[:, num_plain::2], heads[:, num_plain + 1 :: 2]), dim=1)


def _load_mlp(config: ModelConfig, tp: TensorParallel, load: _Loader, index: int) -> MlpWeights | ExpertWeights:
    at = f"model.layers.{index}.mlp"

    def mlp(at: str, inner: slice) -> MlpWeights:
        gate_up = cat([load.matrix(f"{at}.gate_proj", inner), load.matrix(f"{at}.up_proj", inner)])
        return MlpWeights(gate_up=gate_up, down=load.matrix(f"{at}.down_proj", columns=inner))

    if config.experts is None or index < config.num_dense_layers:
        return mlp(at, tp.part(config.llama.intermediate_size))
    inner_size, routing = config.experts.intermediate_size, config.llama.routing
    own = range(config.experts.num_experts)[tp.experts(config.experts.num_experts)]
    experts = [mlp(f"{at}.experts.{i}", tp.inner_of_expert(inner_size)) for i in own]
    return ExpertWeights(
        router=load(f"{at}.gate"),
        gate_up=stack([expert.gate_up for expert in experts]),
        down=stack([expert.down for expert in experts]),
        num_active=config.experts.num_active,
        own=own,
        routing=routing,
        bias=load.bias(f"{at}.gate.e_score_correction_bias") if routing else None,
        shared=mlp(f"{at}.shared_experts", tp.inner_of_shared(routing.num_shared * inner_size)) if routing else None,
    )


def _rows(heads: slice, head_dim: int) -> slice:
    return slice(heads.start * head_dim, heads.stop * head_dim)
