"""How should prefill split its GPUs: more servers, tensor parallelism, pipeline stages or context parallelism?"""

from itertools import product
from typing import Any

from pdsim.scenario.servers import Split
from pdsim.scenario.sizing import resolve
from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.planning.space import needs_staging, tp_sizes
from pdsim.study.questions.base import Base
from pdsim.study.questions.question import Arm, Question, Verdict
from pdsim.study.questions.study import Study
from pdsim.study.questions.words import change, milliseconds, share

_SIZES = (1, 2, 4, 8)


def arms(base: Base) -> list[Arm]:
    """The scenario's split and all others that are possible. Where KV would go in slices it is staged, if it can be."""
    prefill = base.scenario.pair.prefill
    splits = dict.fromkeys(
        [prefill.split, *(Split(*sizes) for sizes in product(tp_sizes(prefill.gpu), _SIZES, _SIZES))]
    )
    made, reasons = [], []
    for split in (split for split in splits if not prefill.num_gpus % split.num_gpus):
        instances = prefill.num_gpus // split.num_gpus
        changes: dict[str, Any] = {"prefill.instances": instances}
        changes |= {f"prefill.{name}": size for name, size in split._asdict().items()}
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


def verdict(study: Study) -> Verdict:
    best = study.best(study.labels())
    text = f"{share(study.attained(best))} of the requests meet the SLO"
    if best in study.steady([best]):
        text += f", with a mean TTFT of {milliseconds(study.metric(best, 'mean_ttft_ms'))}"
        text += "".join(f"; with {label} it is {found}" for label, found in _others(study, best))
    forwards = {label: study.metric(label, "mean_prefill_forward_ms") for label in study.labels()}
    quickest = min(study.steady(forwards) or [best], key=lambda label: forwards[label].mean)
    note = f"{quickest} computes a prompt fastest, in {milliseconds(forwards[quickest])}."
    return Verdict(best, f"Split prefill into {best}", f"{text}.", [note])


def _others(study: Study, best: str) -> list[tuple[str, str]]:
    """The best of the other kinds, and how their mean TTFT differs."""
    kinds: dict[str, list[str]] = {}
    for label in study.steady(study.labels()):
        kinds.setdefault(_kind(label), []).append(label)
    firsts = [study.best(labels) for kind, labels in kinds.items() if kind != _kind(best)]
    return [(label, change(study.ratio(label, best, "mean_ttft_ms"))) for label in firsts]


def _kind(label: str) -> str:
    """Stages, groups, or neither."""
    return next((kind for kind in ("PP", "CP") if kind in label), "")


QUESTION = Question(
    asks="Should prefill split its GPUs into more servers, larger TP, pipeline stages or context parallelism?",
    columns=("attained", "tail_ttft", "ttft", "queue", "forward", "transfer", "rate"),
    arms=arms,
    verdict=verdict,
    starter={
        "model": "llama-3.1-70b",
        "prefill": {"gpu": "h200", "tp": 8},
        "decode": {"gpu": "h200", "tp": 4},
        "workload.num_requests": 150,
        "workload.input_tokens": {"use": "uniform", "low": 20_000, "high": 60_000},
        "client": {"use": "open_loop", "arrivals": {"use": "poisson", "rate": "0.3/s"}},
    },
)
