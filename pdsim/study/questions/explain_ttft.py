"""Where does the time to the first token go, and how much of it is disaggregation's?"""

from pdsim.metrics.explain import STAGES
from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.questions.base import Base
from pdsim.study.questions.pd_or_not import AGGREGATED, aggregated
from pdsim.study.questions.question import Arm, Question, Verdict
from pdsim.study.questions.study import Study
from pdsim.study.questions.words import change, milliseconds, number, percent

_APART, _ALONE = "disaggregated", "one request at a time"
_SAID = 3
"""Stages; the table has all."""


def arms(base: Base) -> list[Arm]:
    alone = {"client": {"use": "closed_loop", "concurrency": 1}}
    return [Arm(_APART, {}), Arm(_ALONE, alone), Arm(AGGREGATED, aggregated(base))]


def verdict(study: Study) -> Verdict:
    if study.error(_APART):
        raise ConfigError(study.error(_APART))
    ttft = study.metric(_APART, "mean_ttft_ms")
    if study[_APART].is_saturated:
        rate = study.metric(_APART, "request_throughput")
        text = f"The cluster takes {number(rate.mean)} requests/s and no more: TTFT grows and grows."
        return Verdict(_APART, "", text)
    stages = {stage: study.metric(_APART, f"mean_{stage}_ms") for stage in STAGES if stage != "decode_forward"}
    longest = sorted(stages, key=lambda stage: -stages[stage].mean)[:_SAID]
    parts = [f"{percent(stages[one].mean / ttft.mean)} {one} ({STAGES[one][2]})" for one in longest]
    return Verdict(_APART, "", f"A mean TTFT of {milliseconds(ttft)} is {', '.join(parts)}.", _compared(study))


def _compared(study: Study) -> list[str]:
    if AGGREGATED not in study.labels():
        return []
    if study[AGGREGATED].is_saturated:
        return ["The same GPUs without disaggregation cannot take the load."]
    ratio = study.ratio(_APART, AGGREGATED, "mean_ttft_ms")
    return [f"Against the same GPUs without disaggregation, TTFT is {change(ratio)}."]


QUESTION = Question(
    asks="Where does the time to the first token go?",
    columns=("attained", "tail_ttft", "ttft", "queue", "forward", "transfer", "admission", "merge", "outside"),
    arms=arms,
    verdict=verdict,
)
