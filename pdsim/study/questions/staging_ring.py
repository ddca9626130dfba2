"""How large should staging memory be, where prefill and decode lay out KV heads differently?"""

from pdsim.scenario.loading import Changes
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sizing import layout_of, resolve
from pdsim.scenario.wiring import wire_of
from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.questions.base import Base
from pdsim.study.questions.question import Arm, Question, Verdict
from pdsim.study.questions.study import EQUAL, Study
from pdsim.study.questions.words import milliseconds, number, percent, times
from pdsim.system.model import LatentAttention

_SLICES, _TRAP = "no staging: slices", "prefill buffer of 64 MiB"
_RINGS_MIB = (128, 256, 512, 1024, 2048, 4096)
_BUFFER_MIB = 64
"""SGLANG_DISAGG_STAGING_BUFFER_SIZE_MB where it is not set, in versions that have it (0.5.12); 0.5.23 sizes it."""


def arms(base: Base) -> list[Arm]:
    """Slices; staging as SGLang sets it up; and rings of many sizes, with a prefill buffer that fits."""
    layout = _unequal(base.scenario)
    made = [
        Arm(_SLICES, {**layout, "network.staging": None}),
        Arm(_TRAP, {**layout, "network.staging": {"ring": "4 GiB", "prefill_buffer": f"{_BUFFER_MIB} MiB"}}),
    ]
    return [*made, *(Arm(_ring(mib), {**layout, "network.staging": {"ring": f"{mib} MiB"}}) for mib in _RINGS_MIB)]


def _ring(mib: int) -> str:
    return f"ring of {mib:,} MiB"


def _unequal(scenario: Scenario) -> Changes:
    """Changes where sizes are equal: two GPUs to each prefill server, half as many servers."""
    prefill = scenario.pair.prefill
    if layout_of(scenario, "prefill").tp != layout_of(scenario, "decode").tp:
        return {}
    if isinstance(layout_of(scenario, "prefill").model.attention, LatentAttention):
        raise ConfigError(f"{scenario.model} has latent KV, which every rank holds whole: it needs no staging")
    return {"prefill.tp": 2 * prefill.tp, "prefill.instances": max(1, prefill.instances // 2)}


def verdict(study: Study) -> Verdict:
    rings = [label for label in study.labels() if label.startswith("ring")]
    if not rings:
        largest = _ring(_RINGS_MIB[-1])
        return Verdict(study.best(study.labels()), "Use no ring", f"with a {largest}, {study.error(largest)}.")
    most = rings[-1]
    enough = next(label for label in rings if _as_good(study, label, most))
    text = f"{_against(study, enough, _SLICES)} with slices; " if _SLICES in study.labels() else ""
    text += "a larger one brings nothing more." if enough != most else "a smaller one costs."
    return Verdict(enough, f"Give decode a {enough}", text, [*_trap(study, enough), *_too_small(study)])


def _as_good(study: Study, label: str, most: str) -> bool:
    return study.failed_share(label) <= study.failed_share(most) and study.serves_alike(label, most)


def _against(study: Study, label: str, other: str) -> str:
    if study[label].is_saturated or study[other].is_saturated:
        rates = [number(study.metric(one, "request_throughput").mean) for one in (label, other)]
        return f"{rates[0]} requests/s against {rates[1]}"
    ttft, longer = (milliseconds(study.metric(one, "mean_ttft_ms")) for one in (label, other))
    ratio = times(study.ratio(other, label, "mean_ttft_ms"))
    return f"mean TTFT is {ttft} with that ring, and {longer}, {ratio} as long,"


def _trap(study: Study, enough: str) -> list[str]:
    """Requests that are sent as slices, although staging is on: their descriptors say so."""
    megabytes = _cell_bytes(study.base.changed(study.arm(enough).changes), study.mean_prompt_tokens) / 1e6
    text = f"the KV of a mean prompt is {number(megabytes)} MB on a prefill rank"
    if not {_TRAP, _SLICES} <= set(study.labels()):
        return [f"Of the size: {text}."]
    sliced, trapped, staged = (study.metric(label, "descriptors").mean for label in (_SLICES, _TRAP, enough))
    share = (trapped - staged) / (sliced - staged)
    if share < EQUAL:
        return [f"No trap: {text}, which SGLang's prefill buffer of 64 MB holds, where versions have a fixed one."]
    how = f"{percent(share)} of the KV goes as slices, which only the log says"
    versions = "more than SGLang's default prefill buffer of 64 MB, in versions that have one (0.5.12)"
    return [f"Trap: {text}, {versions}. With that buffer {how}: {_against(study, enough, _TRAP)} with it."]


def _cell_bytes(scenario: Scenario, num_tokens: float) -> float:
    """Bytes that a prefill rank sends a decode rank of what one forward computes of a prompt."""
    wire = wire_of(scenario, layout_of(scenario, "prefill"), layout_of(scenario, "decode"))
    chunk = resolve(scenario).pair.prefill.rank_chunk_tokens or num_tokens
    return wire.page_bytes / scenario.page_size * min(num_tokens, chunk)


def _too_small(study: Study) -> list[str]:
    failed = [arm.label for arm in study.arms if study.error(arm.label) or study.failed_share(arm.label)]
    return [f"Requests with a larger cell fail with a {' or a '.join(failed)}."] if failed else []


QUESTION = Question(
    asks="How large should staging memory be, where prefill and decode lay out KV heads differently?",
    columns=("attained", "ttft", "tail_ttft", "transfer", "rate", "tpot", "descriptors"),
    arms=arms,
    verdict=verdict,
)
