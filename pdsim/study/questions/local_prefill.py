"""Which prompts should the decode instance compute itself?"""

from pdsim.scenario.engine import ENGINE_DEFAULTS
from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.questions.base import Base
from pdsim.study.questions.question import Arm, Question, Verdict
from pdsim.study.questions.study import Study
from pdsim.study.questions.words import change, is_told_apart, number, share, times

_REMOTE, _QUEUE = "all on prefill", "Dynamo's rule"
_THRESHOLDS = (128, 512, 1024, 2048, 4096, 8192)
_RULE = "router.disaggregation"


def arms(base: Base) -> list[Arm]:
    """The thresholds of llm-d's rule, Dynamo's rule with its defaults, and what the scenario has."""
    if base.scenario.engine != "vllm":
        raise ConfigError(f"engine: {base.scenario.engine}: its decode computes no prompts; --set engine=vllm")
    made = [Arm(_REMOTE, {_RULE: None})]
    for tokens in _THRESHOLDS:
        rule = {"use": "prefix_based", "non_cached_tokens": tokens}
        made.append(Arm(f"below {tokens:,} on decode", {_RULE: rule}, tokens))
    return [*made, Arm(_QUEUE, {_RULE: "length_and_queue"})]


def verdict(study: Study) -> Verdict:
    best = study.best(study.labels())
    text = f"{share(study.attained(best))} of the requests meet the SLO"
    if best == _REMOTE:
        others = [label for label in study.labels() if label != _REMOTE]
        second = study.best(others)
        return Verdict(best, "Send all prompts to prefill", f"{text}, {share(study.attained(second))} with '{second}'.")
    text += f", {share(study.attained(_REMOTE))} with {_REMOTE}"
    goodput = study.goodput_ratio(best, _REMOTE)
    if is_told_apart(goodput):
        text += f"; goodput is {times(goodput)} as much"
    if len(study.steady([best, _REMOTE])) > 1:
        text += f"; TTFT is {change(study.ratio(best, _REMOTE, 'mean_ttft_ms'))}"
        text += f", TPOT {change(study.ratio(best, _REMOTE, 'mean_tpot_ms'))}"
    sent = [study.metric(label, "transfer_bytes").mean for label in (best, _REMOTE)]
    text += f"; {number(100 * sent[0] / sent[1])} % of the KV is sent"
    advice = (
        "Use Dynamo's rule"
        if best == _QUEUE
        else f"Compute prompts {best.replace(' on decode', ' uncached tokens on decode')}"
    )
    return Verdict(best, advice, f"{text}.")


QUESTION = Question(
    asks="Which prompts should the decode instance compute itself?",
    columns=("attained", "goodput", "tail_ttft", "tail_tpot", "latency", "gigabytes"),
    arms=arms,
    verdict=verdict,
    starter={
        "engine": "vllm",
        **{f"decode.{name}": value for name, value in ENGINE_DEFAULTS["vllm"]["decode"].items()},
        "page_size": 16,
        "workload": {
            "use": "sessions",
            "num_sessions": 300,
            "num_turns": {"use": "uniform", "low": 2, "high": 8},
            "input_tokens": {"use": "uniform", "low": 50, "high": 4000},
            "output_tokens": {"use": "uniform", "low": 100, "high": 400},
            "think": "5 s",
        },
        "client": {"use": "open_loop", "arrivals": {"use": "poisson", "rate": "4/s"}},
    },
    axis="uncached tokens from which a prompt goes to prefill",
)
