"""Where does the time to the first token go, and how much of it is disaggregation's?"""

from pdsim.ask.base import Base
from pdsim.ask.pd_or_not import TOGETHER, aggregated
from pdsim.ask.question import Arm, Question, Verdict
from pdsim.ask.study import Study
from pdsim.ask.words import change, milliseconds, percent
from pdsim.metrics.explain import STAGES

_APART, _ALONE = "disaggregated", "one request at a time"


def arms(base: Base) -> list[Arm]:
    alone = {"client": {"use": "closed_loop", "concurrency": 1}}
    return [Arm(_APART, {}), Arm(_ALONE, alone), Arm(TOGETHER, aggregated(base))]


def verdict(study: Study) -> Verdict:
    ttft = study.metric(_APART, "mean_ttft_ms")
    if study[_APART].is_saturated:
        rate = study.metric(_APART, "request_throughput")
        text = f"The load is more than the cluster can take: TTFT grows as long as it lasts. It serves {rate.mean:.3g} requests/s."
        return Verdict(_APART, text)
    stages = {stage: study.metric(_APART, f"mean_{stage}_ms") for stage in STAGES if stage != "decode_forward"}
    first, second = sorted(stages, key=lambda stage: -stages[stage].mean)[:2]
    text = f"Of a mean TTFT of {milliseconds(ttft)}, {percent(stages[first].mean / ttft.mean)} is the stage in which a request "
    text += f"{STAGES[first][2]}, and {percent(stages[second].mean / ttft.mean)} that in which it {_does(second)}."
    return Verdict(_APART, text, _compared(study))


def _does(stage: str) -> str:
    what = STAGES[stage][2]
    return f"has a {what}" if stage == "prefill_transfer_kv_cache" else what


def _compared(study: Study) -> list[str]:
    alone = study.metric(_ALONE, "mean_ttft_ms")
    notes = [f"One request at a time, TTFT is {milliseconds(alone)}: the rest is what requests do to each other."]
    if TOGETHER not in study.labels():
        return notes
    if study[TOGETHER].is_saturated:
        return [*notes, "The same GPUs without disaggregation cannot take the load."]
    ratio = study.ratio(_APART, TOGETHER, "mean_ttft_ms")
    return [*notes, f"Against the same GPUs without disaggregation, TTFT is {change(ratio)}."]


QUESTION = Question(
    asks="Where does the time to the first token go?",
    columns=("ttft", "p99_ttft", "outside", "admission", "queue", "forward", "transfer", "merge"),
    arms=arms,
    verdict=verdict,
)
