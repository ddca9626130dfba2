"""What does host memory behind the prefix caches save, and how much of it is enough?"""

from pdsim.scenario.sizing import layout_of, resolve
from pdsim.study.questions.base import Base
from pdsim.study.questions.question import Arm, Question, Verdict
from pdsim.study.questions.study import Study
from pdsim.study.questions.words import change, is_told_apart, milliseconds, number, percent, times
from pdsim.system.memory import GIB

_OFF = "off"
_RATIOS = (1, 2, 4, 8)
"""Host memory for each byte of the prefill pool; SGLang's default is 2."""


def arms(base: Base) -> list[Arm]:
    """Also with the size that the scenario has; prefill has a radix cache in all."""
    scenario = resolve(base.scenario)
    prefill, decode = scenario.pair
    assert prefill.pool_tokens is not None
    pool_bytes = prefill.pool_tokens * layout_of(scenario, "prefill").kv_token_bytes
    sizes = {f"{ratio * pool_bytes / GIB:.3g}" for ratio in _RATIOS}
    caches = {"prefill.host_cache": prefill.host_cache}
    if decode.radix_cache:
        caches["decode.host_cache"] = decode.host_cache
    sizes |= {f"{given.size / GIB:.4g}" for given in caches.values() if given is not None and given.size}
    writes = {field: "write_through" if given is None else given.write for field, given in caches.items()}
    radix = {"prefill.radix_cache": True}
    made = [Arm(_OFF, {**radix, **dict.fromkeys(caches)})]
    for size in sorted(sizes, key=float):
        changes = {field: {"size": f"{size} GiB", "write": write} for field, write in writes.items()}
        made.append(Arm(f"{size} GiB", {**radix, **changes}, float(size)))
    return made


def verdict(study: Study) -> Verdict:
    """The smallest size that is as good as the largest, if that is better than none."""
    study.require_results()
    sizes = study.labels()[1:]
    enough = next(label for label in sizes if study.serves_alike(label, sizes[-1]))
    hits = [study.metric(label, "prefill_cache_hit_rate").mean for label in (_OFF, enough)]
    found = f"prefill finds {percent(hits[1])} of the prompt tokens"
    if not pays(study, enough, _OFF):
        return Verdict(_OFF, "Do without host memory", f"with {enough} {found}, and {percent(hits[0])} without it.")
    text = f"{found} instead of {percent(hits[0])}, {against(study, enough, _OFF)}; "
    text += "more brings nothing." if enough != sizes[-1] else "more may bring more."
    return Verdict(enough, f"Give each GPU {enough} of host memory", text, [_per_server(study, enough)])


def pays(study: Study, label: str, off: str) -> bool:
    if study[off].is_saturated != study[label].is_saturated:
        return study[off].is_saturated
    rate = study.ratio(label, off, "request_throughput")
    ttft = study.ratio(label, off, "mean_ttft_ms")
    return (is_told_apart(rate) and rate.mean > 1) or (is_told_apart(ttft) and ttft.mean < 1)


def against(study: Study, label: str, off: str) -> str:
    if study[off].is_saturated:
        rates = [number(study.metric(one, "request_throughput").mean) for one in (label, off)]
        return f"and the cluster serves {rates[0]} requests/s instead of {rates[1]}"
    means, tails = (
        [milliseconds(study.metric(one, f"{time}_ttft_ms")) for one in (off, label)] for time in ("mean", "p99")
    )
    text = f"mean TTFT goes from {means[0]} to {means[1]} ({change(study.ratio(label, off, 'mean_ttft_ms'))})"
    text += f", p99 from {tails[0]} to {tails[1]}"
    rate = study.ratio(label, off, "request_throughput")
    return f"{text}, requests/s are {times(rate)} as many" if is_told_apart(rate) else text


def _per_server(study: Study, label: str) -> str:
    prefill = study.base.scenario.pair.prefill
    size = float(label.partition(" ")[0]) * prefill.tp
    return f"A prefill server of {prefill.tp} GPU{'s' if prefill.tp > 1 else ''} then pins {number(size)} GiB."


QUESTION = Question(
    asks="What does host memory behind the prefix caches save me?",
    columns=("attained", "rate", "ttft", "p99_ttft", "tpot", "prefill_hits", "decode_hits"),
    arms=arms,
    verdict=verdict,
    starter={
        "workload.use": "prefix_pool",
        "workload.num_requests": 800,
        "workload.num_prefixes": 160,
        "workload.prefix_tokens": 16384,
        "workload.input_tokens": {"use": "uniform", "low": 819, "high": 1229},
        "client": {"use": "open_loop", "arrivals": {"use": "poisson", "rate": "3/s"}},
    },
    axis="host memory of each GPU, GiB",
)
