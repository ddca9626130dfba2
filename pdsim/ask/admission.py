"""How many tokens should decode keep in reserve, and when should it grant pages?"""

from pdsim.ask.base import Base
from pdsim.ask.question import Arm, Question, Verdict
from pdsim.ask.study import Study
from pdsim.ask.words import is_told_apart, number, times

_RESERVED = (0, 128, 512, 1024, 2048)
_DEFAULT, _LATE = "reserve 512", "reserve 512, late"


def arms(base: Base) -> list[Arm]:
    """SGLang reserves 512 tokens for each request and grants pages early."""
    rule = "reserve_decode_tokens"
    made = [Arm(f"reserve {n}", {"decode.admission": {"use": rule, "reserved_tokens": n}}) for n in _RESERVED]
    late = {"decode.admission": rule, "decode.allocation": "prefill_complete"}
    return [*made, Arm(_LATE, late), Arm("reserve the longest output", {"decode.admission": "reserve_max_output"})]


def verdict(study: Study) -> Verdict:
    labels = study.labels()
    best = study.best(labels)
    tokens = study.metric(best, "output_throughput").mean
    gain = study.ratio(best, _DEFAULT, "output_throughput") if _DEFAULT in labels else None
    text = f"Use '{best}': {number(tokens)} output tokens/s"
    if best == _DEFAULT:
        text += ", and it is SGLang's default"
    elif gain is not None:
        text += f", {times(gain)} the default of 512" if is_told_apart(gain) else ", as many as with the default of 512"
    worst = min(labels, key=lambda label: study.metric(label, "output_throughput").mean)
    loss = study.ratio(best, worst, "output_throughput")
    if worst != best and is_told_apart(loss):
        text += f", and {times(loss)} those of '{worst}'"
    return Verdict(best, text + ".", [_retracted(study, best), *_late(study)])


def _retracted(study: Study, best: str) -> str:
    counts = (f"{label.removeprefix('reserve ')}: {number(study.metric(label, 'retractions').mean)}" for label in study.labels())
    return f"Retractions by reserve: {'; '.join(counts)}. Less reserve admits more and takes more back; nothing is cheaper than a full pool that fits."


def _late(study: Study) -> list[str]:
    if not {_DEFAULT, _LATE} <= set(study.labels()):
        return []
    rate, ttft = (study.ratio(_LATE, _DEFAULT, name) for name in ("output_throughput", "mean_ttft_ms"))
    return [f"Pages granted when a prompt is computed, not before: output tokens/s {times(rate)}, TTFT {times(ttft)} those of early ones."]


QUESTION = Question(
    asks="How many tokens should decode keep in reserve, and when should it grant pages?",
    columns=("goodput", "tokens", "ttft", "admission", "tpot", "running", "retractions"),
    arms=arms,
    verdict=verdict,
)
