"""A prompt's KV whose pages do not follow each other in memory: the most descriptors that it can have."""

from dataclasses import replace
from math import ceil
from typing import NamedTuple

from pdsim.scenario.schema import Scenario
from pdsim.scenario.sizing import layout_of
from pdsim.scenario.wiring import link_bandwidth, transport, wire_of


class Torn(NamedTuple):
    num_descriptors: int
    """Of one pair of ranks, as are the bytes."""
    num_bytes: int
    ms: float
    """Alone on its links."""


def torn_transfer(scenario: Scenario, page_size: int, num_tokens: float) -> Torn:
    """Of a prompt of so many tokens, in one batch between each pair of ranks."""
    prefill, decode = layout_of(scenario, "prefill"), layout_of(scenario, "decode")
    wire = replace(wire_of(scenario, prefill, decode), page_size=page_size)
    wire = replace(wire, page_bytes=wire.page_bytes // scenario.page_size * page_size)
    apart = range(0, 2 * ceil(num_tokens / page_size), 2)
    load = wire.size(apart, apart, with_state=False)
    engine = transport(scenario)
    bandwidth = link_bandwidth(scenario.network, engine, prefill) / max(wire.num_writers, wire.num_targets)
    bandwidth = min(bandwidth, engine.max_bandwidth or bandwidth)
    moving_ns = max(engine.least_moving_ns(load.num_descriptors), load.num_bytes / bandwidth * 1e9)
    ns = engine.batch_ns + engine.posting_ns(load.num_descriptors) + moving_ns
    return Torn(load.num_descriptors, load.num_bytes, ns / 1e6)
