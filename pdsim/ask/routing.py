"""Which instance should a prompt go to?"""

from pdsim.ask.base import Base
from pdsim.ask.question import Arm, Question, Verdict
from pdsim.ask.study import Study
from pdsim.ask.words import is_told_apart, milliseconds, spread, times

_POLICIES = ("cache_aware", "round_robin", "random", "power_of_two", "least_loaded")


def arms(base: Base) -> list[Arm]:
    return [Arm(policy, {"router.prefill": policy}) for policy in _POLICIES]


def verdict(study: Study) -> Verdict:
    best = study.best(study.labels())
    others = [label for label in study.steady(study.labels()) if label != best]
    text = f"Route by {best}: mean TTFT {milliseconds(study.metric(best, 'mean_ttft_ms'))}"
    ratios = {label: study.ratio(label, best, "mean_ttft_ms") for label in others}
    if ratios:
        second = min(ratios, key=lambda label: ratios[label].mean)
        worst = max(ratios, key=lambda label: ratios[label].mean)
        near = "" if is_told_apart(ratios[second]) else ", which cannot be told apart"
        text += f"; with {second} it is {times(ratios[second])} that{near}"
        if worst != second:
            text += f", with {worst} {times(ratios[worst])}"
    instances = study.base.scenario.pair.prefill.instances
    notes = [_hits(study)]
    if instances == 1:
        notes.insert(0, "There is one prefill instance: nothing to choose. Ask with more --gpus.")
    return Verdict(best, text + ".", notes)


def _hits(study: Study) -> str:
    shares = (
        f"{label} {spread(study.metric(label, 'prefill_cache_hit_rate'))}"
        for label in study.labels()
    )
    return f"Share of prompt tokens that prefill had cached: {', '.join(shares)}."


QUESTION = Question(
    asks="Which prefill instance should a prompt go to?",
    columns=("goodput", "ttft", "p99_ttft", "prefill_hits", "rate"),
    arms=arms,
    verdict=verdict,
    defaults={"gpus": 8, "prefix_tokens": 4096, "input_tokens": "1024"},
)
