"""From a scenario to the exchange between its instances and the mover of each rank."""

from collections.abc import Sequence

import torch

from pdreal.geometry import CacheGeometry, Exchange, heads_of_rank
from pdreal.mover import DecodeMover, PrefillMover
from pdreal.transports.protocol import Transport
from pdsim.scenario import wiring
from pdsim.scenario.schema import DecodeSettings, PrefillSettings, Scenario
from pdsim.scenario.sizing import layout_of
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.memory import Layout
from pdsim.system.model import DTYPE_BYTES, GroupedQueryAttention


def exchange_of(scenario: Scenario) -> Exchange:
    """Of a resolved scenario. Raises ConfigError for a model that only the simulator has."""
    prefill, decode = layout_of(scenario, "prefill"), layout_of(scenario, "decode")
    attention = prefill.model.attention
    if prefill.model.state is not None or not isinstance(attention, GroupedQueryAttention):
        raise ConfigError(
            f"model: {prefill.model.name} has linear-attention state or latent KV, which run in simulation only; "
            "real mode has models with grouped-query attention in every layer"
        )
    return Exchange(
        wire=wiring.wire_of(scenario, prefill, decode),
        num_kv_heads=attention.num_kv_heads,
        prefill_tp=prefill.tp,
        decode_tp=decode.tp,
        prefill=cache_geometry(scenario, scenario.pair.prefill, prefill),
        decode=cache_geometry(scenario, scenario.pair.decode, decode),
        layer_groups=scenario.pair.prefill.layer_groups,
    )


def cache_geometry(scenario: Scenario, settings: PrefillSettings | DecodeSettings, layout: Layout) -> CacheGeometry:
    """Of any rank of a role, in a resolved scenario."""
    attention = layout.model.attention
    assert isinstance(attention, GroupedQueryAttention)
    assert settings.pool_tokens is not None, "the scenario is not resolved"
    return CacheGeometry(
        num_pages=settings.pool_tokens // scenario.page_size,
        page_size=scenario.page_size,
        num_layers=attention.num_layers,
        num_kv_heads=len(heads_of_rank(attention.num_kv_heads, layout.tp, 0)),
        head_dim=attention.head_dim,
        itemsize=int(DTYPE_BYTES[layout.kv_dtype]),
    )


def prefill_mover(scenario: Scenario, rank: int, planes: Sequence[torch.Tensor], transport: Transport) -> PrefillMover:
    exchange = exchange_of(scenario)
    return PrefillMover(
        exchange,
        rank,
        planes,
        transport,
        buffer_bytes=_largest_cell_bytes(scenario, exchange),
        num_buffers=wiring.transport(scenario).num_queues,
    )


def decode_mover(scenario: Scenario, rank: int, planes: Sequence[torch.Tensor], transport: Transport) -> DecodeMover:
    exchange, staging = exchange_of(scenario), scenario.network.staging
    is_staged = staging is not None and exchange.wire.slices
    return DecodeMover(exchange, rank, planes, transport, ring_bytes=staging.ring if staging and is_staged else 0)


def _largest_cell_bytes(scenario: Scenario, exchange: Exchange) -> int:
    """That one pair of ranks stages: larger cells are sent as slices, or not at all."""
    staging = scenario.network.staging
    if staging is None or not exchange.wire.slices:
        return 0
    plan = wiring.staging_plan(scenario, staging)
    pages = min(plan.cell_pages, exchange.prefill.num_pages)
    cell_bytes = min(pages * exchange.wire.page_bytes, plan.ring_bytes // exchange.wire.num_writers)
    return cell_bytes if plan.buffer_bytes is None else min(cell_bytes, plan.buffer_bytes)
