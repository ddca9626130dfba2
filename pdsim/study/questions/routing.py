"""Which instance should a prompt go to?"""

from pdsim.study.questions.base import Base
from pdsim.study.questions.question import Arm, Question, Verdict
from pdsim.study.questions.study import Study, others_against
from pdsim.study.questions.words import milliseconds, spread

POLICIES = ("cache_aware", "round_robin", "random", "power_of_two", "least_loaded")


def arms(_base: Base) -> list[Arm]:
    return [Arm(policy, {"router.prefill": policy}) for policy in POLICIES]


def verdict(study: Study) -> Verdict:
    best = study.best(study.labels())
    text = f"mean TTFT {milliseconds(study.metric(best, 'mean_ttft_ms'))}"
    others = [label for label in study.labels() if label != best]
    found = others_against(study, best, others, "mean_ttft_ms", "it")
    instances = study.base.scenario.pair.prefill.instances
    notes = [_hits(study)]
    if instances == 1:
        notes.insert(0, "There is one prefill instance: nothing to choose. Ask with --set prefill.instances=4.")
    return Verdict(best, f"Route by {best}", "; ".join([text, *found]) + ".", notes)


def _hits(study: Study) -> str:
    shares = (f"{label} {spread(study.metric(label, 'prefill_cache_hit_rate'))}" for label in study.labels())
    return f"Share of prompt tokens that prefill had cached: {', '.join(shares)}."


QUESTION = Question(
    asks="Which prefill instance should a prompt go to?",
    columns=("attained", "goodput", "ttft", "tail_ttft", "prefill_hits", "rate"),
    arms=arms,
    verdict=verdict,
    starter={
        "prefill.instances": 4,
        "decode.instances": 4,
        "workload.use": "prefix_pool",
        "workload.num_prefixes": 20,
        "workload.prefix_tokens": 4096,
        "workload.input_tokens": {"use": "uniform", "low": 819, "high": 1229},
    },
)
