"""Which transport should carry KV, and how fast must its link be?"""

from pdsim.study.questions.base import Base
from pdsim.study.questions.question import Arm, Question, Verdict
from pdsim.study.questions.study import Study, others_against
from pdsim.study.questions.words import milliseconds, number, percent

_ENGINES = ("mooncake-tcp", "mooncake-rdma", "nixl-rdma", "mooncake-nvlink", "cuda-ipc")
_RDMA = "mooncake-rdma"
_GIGABYTES = (0.5, 1, 2, 5, 10, 25, 50, 100)
_LITTLE = 0.05
"""Share of the mean TTFT with the fastest link that a faster one would still save."""
_EXPOSED = "mean_prefill_transfer_kv_cache_ms"
_LINKS = "links of RDMA's engine"


def arms(_base: Base) -> list[Arm]:
    """Engines with the bandwidth of the GPU's own links, then one engine with links of many speeds."""
    keep = {"network.bandwidth": None, "network.transfer_latency": None, "network.descriptor_latency": None}
    engines = [Arm(name, {**keep, "network.transport": name}) for name in _ENGINES]
    rdma = {**keep, "network.transport": _RDMA}
    links = [Arm(f"{n:g} GB/s", {**rdma, "network.bandwidth": f"{n} GB/s"}, series=_LINKS) for n in _GIGABYTES]
    return engines + links


def verdict(study: Study) -> Verdict:
    engines = study.labels("")
    best = study.best(engines)
    ttft, exposed = (milliseconds(study.metric(best, name)) for name in ("mean_ttft_ms", _EXPOSED))
    text = f"mean TTFT {ttft}, with {exposed} of transfer that compute does not hide"
    if study[best].is_saturated:
        text = "it serves the most requests"
    found = others_against(study, best, [label for label in engines if label != best], "mean_ttft_ms", "TTFT")
    return Verdict(best, f"Use {best}", "; ".join([text, *found]) + ".", [_knee(study)])


def _knee(study: Study) -> str:
    links = study.steady(study.labels(_LINKS))
    if not links:
        return "With links of every speed the load is too much: it is not the link that is short."
    fastest = study.metric(links[-1], "mean_ttft_ms").mean
    enough = next(label for label in links if study.metric(label, "mean_ttft_ms").mean <= (1 + _LITTLE) * fastest)
    size = study.metric(enough, "transfer_bytes").mean / study.metric(enough, "completed").mean / 1e9
    knee = f"From {enough} a link on, a faster one saves less than {percent(_LITTLE)} of TTFT"
    return f"{knee}; a request has {number(size)} GB of KV to move."


QUESTION = Question(
    asks="Which transport should carry KV, and how fast must its link be?",
    columns=("attained", "goodput", "ttft", "tail_ttft", "transfer", "tpot", "rate"),
    arms=arms,
    verdict=verdict,
)
