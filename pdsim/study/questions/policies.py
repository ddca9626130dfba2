"""Questions on policies: routing, admission, prompts that the decode instance computes itself, and priorities."""

from pdsim.scenario.defaults import ENGINE_DEFAULTS
from pdsim.scenario.loading import Changes
from pdsim.scenario.sections.component import ROUTING_POLICIES
from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.base import Base
from pdsim.study.points.estimate import number, percent, share
from pdsim.study.questions.study import Arm, Question, Study, Verdict


def _routing_arms(_base: Base) -> list[Arm]:
    return [Arm(policy, {"router.prefill": policy}) for policy in ROUTING_POLICIES]


def _routing_verdict(study: Study) -> Verdict:
    best = study.best(study.labels())
    text = f"mean TTFT {study.metric(best, 'mean_ttft_ms').duration}"
    found = study.others_against(best, study.labels())
    notes = [_hits(study)]
    if study.base.scenario.pair.prefill.instances == 1:
        notes.insert(0, "All routers are equal with one prefill instance. Ask with --set prefill.instances=4.")
    return Verdict(best, f"Route by {best}", "; ".join([text, *found]) + ".", notes)


def _hits(study: Study) -> str:
    shares = (f"{label} {study.metric(label, 'prefill_cache_hit_rate').spread()}" for label in study.labels())
    return f"Share of prompt tokens that prefill had cached: {', '.join(shares)}."


ROUTING = Question(
    asks="Which prefill instance should a prompt go to?",
    columns=("attained", "goodput", "ttft", "tail_ttft", "prefill_hits", "rate"),
    arms=_routing_arms,
    verdict=_routing_verdict,
    starter={
        "prefill.instances": 4,
        "decode.instances": 4,
        "workload.use": "prefix_pool",
        "workload.num_prefixes": 20,
        "workload.prefix_tokens": 4096,
        "workload.input_tokens": {"use": "uniform", "low": 819, "high": 1229},
    },
)


_RESERVED = (0, 128, 512, 1024, 2048)
_DEFAULT, _LATE = "reserve 512", "reserve 512, late"


def _admission_arms(_base: Base) -> list[Arm]:
    """Candidates with different admission policies. The default of SGLang reserves 512 tokens for each running request,
    and grants pages before prefill.
    """
    rule = "reserve_decode_tokens"
    made = [Arm(f"reserve {n}", {"decode.admission": {"use": rule, "reserved_tokens": n}}) for n in _RESERVED]
    late = {"decode.admission": rule, "decode.allocation": "prefill_complete"}
    return [*made, Arm(_LATE, late), Arm("reserve the longest output", {"decode.admission": "reserve_max_output"})]


def _admission_verdict(study: Study) -> Verdict:
    labels = [label for label in study.labels() if label != _LATE]
    best = study.best(labels)
    worst = min(labels, key=lambda label: study.mean(label, "output_throughput"))
    most, least = (number(study.mean(label, "output_throughput")) for label in (best, worst))
    loss = study.ratio(best, worst, "output_throughput")
    if not loss.is_told_apart:
        default = _DEFAULT if _DEFAULT in labels else best
        text = f"{least} to {most} output tokens/s with every reserve that was tried."
        return Verdict(default, "The reserve hardly matters", text, [_retracted(study), *_late(study)])
    text = f"{most} output tokens/s, {loss.times} those of '{worst}'"
    if best == _DEFAULT:
        text += "; it is SGLang's default"
    elif _DEFAULT in labels:
        text += f" and {study.ratio(best, _DEFAULT, 'output_throughput').times} those of SGLang's default of 512"
    return Verdict(best, f"Use '{best}'", text + ".", [_retracted(study), *_late(study)])


def _retracted(study: Study) -> str:
    counts = [f"'{label}' {number(study.mean(label, 'retractions'))}" for label in study.labels()]
    return f"A smaller reserve admits more requests and retracts more of them. Retractions: {', '.join(counts)}."


def _late(study: Study) -> list[str]:
    if not {_DEFAULT, _LATE} <= set(study.labels()):
        return []
    rate, ttft = (study.ratio(_LATE, _DEFAULT, name).times for name in ("output_throughput", "mean_ttft_ms"))
    return [f"Granting pages only after a prompt is computed gives {rate} the output tokens/s at {ttft} the TTFT."]


ADMISSION = Question(
    asks="How many tokens should decode keep in reserve, and when should it grant pages?",
    columns=("attained", "tokens", "ttft", "tail_ttft", "tail_tpot", "admission", "running", "retractions"),
    arms=_admission_arms,
    verdict=_admission_verdict,
    starter={
        "prefill": {"gpu": "h100"},
        "decode": {"gpu": "h100"},
        "workload.input_tokens": {"use": "uniform", "low": 1638, "high": 2458},
        "workload.output_tokens": {"use": "uniform", "low": 819, "high": 1229},
        "client.concurrency": 256,
    },
)


_REMOTE, _QUEUE = "all on prefill", "Dynamo's rule"
_THRESHOLDS = (128, 512, 1024, 2048, 4096, 8192)
_RULE = "router.disaggregation"


def _local_prefill_arms(base: Base) -> list[Arm]:
    """Candidates with different rules for prompts that decode instances compute themselves: no such prompts, llm-d's
    rule with several thresholds, and Dynamo's rule with its defaults. Raises ConfigError if the engine is not vLLM.
    """
    if base.scenario.engine != "vllm":
        raise ConfigError(
            f"engine: {base.scenario.engine}: its decode instances compute no prompts; ask with --set engine=vllm"
        )
    made = [Arm(_REMOTE, {_RULE: None})]
    for tokens in _THRESHOLDS:
        rule = {"use": "prefix_based", "non_cached_tokens": tokens}
        made.append(Arm(f"below {tokens:,} on decode", {_RULE: rule}, tokens))
    return [*made, Arm(_QUEUE, {_RULE: "length_and_queue"})]


def _local_prefill_verdict(study: Study) -> Verdict:
    best = study.best(study.labels())
    text = f"{share(study.attained(best))} of the requests meet the SLO"
    if best == _REMOTE:
        second = study.best(label for label in study.labels() if label != _REMOTE)
        return Verdict(best, "Send all prompts to prefill", f"{text}, {share(study.attained(second))} with '{second}'.")
    text += f", {share(study.attained(_REMOTE))} with {_REMOTE}"
    goodput = study.goodput_ratio(best, _REMOTE)
    if goodput.is_told_apart:
        text += f"; goodput is {goodput.times} as high"
    if len(study.steady([best, _REMOTE])) > 1:
        text += f"; TTFT is {study.ratio(best, _REMOTE, 'mean_ttft_ms').change}"
        text += f", TPOT {study.ratio(best, _REMOTE, 'mean_tpot_ms').change}"
    sent = [study.mean(label, "transfer_bytes") for label in (best, _REMOTE)]
    text += f"; {number(100 * sent[0] / sent[1])} % of the KV is sent"
    advice = f"Compute prompts {best.replace(' on decode', ' uncached tokens on decode')}"
    return Verdict(best, "Use Dynamo's rule" if best == _QUEUE else advice, f"{text}.")


LOCAL_PREFILL = Question(
    asks="Which prompts should the decode instance compute itself?",
    columns=("attained", "goodput", "tail_ttft", "tail_tpot", "latency", "gigabytes"),
    arms=_local_prefill_arms,
    verdict=_local_prefill_verdict,
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


_FCFS, _FIRST = "first come, first served", "priorities"
_SHED_NOBODY: Changes = {"router.shedding": None}
_QUEUE_SHARES = (0.5, 1.0, 2.0)
"""Maximum numbers of waiting requests to try, as shares of the number of prompts that prefill computes in a time as
long as the SLO's limit of TTFT, if each instance computes one prompt at a time.
"""


def _priorities_arms(base: Base) -> list[Arm]:
    priorities = base.scenario.priorities
    if not priorities or not base.other_classes[1:]:
        names = ", ".join(base.classes) or "its requests have no classes"
        raise ConfigError(
            f'priorities: say which of several classes goes first, as --set "priorities={{chat: 1}}"; there are {names}'
        )
    none: Changes = {"priorities": {}, "prefill.policy": "fcfs", **_SHED_NOBODY}
    return [Arm(_FCFS, none), Arm(_FIRST, {"prefill.policy": "priority", **_SHED_NOBODY})]


def _queue_limits(study: Study) -> list[Arm]:
    """Candidates with priorities, in which the router refuses requests above a maximum number of waiting requests. Each
    candidate has another maximum (_QUEUE_SHARES). Empty: these candidates were made before, the candidate with
    priorities alone has no result, or the SLO does not limit TTFT.
    """
    limit_ms = study.slo.limit_ms("ttft")
    if len(study.arms) > len((_FCFS, _FIRST)) or study.error(_FIRST) or limit_ms is None:
        return []
    forward_ms = study.mean(_FIRST, "mean_prefill_forward_ms")
    num_within = limit_ms / forward_ms * study.base.scenario.pair.prefill.instances
    made = []
    for num_queued in sorted({max(1, round(part * num_within)) for part in _QUEUE_SHARES}):
        shedding = {"router.shedding": {"use": "queue_limit", "max_queued_requests": num_queued}}
        made.append(Arm(f"{_FIRST}, {num_queued} wait", {"prefill.policy": "priority", **shedding}, num_queued))
    return made


def _priorities_verdict(study: Study) -> Verdict:
    """Names one of the candidates in which enough requests of the classes with the highest priority meet the SLO: the
    one with the largest share of requests of other classes that meet the SLO. If no candidate has enough: recommends
    none, and names the candidate with the largest share of requests of these first classes.
    """
    first, others = study.base.first_classes, study.base.other_classes
    labels = study.labels()
    shares = {label: study.attained_by(label, first).mean for label in labels}
    enough = min(study.slo.share, max(shares.values()))
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
        text += f"; {share(failed)} of all requests are refused"
    rate = study.ratio(best, _FCFS, "request_throughput")
    if best != _FCFS and rate.is_told_apart:
        text += f"; throughput is {rate.mean:.3g} times as high"
    wanted = study.slo.share
    if shares[best] >= wanted:
        return Verdict(best, f"Use '{best}'", f"{text}.", is_of_classes=True)
    return Verdict(best, "", f"None reaches {percent(wanted)}; '{best}' is the nearest: {text}.", is_of_classes=True)


def _share(study: Study, label: str, classes: list[str]) -> str:
    return share(study.attained_by(label, classes).mean)


PRIORITIES = Question(
    asks="Do priorities and shedding keep one class within the SLO when there is more load than room?",
    columns=("first", "others", "failed", "rate", "tail_ttft", "tail_tpot"),
    arms=_priorities_arms,
    then=_queue_limits,
    verdict=_priorities_verdict,
    starter={
        "workload.classes": {"chat": 0.5, "batch": 0.5},
        "priorities": {"chat": 1},
        "client": {"use": "open_loop", "arrivals": {"use": "poisson", "rate": "32/s"}},
    },
    axis="most requests that may wait",
)
