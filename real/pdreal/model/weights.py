"""Weights of one rank: random by seed, or of a checkpoint. Each rank takes its part of the whole tensor."""

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pdreal.model.config import ModelConfig, ModelError
from pdreal.model.parallel import TensorParallel


class WeightSource(Protocol):
    def whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A parameter of the undivided model, on whatever device."""
        ...


@dataclass(frozen=True)
class RandomWeights:
    """The same for every number of ranks, but not on every kind of device: their generators differ."""

    seed: int
    device: torch.device

    def whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Norms around one; matrices that keep the scale of what passes through them."""
        digest = blake2b(f"{self.seed}/{name}".encode(), digest_size=7).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest))
        normal = torch.randn(shape, generator=generator, device=self.device)
        return normal.mul_(0.1).add_(1) if len(shape) == 1 else normal.mul_(shape[-1] ** -0.5)


@dataclass(frozen=True)
class Checkpoint:
    """The *.safetensors of a folder."""

    folder: Path
    _files: dict[str, Any] = field(default_factory=dict, repr=False)
    """Files by the name of each tensor in them."""

    def whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if not self._files:
            self._open()
        if name not in self._files:
            raise ModelError(f"{self.folder} has no tensor {name}")
        tensor: Tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self.folder}: {name} is {list(tensor.shape)}, and config.json makes it {list(shape)}")
        return tensor

    def _open(self) -> None:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415  random weights do without

        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as wrong:
                raise ModelError(f"{path} cannot be read: {wrong}") from None
            self._files.update(dict.fromkeys(file.keys(), file))


def weight_source(text: str, device: torch.device) -> WeightSource:
    """The source that --weights names: seed:N, or a checkpoint's folder. Raises ModelError."""
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
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """Of all experts of a layer: each rank holds its part of every one."""

    router: Tensor
    """[experts, hidden]"""
    gate_up: Tensor
    """[experts, gate | up, hidden]"""
    down: Tensor
    """[experts, hidden, inner]"""
    num_active: int


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Matrices are [outputs, inputs]; those with the same input are one."""

    input_norm: Tensor
    qkv: Tensor
    head_norms: tuple[Tensor, Tensor] | None
    """Norms of query and key heads."""
    output: Tensor
    mlp_norm: Tensor
    mlp: MlpWeights | ExpertWeights


@dataclass(frozen=True, kw_only=True)
class ModelWeights:
    """Weights of one rank."""

    embedding: Tensor
    """Rows of the whole vocabulary."""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    """Rows of the rank's part of the vocabulary."""


def load_weights(
    config: ModelConfig, source: WeightSource, tp: TensorParallel, dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """Raises ModelError if the model does not divide into so many ranks, or the checkpoint is another's."""
    tp.check(config)
    shapes = config.parameters

    def load(name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        tensor = source.whole(f"{name}.weight", shapes[f"{name}.weight"])
        part = tensor[rows] if tensor.dim() == 1 else tensor[rows, columns]
        return part.to(device, dtype, copy=True).contiguous()

    embedding = load("model.embed_tokens")
    vocabulary = tp.part(config.vocab_size)
    return ModelWeights(
        embedding=embedding,
        layers=tuple(_load_layer(config, tp, load, f"model.layers.{i}") for i in range(config.num_layers)),
        norm=load("model.norm"),
        head=embedding[vocabulary] if config.tied_embeddings else load("lm_head", vocabulary),
    )


def _load_layer(config: ModelConfig, tp: TensorParallel, load: Callable[..., Tensor], at: str) -> LayerWeights:
    query = _rows(tp.part(config.num_query_heads), config.head_dim)
    kv = _rows(tp.kv_heads(config.num_kv_heads), config.head_dim)
    attention = f"{at}.self_attn"
    return LayerWeights(
        input_norm=load(f"{at}.input_layernorm"),
        qkv=torch.cat(
            [load(f"{attention}.q_proj", query), load(f"{attention}.k_proj", kv), load(f"{attention}.v_proj", kv)]
        ),
        head_norms=(load(f"{attention}.q_norm"), load(f"{attention}.k_norm")) if config.llama.qk_norm else None,
        output=load(f"{attention}.o_proj", columns=query),
        mlp_norm=load(f"{at}.post_attention_layernorm"),
        mlp=_load_mlp(config, tp, load, f"{at}.mlp"),
    )


def _load_mlp(
    config: ModelConfig, tp: TensorParallel, load: Callable[..., Tensor], at: str
) -> MlpWeights | ExpertWeights:
    inner = tp.part(config.inner_size)

    def gate_up(at: str) -> Tensor:
        return torch.cat([load(f"{at}.gate_proj", inner), load(f"{at}.up_proj", inner)])

    if config.experts is None:
        return MlpWeights(gate_up=gate_up(at), down=load(f"{at}.down_proj", columns=inner))
    experts = [f"{at}.experts.{i}" for i in range(config.experts.num_experts)]
    return ExpertWeights(
        router=load(f"{at}.gate"),
        gate_up=torch.stack([gate_up(expert) for expert in experts]),
        down=torch.stack([load(f"{expert}.down_proj", columns=inner) for expert in experts]),
        num_active=config.experts.num_active,
    )


def _rows(heads: slice, head_dim: int) -> slice:
    return slice(heads.start * head_dim, heads.stop * head_dim)
