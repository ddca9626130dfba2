"""How many tokens should decode keep in reserve, and when should it grant pages?"""

from pdsim.study.questions.base import Base
from pdsim.study.questions.question import Arm, Question, Verdict
from pdsim.study.questions.study import Study
from pdsim.study.questions.words import is_told_apart, number, times

_RESERVED = (0, 128, 512, 1024, 2048)
_DEFAULT, _LATE = "reserve 512", "reserve 512, late"


def arms(_base: Base) -> list[Arm]:
    """SGLang reserves 512 tokens for each request and grants pages early."""
    rule = "reserve_decode_tokens"
    made = [Arm(f"reserve {n}", {"decode.admission": {"use": rule, "reserved_tokens": n}}) for n in _RESERVED]
    late = {"decode.admission": rule, "decode.allocation": "prefill_complete"}
    return [*made, Arm(_LATE, late), Arm("reserve the longest output", {"decode.admission": "reserve_max_output"})]


def verdict(study: Study) -> Verdict:
    labels = [label for label in study.labels() if label != _LATE]
    best = study.best(labels)
    worst = min(labels, key=lambda label: study.metric(label, "output_throughput").mean)
    most, least = (number(study.metric(label, "output_throughput").mean) for label in (best, worst))
    loss = study.ratio(best, worst, "output_throughput")
    if not is_told_apart(loss):
        default = _DEFAULT if _DEFAULT in labels else best
        text = f"{least} to {most} output tokens/s, whatever is kept in reserve."
        return Verdict(default, "It hardly matters", text, [_retracted(study), *_late(study)])
    text = f"{most} output tokens/s, {times(loss)} those of '{worst}'"
    if best == _DEFAULT:
        text += "; it is SGLang's default"
    elif _DEFAULT in labels:
        text += f" and {times(study.ratio(best, _DEFAULT, 'output_throughput'))} those of SGLang's default of 512"
    return Verdict(best, f"Use '{best}'", text + ".", [_retracted(study), *_late(study)])


def _retracted(study: Study) -> str:
    counts = [f"'{label}' {number(study.metric(label, 'retractions').mean)}" for label in study.labels()]
    return f"Less reserve admits more requests and takes more of them back. Retractions: {', '.join(counts)}."


def _late(study: Study) -> list[str]:
    if not {_DEFAULT, _LATE} <= set(study.labels()):
        return []
    rate, ttft = (times(study.ratio(_LATE, _DEFAULT, name)) for name in ("output_throughput", "mean_ttft_ms"))
    return [f"Pages granted when a prompt is computed, not before: {rate} the output tokens/s, and {ttft} the TTFT."]


QUESTION = Question(
    asks="How many tokens should decode keep in reserve, and when should it grant pages?",
    columns=("attained", "tokens", "ttft", "tail_ttft", "tail_tpot", "admission", "running", "retractions"),
    arms=arms,
    verdict=verdict,
    starter={
        "prefill": {"gpu": "h100"},
        "decode": {"gpu": "h100"},
        "workload.input_tokens": {"use": "uniform", "low": 1638, "high": 2458},
        "workload.output_tokens": {"use": "uniform", "low": 819, "high": 1229},
        "client.concurrency": 256,
    },
)
