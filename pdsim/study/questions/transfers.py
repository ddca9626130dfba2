"""Questions on transfers of KV: transports, overlap with prefill, page sizes, and staging memory."""

from dataclasses import replace
from math import ceil
from typing import NamedTuple

from pdsim.scenario.building.sizing import layout_of, resolve
from pdsim.scenario.building.wiring import link_bandwidth, staging_plan, transport, wire_of
from pdsim.scenario.loading import Changes
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.base import Base
from pdsim.study.points.estimate import number, percent
from pdsim.study.questions.study import EQUAL, Arm, Question, Study, Verdict
from pdsim.system.catalog import load_model, load_transport
from pdsim.system.model import LatentAttention

_ENGINES = ("mooncake-tcp", "mooncake-rdma", "nixl-rdma", "mooncake-nvlink", "cuda-ipc")
_RDMA = "mooncake-rdma"
_FALL_BACK = "nixl-efa-fallback"
_GIGABYTES = (0.5, 1, 2, 5, 10, 25, 50, 100)
_LITTLE = 0.05
"""A faster link is not recommended if it saves less than this share of the mean TTFT. The share refers to the mean TTFT
with the fastest link.
"""
_EXPOSED = "mean_prefill_transfer_kv_cache_ms"
_LINKS = "links of RDMA's engine"


def _transport_arms(_base: Base) -> list[Arm]:
    """Candidates with each transfer engine of _ENGINES on the GPU's own links, followed by candidates with
    mooncake-rdma on links of several bandwidths.
    """
    keep = {"network.bandwidth": None, "network.transfer_latency": None, "network.descriptor_latency": None}
    engines = [Arm(name, {**keep, "network.transport": name}) for name in _ENGINES]
    rdma = {**keep, "network.transport": _RDMA}
    links = [Arm(f"{n:g} GB/s", {**rdma, "network.bandwidth": f"{n} GB/s"}, series=_LINKS) for n in _GIGABYTES]
    return engines + links


def _transport_verdict(study: Study) -> Verdict:
    engines = study.labels("")
    best = study.best(engines)
    ttft, exposed = (study.metric(best, name).duration for name in ("mean_ttft_ms", _EXPOSED))
    text = f"mean TTFT {ttft}, with {exposed} of transfer that compute does not hide"
    if study[best].is_saturated:
        text = "it serves the most requests"
    found = study.others_against(best, engines)
    return Verdict(best, f"Use {best}", "; ".join([text, *found]) + ".", [_knee(study), _fall_back(study, best)])


def _fall_back(study: Study, best: str) -> str:
    """A sentence on NIXL over AWS's network EFA: without its backend LIBFABRIC, NIXL falls back to UCX, which is slow
    there. Says how long the transfer of a request's KV then takes. best: the candidate whose mean KV size is used.
    """
    slow = load_transport(_FALL_BACK).max_bandwidth
    assert slow is not None
    seconds = study.mean(best, "transfer_bytes") / study.mean(best, "completed") / slow
    said = f"On AWS (EFA) give NIXL its LIBFABRIC backend: UCX emulates RDMA there, at only {slow / 1e9:.1f} GB/s"
    return f"{said} or {number(seconds)} s per request, and no log says so (transport {_FALL_BACK})."


def _knee(study: Study) -> str:
    links = study.steady(study.labels(_LINKS))
    if not links:
        return "The cluster cannot take the load even with the fastest link, so links are not the bottleneck."
    fastest = study.mean(links[-1], "mean_ttft_ms")
    enough = next(label for label in links if study.mean(label, "mean_ttft_ms") <= (1 + _LITTLE) * fastest)
    size = study.mean(enough, "transfer_bytes") / study.mean(enough, "completed") / 1e9
    knee = f"Links faster than {enough} save less than {percent(_LITTLE)} of mean TTFT"
    return f"{knee}; the KV of a mean request has {number(size)} GB."


TRANSPORT = Question(
    asks="Which transport should carry KV, and how fast must its link be?",
    columns=("attained", "goodput", "ttft", "tail_ttft", "transfer", "tpot", "rate"),
    arms=_transport_arms,
    verdict=_transport_verdict,
)


_WHOLE, _CHUNKS, _SMALL = "whole prompt", "each chunk", "each chunk of 2,048"
_GROUPS = (2, 4)


def _overlap_arms(base: Base) -> list[Arm]:
    """Candidates that send KV after the whole prompt, after each chunk, or after groups of layers. Layer groups are
    tried only if prefill and decode have equal TP sizes, and prefill has neither pipeline nor context parallelism.
    """
    scenario = base.scenario
    prefill, decode = layout_of(scenario, "prefill"), layout_of(scenario, "decode")
    chunks: Changes = {"prefill.transfer": "every_chunk", "prefill.layer_groups": 0}
    made = [
        Arm(_WHOLE, {"prefill.transfer": "whole_prompt", "prefill.layer_groups": 0}),
        Arm(_CHUNKS, chunks),
        Arm(_SMALL, {**chunks, "prefill.chunked_prefill_tokens": 2048 * scenario.pair.prefill.dp}),
    ]
    if prefill.tp == decode.tp and prefill.pp == prefill.cp == 1:
        layers = load_model(scenario.model).num_layers
        made += [Arm(f"{n} groups of layers", {**chunks, "prefill.layer_groups": n}) for n in (*_GROUPS, layers)]
    return made


def _overlap_verdict(study: Study) -> Verdict:
    labels = study.steady(study.labels())
    if _WHOLE not in labels:
        best = study.best(study.labels())
        return Verdict(best, f"Send by '{best}'", "whole prompts saturate the cluster.")
    meeting = [label for label in labels if study.meets(label)]
    best = min(meeting or labels, key=lambda label: study.mean(label, "mean_ttft_ms"))
    gain = study.ratio(best, _WHOLE, "mean_ttft_ms")
    exposed = {label: study.metric(label, _EXPOSED).duration for label in labels}
    if best == _WHOLE or not gain.is_told_apart:
        text = f"if KV is sent after the whole prompt, the first token waits {exposed[_WHOLE]} for the transfer"
        text += ", and no other way changes mean TTFT beyond chance."
        return Verdict(_CHUNKS if _CHUNKS in labels else best, "The way of sending hardly matters", text)
    text = f"mean TTFT is {gain.change} than if KV is sent after whole prompts, because "
    text += f"a request then waits {exposed[best]} for its transfer, not {exposed[_WHOLE]}."
    return Verdict(best, f"Send by '{best}'", text, _chunks_alone(study, best))


def _chunks_alone(study: Study, best: str) -> list[str]:
    """A sentence that compares the mean TTFT of sending KV chunk by chunk with that of sending whole prompts. Empty:
    chunk by chunk is the recommended candidate, is saturated, or has no result. best: label of the recommended
    candidate.
    """
    if best == _CHUNKS or _CHUNKS not in study.steady(study.labels()):
        return []
    gain = study.ratio(_CHUNKS, _WHOLE, "mean_ttft_ms")
    if not gain.is_told_apart:
        return ["KV sent chunk by chunk, as SGLang does, changes mean TTFT by no more than chance."]
    return [f"If KV is sent chunk by chunk, as SGLang does, mean TTFT is {gain.change} than with whole prompts."]


OVERLAP = Question(
    asks="Does sending KV while it is computed pay, by chunk or by layer?",
    columns=("attained", "ttft", "tail_ttft", "transfer", "forward", "rate"),
    arms=_overlap_arms,
    verdict=_overlap_verdict,
)


_PAGES = (1, 16, 32, 64, 128, 256)
_LITTLE_OF_FORWARD = 0.05
"""The smallest page size is recommended whose transfer takes longer than with the largest pages by at most this share
of the mean time in which prefill computes a prompt.
"""


class Torn(NamedTuple):
    """A transfer of one prompt's KV in which no two pages are contiguous, so that there are as many descriptors as
    possible.
    """

    num_descriptors: int
    """Number of descriptors that one pair of ranks sends in the transfer."""
    num_bytes: int
    """Number of bytes that one pair of ranks sends in the transfer."""
    ms: float
    """Duration of the transfer in ms if no other transfer uses the links."""


def _page_and_descriptors_arms(_base: Base) -> list[Arm]:
    return [Arm(str(page), {"page_size": page}, page) for page in _PAGES]


def _page_and_descriptors_verdict(study: Study) -> Verdict:
    """Recommends the smallest page size with which transfers of scattered pages are fast enough (_LITTLE_OF_FORWARD).
    Pages are scattered on a real server, because it runs longer than the simulated run.
    """
    prompt = study.mean_prompt_tokens
    torn = {label: _torn_transfer(study.base.scenario, int(label), prompt) for label in study.labels()}
    first, last = next(iter(torn)), next(reversed(torn))
    little_ms = _LITTLE_OF_FORWARD * study.mean(last, "mean_prefill_forward_ms")
    best = next(label for label in torn if torn[label].ms <= torn[last].ms + little_ms)
    ms = {label: f"{number(torn[label].ms)} ms" for label in torn}
    text = f"with pages scattered in memory, the KV of a prompt of {prompt:,.0f} tokens "
    text += f"moves in {ms[best]}, in {ms[first]} with pages of {first} and in {ms[last]} with pages of {last}."
    young = [study.metric(label, _EXPOSED).duration for label in (first, best)]
    found = (
        f"In this short run pages are less scattered: a request waits {young[0]} for its transfer with pages of {first}"
    )
    found += f", {young[1]} with pages of {best}."
    lines = [_torn_line(study, label, torn[label]) for label in torn]
    return Verdict(best, f"Use pages of {best} tokens", text, [found, *lines])


def _torn_line(study: Study, label: str, torn: Torn) -> str:
    size = torn.num_bytes / torn.num_descriptors / 1e3
    seen = study.mean(label, "descriptors") / study.mean(label, "completed")
    return (
        f"Pages of {label}: {torn.num_descriptors:,} descriptors of {number(size)} KB per pair of ranks, "
        f"{number(torn.num_bytes / torn.ms / 1e6)} GB/s; in this run {seen:,.0f} descriptors per request."
    )


def _torn_transfer(scenario: Scenario, page_size: int, num_tokens: float) -> Torn:
    """The transfer of a prompt of `num_tokens` tokens if no two of its pages are contiguous. Each pair of ranks sends
    one batch. page_size: number of tokens of a page.
    """
    wire = replace(wire_of(scenario), page_size=page_size)
    wire = replace(
        wire,
        page_bytes=wire.page_bytes // scenario.page_size * page_size,
        window_page_bytes=wire.window_page_bytes // scenario.page_size * page_size,
    )
    apart = tuple(range(0, 2 * ceil(num_tokens / page_size), 2))
    load = wire.size(apart, apart, range(ceil(num_tokens)), with_state=False)
    engine = transport(scenario)
    bandwidth = link_bandwidth(scenario.network, engine, layout_of(scenario, "prefill").gpu) / max(
        wire.num_writers, wire.num_targets
    )
    bandwidth = min(bandwidth, engine.max_bandwidth or bandwidth)
    moving_ns = max(engine.moving_each_ns * load.num_descriptors, load.num_bytes / bandwidth * 1e9)
    ns = engine.batch_ns + round(engine.posting_each_ns * load.num_descriptors) + moving_ns
    return Torn(load.num_descriptors, load.num_bytes, ns / 1e6)


PAGE_AND_DESCRIPTORS = Question(
    asks="How large should a page be, and what do descriptors cost?",
    columns=("attained", "descriptors", "transfer", "ttft", "tail_ttft", "rate"),
    arms=_page_and_descriptors_arms,
    verdict=_page_and_descriptors_verdict,
    axis="tokens of a page",
)


_SLICES, _TRAP = "no staging: slices", "prefill buffer of 64 MiB"
_RINGS_MIB = (128, 256, 512, 1024, 2048, 4096)
_BUFFER_MIB = 64
"""Size of prefill's staging buffer in MiB: SGLang 0.5.12's default of SGLANG_DISAGG_STAGING_BUFFER_SIZE_MB. SGLang
0.5.23 computes the size instead.
"""


def _staging_ring_arms(base: Base) -> list[Arm]:
    """One candidate that sends slices, one that stages KV with SGLang's default prefill buffer, and several that stage
    KV with rings of different sizes and a prefill buffer that is large enough.
    """
    layout = _unequal(base.scenario)
    made = [
        Arm(_SLICES, {**layout, "network.staging": None}),
        Arm(_TRAP, {**layout, "network.staging": {"ring": "4 GiB", "prefill_buffer": f"{_BUFFER_MIB} MiB"}}),
    ]
    return [*made, *(Arm(_ring(mib), {**layout, "network.staging": {"ring": f"{mib} MiB"}}) for mib in _RINGS_MIB)]


def _ring(mib: int) -> str:
    return f"ring of {mib:,} MiB"


def _unequal(scenario: Scenario) -> Changes:
    """Changes after which prefill and decode have different TP sizes: half as many prefill servers (at least one), with
    twice the TP size. Empty: the scenario's TP sizes differ already. Raises ConfigError if TP sizes are equal and the
    model has latent KV, which needs no staging.
    """
    prefill = scenario.pair.prefill
    if layout_of(scenario, "prefill").tp != layout_of(scenario, "decode").tp:
        return {}
    if isinstance(layout_of(scenario, "prefill").model.attention, LatentAttention):
        raise ConfigError(f"{scenario.model} has latent KV, which every rank holds whole: it needs no staging")
    return {"prefill.tp": 2 * prefill.tp, "prefill.instances": max(1, prefill.instances // 2)}


def _staging_ring_verdict(study: Study) -> Verdict:
    rings = [label for label in study.labels() if label.startswith("ring")]
    if not rings:
        largest = _ring(_RINGS_MIB[-1])
        return Verdict(study.best(study.labels()), "Use no ring", f"with a {largest}, {study.error(largest)}.")
    most = rings[-1]
    failed = study.failed_share(most)
    enough = next(one for one in rings if study.failed_share(one) <= failed and study.serves_alike(one, most))
    text = f"{_beside(study, enough, _SLICES)} with slices; " if _SLICES in study.labels() else ""
    text += "a larger ring saves no more." if enough != most else "smaller rings cost latency."
    small = [arm.label for arm in study.arms if study.error(arm.label) or study.failed_share(arm.label)]
    too_small = [f"Requests whose KV does not fit fail with a {' or a '.join(small)}."] if small else []
    return Verdict(enough, f"Give decode a {enough}", text, [*_trap(study, enough), *too_small])


def _beside(study: Study, label: str, other: str) -> str:
    if study[label].is_saturated or study[other].is_saturated:
        rates = [number(study.mean(one, "request_throughput")) for one in (label, other)]
        return f"{rates[0]} requests/s instead of {rates[1]}"
    ttft, longer = (study.metric(one, "mean_ttft_ms").duration for one in (label, other))
    ratio = study.ratio(other, label, "mean_ttft_ms").times
    return f"mean TTFT is {ttft} with that ring, and {longer} ({ratio} as long)"


def _trap(study: Study, enough: str) -> list[str]:
    """Says whether SGLang's default prefill buffer is too small: if at least the share EQUAL of the KV is sent as
    slices although it is staged, says this share. If the candidate with this buffer, or the one that sends slices, has
    no result: says only how large the KV is. enough: label of the candidate with the smallest sufficient staging ring.
    """
    cell = _cell(study.base.changed(study.arm(enough).changes), study.mean_prompt_tokens)
    part = "a mean prompt"
    if cell.num_tokens < study.mean_prompt_tokens:
        part = f"{number(cell.num_tokens)} tokens of a mean prompt, which are staged together,"
    text = f"the KV of {part} is {number(cell.num_bytes / 2**20)} MiB on a prefill rank"
    if not {_TRAP, _SLICES} <= set(study.labels()):
        return [f"For comparison, {text}."]
    sliced, trapped, staged = (study.mean(label, "descriptors") for label in (_SLICES, _TRAP, enough))
    share = (trapped - staged) / (sliced - staged)
    if share < EQUAL:
        return [f"SGLang's default prefill buffer suffices: {text}, and the buffer has {_BUFFER_MIB} MiB (0.5.12)."]
    how = f"{percent(share)} of the KV is sent as slices, which only SGLang's log says"
    versions = f"more than its prefill buffer of {_BUFFER_MIB} MiB (0.5.12)"
    return [f"SGLang's default is too small: {text}, {versions}. {how}: {_beside(study, enough, _TRAP)} without."]


class Cell(NamedTuple):
    """The KV of a prompt's part that is staged together, as one prefill rank sends it to one decode rank. num_tokens:
    tokens of the part. num_bytes: bytes that the one rank sends to the other.
    """

    num_tokens: float
    num_bytes: float


def _cell(scenario: Scenario, num_prompt_tokens: float) -> Cell:
    """The largest part of a prompt that is staged together. The scenario must have staging. num_prompt_tokens: number
    of tokens of the prompt.
    """
    plan = staging_plan(resolve(scenario))
    assert plan is not None
    num_tokens = min(num_prompt_tokens, plan.cell_pages * scenario.page_size)
    return Cell(num_tokens, wire_of(scenario).page_bytes / scenario.page_size * num_tokens)


STAGING_RING = Question(
    asks="How large should staging memory be, where prefill and decode lay out KV heads differently?",
    columns=("attained", "ttft", "tail_ttft", "transfer", "rate", "tpot", "descriptors"),
    arms=_staging_ring_arms,
    verdict=_staging_ring_verdict,
)
