"""What does storage behind host memory save, and how many drives are enough?"""

from pdsim.scenario.sizing import resolve
from pdsim.scenario.storage import HostCacheSettings, StorageSettings
from pdsim.study.questions.base import Base
from pdsim.study.questions.host_cache import against, pays
from pdsim.study.questions.question import Arm, Question, Verdict
from pdsim.study.questions.study import Study
from pdsim.study.questions.words import percent

_NONE = "none"
_DRIVES = (1, 2, 4, 8)


def arms(base: Base) -> list[Arm]:
    """Prefill has host memory in all, and the other fields of storage are those of the scenario."""
    prefill, _ = resolve(base.scenario).pair
    given = base.scenario.storage or StorageSettings()
    host = {"prefill.radix_cache": True, "prefill.host_cache": prefill.host_cache or HostCacheSettings()}
    made = [Arm(_NONE, {**host, "storage": None}, 0.0)]
    for drives in sorted({*_DRIVES, given.drives}):
        label = f"{drives} drive{'s' if drives > 1 else ''}"
        made.append(Arm(label, {**host, "storage": given.model_copy(update={"drives": drives})}, float(drives)))
    return made


def verdict(study: Study) -> Verdict:
    """The fewest drives that are as good as the most, if that is better than none."""
    study.require_results()
    labels = study.labels()
    enough = next(label for label in labels[1:] if study.serves_alike(label, labels[-1]))
    hits = {label: percent(study.metric(label, "prefill_cache_hit_rate").mean) for label in labels}
    found = f"prefill finds {hits[enough]} of the prompt tokens"
    if not pays(study, enough, _NONE):
        return Verdict(_NONE, "Do without storage", f"with {enough} {found}, and {hits[_NONE]} without it.")
    storage = study.base.scenario.storage or StorageSettings()
    where = "the shared store" if storage.shared else "each server"
    rates = ", ".join(f"{label} {hit}" for label, hit in hits.items())
    text = f"{found} instead of {hits[_NONE]}, {against(study, enough, _NONE)}."
    return Verdict(enough, f"Give {where} {enough}", text, [f"Hit rates on prefill: {rates}."])


QUESTION = Question(
    asks="What does storage behind host memory save me, and how many drives are enough?",
    columns=("attained", "rate", "ttft", "p99_ttft", "tpot", "prefill_hits"),
    arms=arms,
    verdict=verdict,
    starter={
        "workload.use": "prefix_pool",
        "workload.num_requests": 1200,
        "workload.num_prefixes": 480,
        "workload.prefix_tokens": 16384,
        "workload.input_tokens": {"use": "uniform", "low": 819, "high": 1229},
        "client": {"use": "open_loop", "arrivals": {"use": "poisson", "rate": "3/s"}},
        "page_size": 64,
        "prefill.host_cache": {},
        "storage": {"shared": True, "size": "500 GB"},
    },
    axis="drives",
)
