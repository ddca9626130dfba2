"""Are separate prefill and decode GPUs better than the same GPUs without disaggregation, and from which prompts on?"""

from pdsim.scenario.loading import Changes
from pdsim.study.questions.base import Base
from pdsim.study.questions.pd_ratio import splits
from pdsim.study.questions.question import Arm, Question, Verdict
from pdsim.study.questions.study import Study
from pdsim.study.questions.words import change, is_told_apart, number, share, times

AGGREGATED = "aggregated"
_DO, _DO_NOT = "Separate them", "Do not separate them"
_SHARES = (1 / 16, 1 / 4, 4.0)
"""Shares of the prompts' own tokens, where the crossover is looked for."""


def aggregated(base: Base) -> Changes:
    """The same GPUs without roles: servers of the size that decode has, and what prefill computes at once."""
    prefill, decode = base.scenario.pair
    settings = {
        "gpu": decode.gpu,
        "tp": decode.tp,
        "instances": base.scenario.num_gpus // decode.tp,
        "chunked_prefill_tokens": prefill.chunked_prefill_tokens,
        "max_prefill_tokens": prefill.max_prefill_tokens,
        "long_prefill_tokens": prefill.long_prefill_tokens,
    }
    return {"prefill": None, "decode": None, "aggregated": settings}


def arms(base: Base) -> list[Arm]:
    changes = aggregated(base)
    routers = base.routers(changes["aggregated"]["instances"])
    return [*(Arm(f"{AGGREGATED}{name}", {**changes, **router}) for name, router in routers.items()), *splits(base)]


def other_prompts(study: Study) -> list[Arm]:
    """The aggregated cluster and all ratios once more, with shorter and longer prompts."""
    if not study.base.has_lengths or any(arm.series for arm in study.arms):
        return []
    mean = _own_tokens(study)
    return [
        Arm(f"{arm.label}, {tokens} in", {**arm.changes, "workload.input_tokens": _around(tokens)}, series=str(tokens))
        for tokens in (max(16, round(mean * share)) for share in _SHARES)
        for arm in arms(study.base)
    ]


def verdict(study: Study) -> Verdict:
    together, apart = _sides(study, "")
    if not together:
        best, error = study.best(apart), study.error(study.arms[0].label)
        return Verdict(best, _DO, f"the aggregated cluster is not possible: {error}")
    if not apart:
        return Verdict(study.best(together), _DO_NOT, "no split is possible.")
    bests = [study.best(apart), study.best(together)]
    winner = study.best(bests)
    (other,) = (label for label in bests if label != winner)
    goodput = study.goodput_ratio(winner, other)
    if study.meets(winner) and not study.meets(other):
        text = f"{winner} meets the SLO with {share(study.attained(winner))} of the requests, "
        text += f"{other} misses it with {share(study.attained(other))}"
    elif is_told_apart(goodput):
        text = f"{winner} gives {number(study.goodput(winner))} requests/s per GPU within the SLO, "
        text += f"{times(goodput)} what {other} gives"
    else:
        text = f"{winner} and {other} give the same goodput"
    if not study[winner].is_saturated and not study[other].is_saturated:
        text += f", with {change(study.ratio(winner, other, 'mean_ttft_ms'))} TTFT"
        text += f" and {change(study.ratio(winner, other, 'mean_tpot_ms'))} TPOT"
    notes = [*_crossover(study), *study.routers_against(winner)]
    return Verdict(winner, _DO_NOT if winner in together else _DO, text + ".", notes)


def _sides(study: Study, series: str) -> tuple[list[str], list[str]]:
    """Aggregated arms and splits that have a result."""
    labels = study.labels(series)
    together = [label for label in labels if label.startswith(AGGREGATED)]
    return together, [label for label in labels if label not in together]


def _crossover(study: Study) -> list[str]:
    """Says where, in prompts, the winner changes."""
    lengths = {series: int(series) for series in dict.fromkeys(arm.series for arm in study.arms) if series}
    if not lengths:
        return []
    found: dict[int, str] = {}
    for series, tokens in {**lengths, "": round(_own_tokens(study))}.items():
        together, apart = _sides(study, series)
        if together and apart:
            found[tokens] = f"{tokens:,}: {_better(study, study.best(apart), study.best(together), series)}"
    lines = "; ".join(found[tokens] for tokens in sorted(found))
    return [f"By tokens of a prompt, with the load as it is: {lines}."]


def _better(study: Study, apart: str, together: str, series: str) -> str:
    """The better of the two: the one that meets the SLO; else by goodput; where that is the same, by latency."""
    name, goodput = apart.removesuffix(f", {series} in"), study.goodput_ratio(apart, together)
    if study.meets(apart) != study.meets(together):
        return f"{name if study.meets(apart) else together.removesuffix(f', {series} in')} alone meets the SLO"
    if is_told_apart(goodput) or len(study.steady([apart, together])) < 2:  # noqa: PLR2004
        return f"{name} has {times(goodput)} the aggregated goodput"
    return f"{name} has {times(study.ratio(apart, together, 'mean_e2e_latency_ms'))} the aggregated latency"


def _own_tokens(study: Study) -> float:
    """Tokens of a prompt, without the prefix that it shares."""
    return study.mean_prompt_tokens - getattr(study.base.scenario.workload, "prefix_tokens", 0)


def _around(tokens: int) -> dict[str, object]:
    return {"use": "uniform", "low": max(1, round(0.8 * tokens)), "high": round(1.2 * tokens)}


QUESTION = Question(
    asks="Are separate prefill and decode GPUs better than the same GPUs without disaggregation?",
    columns=("attained", "goodput", "tail_ttft", "tail_tpot", "latency", "rate"),
    arms=arms,
    then=other_prompts,
    verdict=verdict,
)
