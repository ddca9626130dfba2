"""How many of the GPUs should prefill?"""

from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.questions.base import Base
from pdsim.study.questions.question import Arm, Question, Verdict
from pdsim.study.questions.study import Study
from pdsim.study.questions.words import is_told_apart, number, times


def splits(base: Base) -> list[Arm]:
    """All that use every GPU, with each router where the scenario says none. Raises ConfigError if there is none."""
    prefill, decode = base.scenario.pair
    num_gpus = base.scenario.num_gpus
    made = []
    for instances in range(1, num_gpus // prefill.num_server_gpus + 1):
        others, rest = divmod(num_gpus - instances * prefill.num_server_gpus, decode.tp)
        if others >= 1 and not rest:
            changes = {"prefill.instances": instances, "decode.instances": others}
            routers = base.routers(max(instances, others))
            made += [Arm(f"{instances}P{others}D{name}", {**changes, **router}) for name, router in routers.items()]
    if not made:
        raise ConfigError(f"{base.path}: no prefill and decode instances together have {num_gpus} GPUs")
    return made


def verdict(study: Study) -> Verdict:
    labels = study.best_routed(study.labels())
    best = study.best(labels)
    text = f"{number(study.goodput(best))} requests/s per GPU meet the SLO"
    others = [label for label in labels if label != best]
    if not others:
        return Verdict(
            best, f"Use {best}", f"{text}. It is the only ratio that is possible.", study.routers_against(best)
        )
    second, worst = study.best(others), min(others, key=study.goodput)
    ratio = study.goodput_ratio(best, second)
    if is_told_apart(ratio):
        text += f", {times(ratio)} what {second} gives"
    else:
        latency = times(study.ratio(second, best, "mean_e2e_latency_ms"))
        text += f", which cannot be told from what {second} gives, at {latency} the latency"
    if worst != second:
        text += f", and {times(study.goodput_ratio(best, worst))} what the worst, {worst}, gives"
    if study.meets(best) and not study.meets(second):
        text += "; no other ratio meets it for as many as should"
    return Verdict(best, f"Use {best}", text + ".", study.routers_against(best))


QUESTION = Question(
    asks="How many of the GPUs should prefill?",
    columns=("attained", "goodput", "tail_ttft", "tail_tpot", "rate", "queue", "admission"),
    arms=splits,
    verdict=verdict,
)
