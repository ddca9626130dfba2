"""How large should a page be, and what do descriptors cost?"""

from dataclasses import replace
from math import ceil
from typing import NamedTuple

from pdsim.scenario.schema import Scenario
from pdsim.scenario.sizing import layout_of
from pdsim.scenario.wiring import link_bandwidth, transport, wire_of
from pdsim.study.questions.base import Base
from pdsim.study.questions.question import Arm, Question, Verdict
from pdsim.study.questions.study import Study
from pdsim.study.questions.words import milliseconds, number

_PAGES = (1, 16, 32, 64, 128, 256)
_LITTLE = 0.05
"""Share of a prompt's forward: a transfer that is longer by less is not worth larger pages."""
_EXPOSED = "mean_prefill_transfer_kv_cache_ms"


class Torn(NamedTuple):
    """A prompt's KV whose pages do not follow each other: the most descriptors that it can have."""

    num_descriptors: int
    """Number of one pair of ranks, as are the bytes."""
    num_bytes: int
    ms: float
    """Alone on its links."""


def arms(_base: Base) -> list[Arm]:
    return [Arm(str(page), {"page_size": page}, page) for page in _PAGES]


def verdict(study: Study) -> Verdict:
    """Judges by pages that do not follow each other: the pools of a short run are younger than those of a server."""
    prompt = study.mean_prompt_tokens
    torn = {label: _torn_transfer(study.base.scenario, int(label), prompt) for label in study.labels()}
    first, last = next(iter(torn)), next(reversed(torn))
    little_ms = _LITTLE * study.metric(last, "mean_prefill_forward_ms").mean
    best = next(label for label in torn if torn[label].ms <= torn[last].ms + little_ms)
    ms = {label: f"{number(torn[label].ms)} ms" for label in torn}
    text = f"when the pages of a prompt of {prompt:,.0f} tokens do not follow each other, "
    text += f"its KV takes {ms[best]} to move, {ms[first]} with pages of {first} and {ms[last]} with pages of {last}."
    young = [milliseconds(study.metric(label, _EXPOSED)) for label in (first, best)]
    found = (
        f"In this run, whose pools are young, compute leaves {young[0]} of a transfer uncovered with pages of {first}, "
    )
    found += f"{young[1]} with pages of {best}."
    lines = [_line(study, label, torn[label]) for label in torn]
    return Verdict(best, f"Use pages of {best} tokens", text, [found, *lines])


def _line(study: Study, label: str, torn: Torn) -> str:
    size = torn.num_bytes / torn.num_descriptors / 1e3
    seen = study.metric(label, "descriptors").mean / study.metric(label, "completed").mean
    return (
        f"Pages of {label}: {torn.num_descriptors:,} descriptors of {number(size)} KB a pair of ranks, "
        f"{number(torn.num_bytes / torn.ms / 1e6)} GB/s; in this run {seen:,.0f} of all ranks."
    )


def _torn_transfer(scenario: Scenario, page_size: int, num_tokens: float) -> Torn:
    """Moves the KV of one prompt in one batch between each pair of ranks, no page following another."""
    prefill, decode = layout_of(scenario, "prefill"), layout_of(scenario, "decode")
    wire = replace(wire_of(scenario, prefill, decode), page_size=page_size)
    wire = replace(wire, page_bytes=wire.page_bytes // scenario.page_size * page_size)
    apart = tuple(range(0, 2 * ceil(num_tokens / page_size), 2))
    load = wire.size(apart, apart, with_state=False)
    engine = transport(scenario)
    bandwidth = link_bandwidth(scenario.network, engine, prefill) / max(wire.num_writers, wire.num_targets)
    bandwidth = min(bandwidth, engine.max_bandwidth or bandwidth)
    moving_ns = max(engine.least_moving_ns(load.num_descriptors), load.num_bytes / bandwidth * 1e9)
    ns = engine.batch_ns + engine.posting_ns(load.num_descriptors) + moving_ns
    return Torn(load.num_descriptors, load.num_bytes, ns / 1e6)


QUESTION = Question(
    asks="How large should a page be, and what do descriptors cost?",
    columns=("attained", "descriptors", "transfer", "ttft", "tail_ttft", "rate"),
    arms=arms,
    verdict=verdict,
    axis="tokens of a page",
)
