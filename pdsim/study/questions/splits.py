"""Questions on the use of GPUs: how to divide them between prefill and decode, whether to disaggregate, which parallel
sizes servers have, and whether servers change their role.
"""

from itertools import product
from typing import Any

from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.loading import Changes
from pdsim.scenario.sections.servers import Split
from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.base import Base
from pdsim.study.points.estimate import number, share
from pdsim.study.questions.study import Arm, Question, Study, Verdict
from pdsim.study.space import SPLITS, needs_staging, tp_sizes
from pdsim.workload.synthetic import PrefixPool, RandomLengths


def _splits(base: Base) -> list[Arm]:
    """Candidates that use all GPUs with different numbers of prefill and decode servers. If the scenario names no
    router, each split in which a role has several servers is tried with several routers. Raises ConfigError if no split
    is possible.
    """
    prefill, decode = base.scenario.pair
    num_gpus = base.scenario.num_role_gpus
    made = []
    for instances in range(1, num_gpus // prefill.num_server_gpus + 1):
        others, rest = divmod(num_gpus - instances * prefill.num_server_gpus, decode.num_server_gpus)
        if others >= 1 and not rest:
            changes = {"prefill.instances": instances, "decode.instances": others}
            routers = base.routers(max(instances, others))
            made += [Arm(f"{instances}P{others}D{name}", {**changes, **router}) for name, router in routers.items()]
    if not made:
        raise ConfigError(f"{base.where}: no prefill and decode instances have {num_gpus} GPUs in total")
    return made


def _pd_ratio_verdict(study: Study) -> Verdict:
    labels = study.best_routed(study.labels())
    best = study.best(labels)
    text = f"{number(study.goodput(best))} requests/s per GPU meet the SLO"
    others = [label for label in labels if label != best]
    if not others:
        text += ". No other ratio is possible."
        return Verdict(best, f"Use {best}", text, study.routers_against(best))
    second, worst = study.best(others), min(others, key=study.goodput)
    ratio = study.goodput_ratio(best, second)
    if ratio.is_told_apart:
        text += f", {ratio.times} as many as with {second}"
    else:
        latency = study.ratio(second, best, "mean_e2e_latency_ms").times
        text += f"; {second} gives as many within chance, at {latency} the latency"
    if worst != second:
        text += f", and {study.goodput_ratio(best, worst).times} as many as with the worst, {worst}"
    if study.meets(best) and not study.meets(second):
        text += "; no other ratio meets the SLO"
    return Verdict(best, f"Use {best}", text + ".", study.routers_against(best))


PD_RATIO = Question(
    asks="How many of the GPUs should prefill?",
    columns=("attained", "goodput", "tail_ttft", "tail_tpot", "rate", "queue", "admission"),
    arms=_splits,
    verdict=_pd_ratio_verdict,
)


_AGGREGATED = "aggregated"
_DO, _DO_NOT = "Separate them", "Do not separate them"
_LENGTH_FACTORS = (1 / 16, 1 / 4, 4.0)
"""Prompt lengths to try, as multiples of the scenario's mean prompt length. Prefixes that prompts share are not
included. Results show at which length disaggregation becomes better or worse.
"""


def _pd_or_not_arms(base: Base) -> list[Arm]:
    changes = base.aggregated
    routers = base.routers(changes["aggregated"]["instances"])
    return [*(Arm(f"{_AGGREGATED}{name}", {**changes, **router}) for name, router in routers.items()), *_splits(base)]


def _other_prompts(study: Study) -> list[Arm]:
    """Candidates that repeat the aggregated cluster and all splits with shorter and with longer prompts. Empty: the
    workload has no length to vary, or these candidates were made before.
    """
    has_lengths = isinstance(study.base.scenario.workload, RandomLengths | PrefixPool)
    if not has_lengths or any(arm.series for arm in study.arms):
        return []
    mean = _own_tokens(study)
    return [
        Arm(f"{arm.label}, {tokens} in", {**arm.changes, "workload.input_tokens": _around(tokens)}, series=str(tokens))
        for tokens in (max(16, round(mean * factor)) for factor in _LENGTH_FACTORS)
        for arm in _pd_or_not_arms(study.base)
    ]


def _pd_or_not_verdict(study: Study) -> Verdict:
    together, apart = _sides(study, "")
    if not together:
        best, error = study.best(apart), study.error(study.arms[0].label)
        return Verdict(best, _DO, f"the aggregated cluster is not possible: {error}")
    if not apart:
        return Verdict(study.best(together), _DO_NOT, "no split is possible.")
    bests = [study.best(apart), study.best(together)]
    winner = study.best(bests)
    (other,) = (label for label in bests if label != winner)
    goodput = study.goodput_ratio(winner, other)
    if study.meets(winner) and not study.meets(other):
        text = f"{winner} meets the SLO with {share(study.attained(winner))} of the requests, "
        text += f"{other} misses it with {share(study.attained(other))}"
    elif goodput.is_told_apart:
        text = f"{winner} gives {number(study.goodput(winner))} requests/s per GPU within the SLO, "
        text += f"{goodput.times} as many as {other}"
    else:
        text = f"{winner} and {other} give the same goodput"
    if not study[winner].is_saturated and not study[other].is_saturated:
        text += f", with {study.ratio(winner, other, 'mean_ttft_ms').change} TTFT"
        text += f" and {study.ratio(winner, other, 'mean_tpot_ms').change} TPOT"
    notes = [*_crossover(study), *study.routers_against(winner)]
    return Verdict(winner, _DO_NOT if winner in together else _DO, text + ".", notes)


def _sides(study: Study, series: str) -> tuple[list[str], list[str]]:
    """Returns two lists of labels: the aggregated and the disaggregated candidates that have a result for prompts of
    one length. series: this length in tokens, as in Arm.series. Empty: the scenario's own prompts.
    """
    labels = study.labels(series)
    together = [label for label in labels if label.startswith(_AGGREGATED)]
    return together, [label for label in labels if label not in together]


def _crossover(study: Study) -> list[str]:
    """A sentence that compares, for each prompt length that was tried, the best disaggregated candidate with the best
    aggregated candidate. Empty: the question tried only one length.
    """
    lengths = {series: int(series) for series in dict.fromkeys(arm.series for arm in study.arms) if series}
    if not lengths:
        return []
    found: dict[int, str] = {}
    for series, tokens in {**lengths, "": round(_own_tokens(study))}.items():
        together, apart = _sides(study, series)
        if together and apart:
            found[tokens] = f"{tokens:,}: {_better(study, study.best(apart), study.best(together), series)}"
    lines = "; ".join(found[tokens] for tokens in sorted(found))
    return [f"Better cluster by prompt length in tokens, at the same rate of requests: {lines}."]


def _better(study: Study, apart: str, together: str, series: str) -> str:
    """Compares in words a disaggregated candidate (label `apart`) with an aggregated candidate (label `together`). If
    only one of the candidates meets the SLO, names this candidate. Otherwise gives the ratio of their goodputs or, if
    the goodputs are equal and neither candidate is saturated, of their mean latencies. series: the prompt length in
    tokens that both labels name (Arm.series). Empty: the scenario's own prompts.
    """
    name, goodput = apart.removesuffix(f", {series} in"), study.goodput_ratio(apart, together)
    if study.meets(apart) != study.meets(together):
        return f"only {name if study.meets(apart) else together.removesuffix(f', {series} in')} meets the SLO"
    if goodput.is_told_apart or len(study.steady([apart, together])) < 2:  # noqa: PLR2004
        return f"{name} has {goodput.times} the aggregated goodput"
    return f"{name} has {study.ratio(apart, together, 'mean_e2e_latency_ms').times} the aggregated latency"


def _own_tokens(study: Study) -> float:
    """Mean number of tokens of a prompt, without the prefix that it shares with other prompts."""
    return study.mean_prompt_tokens - getattr(study.base.scenario.workload, "prefix_tokens", 0)


def _around(tokens: int) -> dict[str, object]:
    return {"use": "uniform", "low": max(1, round(0.8 * tokens)), "high": round(1.2 * tokens)}


PD_OR_NOT = Question(
    asks="Are separate prefill and decode GPUs better than the same GPUs without disaggregation?",
    columns=("attained", "goodput", "tail_ttft", "tail_tpot", "latency", "rate"),
    arms=_pd_or_not_arms,
    then=_other_prompts,
    verdict=_pd_or_not_verdict,
)


_SIZES = (1, 2, 4, 8)


def _prefill_split_arms(base: Base) -> list[Arm]:
    """Candidates that divide the scenario's prefill GPUs into servers of each possible parallel size (tp, pp and cp).
    The scenario's own size comes first. KV that would be sent in slices goes through staging memory if possible. Raises
    ConfigError if no size is possible.
    """
    prefill = base.scenario.pair.prefill
    splits = dict.fromkeys(
        [prefill.split, *(Split(*sizes) for sizes in product(tp_sizes(prefill.gpu), _SIZES, _SIZES))]
    )
    made, reasons = [], []
    for split in (split for split in splits if not prefill.num_gpus % split.num_gpus):
        instances = prefill.num_gpus // split.num_gpus
        changes: dict[str, Any] = {"prefill.instances": instances}
        changes |= {f"prefill.{name}": getattr(split, name) for name in ("tp", *SPLITS["prefill"])}
        try:
            if needs_staging(base, resolve(base.changed(changes))):
                changes["network.staging"] = {}
        except ConfigError as impossible:
            reasons.append(impossible)
            continue
        made.append(Arm(f"{instances} x {split.words}", changes))
    if not made:
        raise reasons[0]
    return made


def _prefill_split_verdict(study: Study) -> Verdict:
    best = study.best(study.labels())
    text = f"{share(study.attained(best))} of the requests meet the SLO"
    if best in study.steady([best]):
        text += f", with a mean TTFT of {study.metric(best, 'mean_ttft_ms').duration}"
        text += "".join(f"; with {label} it is {found}" for label, found in _other_kinds(study, best))
    forwards = {label: study.metric(label, "mean_prefill_forward_ms") for label in study.labels()}
    quickest = min(study.steady(forwards) or [best], key=lambda label: forwards[label].mean)
    note = f"{quickest} computes a prompt fastest, in {forwards[quickest].duration}."
    return Verdict(best, f"Split prefill into {best}", f"{text}.", [note])


def _other_kinds(study: Study, best: str) -> list[tuple[str, str]]:
    """For each kind of parallelism (see _kind) other than that of the candidate `best`: the label of its best
    unsaturated candidate, and a text on how this candidate's mean TTFT differs from that of `best`.
    """
    kinds: dict[str, list[str]] = {}
    for label in study.steady(study.labels()):
        kinds.setdefault(_kind(label), []).append(label)
    firsts = [study.best(labels) for kind, labels in kinds.items() if kind != _kind(best)]
    return [(label, study.ratio(label, best, "mean_ttft_ms").change) for label in firsts]


def _kind(label: str) -> str:
    """The kind of parallelism that a candidate's label names: "PP" (pipeline stages, with or without context
    parallelism), "CP" (context parallelism alone), or empty (neither).
    """
    return next((kind for kind in ("PP", "CP") if kind in label), "")


PREFILL_SPLIT = Question(
    asks="Should prefill split its GPUs into more servers, larger TP, pipeline stages or context parallelism?",
    columns=("attained", "tail_ttft", "ttft", "queue", "forward", "transfer", "rate"),
    arms=_prefill_split_arms,
    verdict=_prefill_split_verdict,
    starter={
        "model": "llama-3.1-70b",
        "prefill": {"gpu": "h200", "tp": 8},
        "decode": {"gpu": "h200", "tp": 4},
        "workload.num_requests": 150,
        "workload.input_tokens": {"use": "uniform", "low": 20_000, "high": 60_000},
        "client": {"use": "open_loop", "arrivals": {"use": "poisson", "rate": "0.3/s"}},
    },
)


_SWITCH, _SCALE = "servers change roles", "servers start and stop, too"
_EQUAL_SHARE = 0.01
"""If no candidate meets the SLO: candidates whose share of requests within the SLO is at most this much below the
largest share count as equal, and GPU-hours decide. 0.01 is one percentage point.
"""


def _elastic_arms(base: Base) -> list[Arm]:
    """Candidates whose numbers of prefill and decode servers stay the same, on all GPUs and on fewer GPUs. Two more
    candidates follow a scaling policy (section elastic): in one, servers only change roles; in the other, servers also
    start and stop. Raises ConfigError if prefill and decode servers differ in GPU or tp.
    """
    prefill, decode = base.scenario.pair
    if (prefill.gpu, prefill.tp) != (decode.gpu, decode.tp):
        raise ConfigError("elastic: servers that change roles need the same gpu and tp in prefill and decode")
    total = base.scenario.max_servers
    made = []
    for servers in range(2, total + 1):
        for instances in range(1, servers):
            split: Changes = {"prefill.instances": instances, "decode.instances": servers - instances}
            made.append(Arm(f"{instances}P{servers - instances}D", {**split, "elastic": None}))
    half: Changes = {"prefill.instances": max(1, total // 2), "decode.instances": total - max(1, total // 2)}
    if base.scenario.elastic is None:
        half["elastic.interval"] = "30 s"
    policy = "elastic.policy.keep_servers"
    return [*made, Arm(_SWITCH, {**half, policy: True}), Arm(_SCALE, {**half, policy: False})]


def _elastic_verdict(study: Study) -> Verdict:
    """Recommends the candidate that meets the SLO with the fewest GPU-hours. If none meets the SLO: of the candidates
    with the largest share of requests within the SLO (up to _EQUAL_SHARE), the one with the fewest GPU-hours.
    """
    labels = study.labels()
    fixed = [label for label in labels if label not in (_SWITCH, _SCALE)]
    best, static = _cheapest(study, labels), _cheapest(study, fixed)
    if best == static:
        text = f"{_attained(study, best)} of the requests meet the SLO in {_hours(study, best)} GPU-hours"
        others = [
            f"{_attained(study, one)} in {_hours(study, one)} if {one}" for one in (_SWITCH, _SCALE) if one in labels
        ]
        return Verdict(best, f"Keep {best}", f"{text}; {' and '.join(others)}.")
    text = f"{_attained(study, best)} of the requests meet the SLO in {_hours(study, best)} GPU-hours; "
    text += f"the best fixed ratio, {static}, reaches {_attained(study, static)} in {_hours(study, static)}"
    return Verdict(best, f"Let {best}", f"{text}.")


def _cheapest(study: Study, labels: list[str]) -> str:
    meeting = [label for label in labels if study.meets(label)]
    if meeting:
        return min(meeting, key=lambda label: (study.mean(label, "gpu_hours"), -study.attained(label)))
    most = max(study.attained(label) for label in labels) - _EQUAL_SHARE
    enough = [label for label in labels if study.attained(label) >= most]
    return min(enough, key=lambda label: study.mean(label, "gpu_hours"))


def _attained(study: Study, label: str) -> str:
    return share(study.attained(label))


def _hours(study: Study, label: str) -> str:
    return number(study.mean(label, "gpu_hours"))


ELASTIC = Question(
    asks="Do servers that change their roles, or start and stop, beat a fixed ratio on my day?",
    columns=("attained", "gpu_hours", "tail_ttft", "tail_tpot", "rate"),
    arms=_elastic_arms,
    verdict=_elastic_verdict,
    starter={
        "client": {
            "use": "open_loop",
            "arrivals": {"use": "profile", "levels": [4, 20, 8, 2], "level": "60 s"},
        },
        "workload.num_requests": 2000,
    },
)
