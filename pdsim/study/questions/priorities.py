"""Do priorities and shedding keep one class within the SLO under more load than there is room for?"""

from pdsim.scenario.loading import Changes
from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.questions.base import Base
from pdsim.study.questions.question import Arm, Question, Verdict
from pdsim.study.questions.study import Study
from pdsim.study.questions.words import is_told_apart, percent, share
from pdsim.study.result import Estimate

_FCFS, _FIRST = "first come, first served", "priorities"
_SHED_NOBODY: Changes = {"router.shedding": None}
_SHARES = (0.5, 1.0, 2.0)
"""Shares of as many prompts as are computed within the TTFT of the SLO."""


def arms(base: Base) -> list[Arm]:
    priorities = base.scenario.priorities
    if not priorities or not base.other_classes[1:]:
        names = ", ".join(base.classes) or "its requests have no classes"
        raise ConfigError(
            f'priorities: say which of several classes goes first, as --set "priorities={{chat: 1}}"; there are {names}'
        )
    none: Changes = {"priorities": {}, "prefill.policy": "fcfs", **_SHED_NOBODY}
    return [Arm(_FCFS, none), Arm(_FIRST, {"prefill.policy": "priority", **_SHED_NOBODY})]


def limits(study: Study) -> list[Arm]:
    """The same with queues that are cut where the TTFT of the SLO is used up."""
    if len(study.arms) > len((_FCFS, _FIRST)) or study.error(_FIRST):
        return []
    forward_ms = study.metric(_FIRST, "mean_prefill_forward_ms").mean
    num_within = study.options.ttft_ms / forward_ms * study.base.scenario.pair.prefill.instances
    made = []
    for num_queued in sorted({max(1, round(part * num_within)) for part in _SHARES}):
        shedding = {"router.shedding": {"use": "queue_limit", "max_queued_requests": num_queued}}
        made.append(Arm(f"{_FIRST}, {num_queued} wait", {"prefill.policy": "priority", **shedding}, num_queued))
    return made


def verdict(study: Study) -> Verdict:
    """Takes the arm in which most of the others meet the SLO, where enough of the first class do; else the nearest."""
    first, others = study.base.first_classes, study.base.other_classes
    labels = study.labels()
    shares = {label: study.attained_by(label, first).mean for label in labels}
    enough = min(study.options.attainment, max(shares.values()))
    best = max(
        (label for label in labels if shares[label] >= enough), key=lambda label: study.attained_by(label, others).mean
    )
    text = f"{_share(study, best, first)} of {' and '.join(first)} meet the SLO"
    if best != _FCFS:
        text += f", {_share(study, _FCFS, first)} {_FCFS}"
    text += f"; of the others {_share(study, best, others)}"
    if best != _FCFS:
        text += f" instead of {_share(study, _FCFS, others)}"
    if failed := study.failed_share(best):
        text += f"; {share(failed)} of all are refused"
    rate = study.ratio(best, _FCFS, "request_throughput")
    if best != _FCFS and is_told_apart(rate):
        text += f"; requests/s are {rate.mean:.3g} times as many"
    wanted = study.options.attainment
    enough_first = study.attained_by(best, first).mean >= wanted
    advice = f"'{best}'" if enough_first else f"Not enough for {percent(wanted)}: '{best}' is the nearest"
    return Verdict(best, "", f"{advice}: {text}.")


def _share(study: Study, label: str, classes: list[str]) -> str:
    found: Estimate = study.attained_by(label, classes)
    return share(found.mean)


QUESTION = Question(
    asks="Do priorities and shedding keep one class within the SLO when there is more load than room?",
    columns=("first", "others", "failed", "rate", "tail_ttft", "tail_tpot"),
    arms=arms,
    then=limits,
    verdict=verdict,
    starter={
        "workload.classes": {"chat": 0.5, "batch": 0.5},
        "priorities": {"chat": 1},
        "client": {"use": "open_loop", "arrivals": {"use": "poisson", "rate": "32/s"}},
    },
    axis="requests that may wait",
)
