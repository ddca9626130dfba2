"""Divides a model's layers into pipeline stages."""

from dataclasses import replace
from math import ceil

from pdsim.system.model import LatentAttention, ModelSpec


def stage_layers(num_layers: int, num_stages: int) -> list[int]:
    """Number of layers of each pipeline stage. The last num_layers % num_stages stages have one layer more than the
    others (SGLang's get_pp_indices).
    """
    few, rest = divmod(num_layers, num_stages)
    return [few] * (num_stages - rest) + [few + 1] * rest


def largest_stage(model: ModelSpec, num_stages: int) -> ModelSpec:
    """Returns a model's largest pipeline stage as a model. Parameters of embeddings are divided in proportion to
    layers.

    A stage keeps KV and states of its own layers only (SGLang 0.5.23, mem_cache/kv_cache_configurator.py:888). The
    catalog does not say where layers of each kind are. So each kind is divided in proportion to all layers, rounded up.
    """
    if num_stages == 1:
        return model
    num_layers = max(stage_layers(model.num_layers, num_stages))
    share = num_layers / model.num_layers

    def part(num_layers: int) -> int:
        return ceil(num_layers * share - 1e-9)

    windows = part(model.attention.num_window_layers)
    attention = replace(model.attention, num_layers=part(model.attention.num_layers), num_window_layers=windows)
    if isinstance(attention, LatentAttention):
        if attention.compress_ratios is not None:
            ratios = {ratio: part(count) for ratio, count in attention.compress_ratios.items()}
            attention = replace(attention, compress_ratios=ratios)
        if num_indexers := attention.num_index_layers:
            index_bytes = attention.index_token_bytes * part(num_indexers) // num_indexers
            attention = replace(attention, index_token_bytes=index_bytes)
    found = replace(
        model,
        num_params=(model.num_params - model.num_expert_params) * share,
        num_active_params=(model.num_active_params - model.expert_flops_per_token / 2) * share,
        num_params_wider_than_fp4=model.num_params_wider_than_fp4 * share,
        num_params_in_bf16=model.num_params_in_bf16 * share,
        num_layers=num_layers,
        vocab_size=ceil(model.vocab_size * share),
        attention=attention,
        state=None if model.state is None else replace(model.state, num_layers=part(model.state.num_layers)),
    )
    if model.experts is None:
        return found
    found = replace(found, experts=replace(model.experts, num_layers=part(model.experts.num_layers)))
    return replace(
        found,
        num_params=found.num_params + found.num_expert_params,
        num_active_params=found.num_active_params + found.expert_flops_per_token / 2,
    )
