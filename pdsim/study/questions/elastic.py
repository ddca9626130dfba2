"""Do servers that change their roles, or start and stop, beat a fixed ratio on my load?"""

from pdsim.scenario.loading import Changes
from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.questions.base import Base
from pdsim.study.questions.question import Arm, Question, Verdict
from pdsim.study.questions.study import Study
from pdsim.study.questions.words import number, share

_SWITCH, _SCALE = "servers change roles", "servers start and stop, too"
_EQUAL = 0.01
"""Share of the requests that meet the SLO: a smaller difference is none."""


def arms(base: Base) -> list[Arm]:
    """Each fixed ratio of all servers and of fewer; then the scenario's elastic settings, with and without stops."""
    prefill, decode = base.scenario.pair
    if (prefill.gpu, prefill.tp) != (decode.gpu, decode.tp):
        raise ConfigError("elastic: servers that change roles need the same gpu and tp in prefill and decode")
    given = base.scenario.elastic
    total = base.scenario.max_servers
    made = []
    for servers in range(2, total + 1):
        for instances in range(1, servers):
            split: Changes = {"prefill.instances": instances, "decode.instances": servers - instances}
            made.append(Arm(f"{instances}P{servers - instances}D", {**split, "elastic": None}))
    half: Changes = {"prefill.instances": max(1, total // 2), "decode.instances": total - max(1, total // 2)}
    settings: Changes = {} if given is not None else {"elastic.interval": "30 s"}
    policy = "elastic.policy.keep_servers"
    made.append(Arm(_SWITCH, {**half, **settings, policy: True}))
    return [*made, Arm(_SCALE, {**half, **settings, policy: False})]


def verdict(study: Study) -> Verdict:
    """The fewest GPU-hours that meet the SLO; if nothing does, the most requests within it."""
    labels = study.labels()
    fixed = [label for label in labels if label not in (_SWITCH, _SCALE)]
    best, static = _best(study, labels), _best(study, fixed)
    if best == static:
        text = f"it meets the SLO for {_attained(study, best)} of the requests, in {_hours(study, best)} GPU-hours"
        others = [
            f"{_attained(study, one)} in {_hours(study, one)} if {one}" for one in (_SWITCH, _SCALE) if one in labels
        ]
        return Verdict(best, f"Keep {best}", f"{text}; {' and '.join(others)}.")
    text = f"{_attained(study, best)} of the requests meet the SLO in {_hours(study, best)} GPU-hours; "
    text += f"of the fixed ratios {static} is the best, with {_attained(study, static)} in {_hours(study, static)}"
    return Verdict(best, f"Let {best}", f"{text}.")


def _best(study: Study, labels: list[str]) -> str:
    meeting = [label for label in labels if study.meets(label)]
    if meeting:
        return min(meeting, key=lambda label: (study.metric(label, "gpu_hours").mean, -study.attained(label)))
    most = max(study.attained(label) for label in labels) - _EQUAL
    enough = [label for label in labels if study.attained(label) >= most]
    return min(enough, key=lambda label: study.metric(label, "gpu_hours").mean)


def _attained(study: Study, label: str) -> str:
    return share(study.attained(label))


def _hours(study: Study, label: str) -> str:
    return number(study.metric(label, "gpu_hours").mean)


QUESTION = Question(
    asks="Do servers that change their roles, or start and stop, beat a fixed ratio on my day?",
    columns=("attained", "gpu_hours", "tail_ttft", "tail_tpot", "rate"),
    arms=arms,
    verdict=verdict,
    starter={
        "client": {
            "use": "open_loop",
            "arrivals": {"use": "profile", "levels": [4, 20, 8, 2], "level": "60 s"},
        },
        "workload.num_requests": 2000,
    },
)
