"""Questions on caches: a radix cache on decode instances, a cache in host memory, and a cache in storage behind host
memory.
"""

from pdsim.scenario.building.sizing import layout_of, resolve
from pdsim.scenario.loading import Changes
from pdsim.scenario.sections.servers import StorageSettings
from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.base import Base
from pdsim.study.points.estimate import Estimate, number, percent
from pdsim.study.questions.study import Arm, Question, Study, Verdict
from pdsim.system.memory import GIB
from pdsim.workload.client import ClosedLoop

_OFF, _ON = "off", "on"
_RADIX = "decode.radix_cache"


def _decode_cache_arms(base: Base) -> list[Arm]:
    """Candidates whose decode instances have a radix cache or have none. In a closed loop also candidates with the
    cache that limit the requests in a decode instance's batch to half and to a quarter of the number of clients,
    because smaller batches lower ITL.
    """
    made = [Arm(_OFF, {_RADIX: False}), Arm(_ON, {_RADIX: True})]
    client = base.scenario.client
    caps = [client.concurrency // part for part in (2, 4)] if isinstance(client, ClosedLoop) else []
    return made + [
        Arm(f"on, at most {cap} decode", {_RADIX: True, "decode.max_running_requests": cap}) for cap in caps if cap
    ]


def _decode_cache_verdict(study: Study) -> Verdict:
    """Recommends a radix cache on decode if only the cluster without the cache is saturated, if the cache raises
    throughput, or if throughput stays equal and mean latency falls. Raises ConfigError if the cluster with the cache or
    the one without has no result.
    """
    if failed := study.error(_OFF) or study.error(_ON):
        raise ConfigError(failed)
    rate = study.ratio(_ON, _OFF, "request_throughput")
    text = f"with {percent(study.mean(_ON, 'decode_cache_hit_rate'))} of the prompt tokens found on decode, "
    text += f"throughput is {rate.times} as high"
    if study[_ON].is_saturated:
        text += "; the cluster cannot take the load even with the cache"
    elif not study[_OFF].is_saturated:
        ttft = [study.metric(label, "median_ttft_ms").duration for label in (_OFF, _ON)]
        text += f", median TTFT goes from {ttft[0]} to {ttft[1]}, "
        text += f"and mean ITL is {study.ratio(_ON, _OFF, 'mean_itl_ms').change}"
    winner, advice = (_ON, "Switch the cache on") if _radix_pays(study, rate) else (_OFF, "Leave the cache off")
    return Verdict(winner, advice, f"{text}.", [_radix_effects(study)])


def _radix_pays(study: Study, rate: Estimate) -> bool:
    if study[_OFF].is_saturated != study[_ON].is_saturated:
        return study[_OFF].is_saturated
    if rate.is_told_apart:
        return rate.mean > 1
    latency = study.ratio(_ON, _OFF, "mean_e2e_latency_ms")
    return latency.is_told_apart and latency.mean < 1


def _radix_effects(study: Study) -> str:
    sent = study.ratio(_ON, _OFF, "transfer_bytes").mean
    before, after = (number(study.mean(label, "mean_running_requests")) for label in (_OFF, _ON))
    text = f"The cache leaves {percent(sent)} of the bytes to send; {after} requests decode at once, {before} without"
    where = "Throughput rises if decode was short of pages, and ITL rises if more requests share a step"
    return f"{text}. {where}."


DECODE_CACHE = Question(
    asks="Does a radix cache on decode pay, and what does it cost?",
    columns=("attained", "rate", "median_ttft", "tail_ttft", "itl", "latency", "running", "decode_hits", "gigabytes"),
    arms=_decode_cache_arms,
    verdict=_decode_cache_verdict,
    starter={
        "workload.use": "prefix_pool",
        "workload.num_prefixes": 10,
        "workload.prefix_tokens": 32768,
        "workload.input_tokens": {"use": "uniform", "low": 1638, "high": 2458},
    },
)


_RATIOS = (1, 2, 4, 8)
"""Sizes of host memory to try, as multiples of the prefill pool's size. SGLang's default is 2."""


def _host_cache_arms(base: Base) -> list[Arm]:
    """Candidates without host memory, and with host memory of several sizes per GPU, including the sizes that the
    scenario gives. Decode instances get host memory, too, if they have a radix cache and the engine is SGLang. Prefill
    instances have a radix cache in all candidates.
    """
    scenario = resolve(base.scenario)
    prefill, decode = scenario.pair
    assert prefill.pool_tokens is not None
    pool_bytes = prefill.pool_tokens * layout_of(scenario, "prefill").kv_token_bytes
    caches = {"prefill.host_cache": prefill.host_cache_bytes}
    if decode.radix_cache and scenario.engine == "sglang":
        caches["decode.host_cache"] = decode.host_cache_bytes
    sizes = {f"{given_bytes / GIB:.4g}" for given_bytes in caches.values() if given_bytes}
    alike = {f"{float(size):.3g}" for size in sizes}  # which would be the same sizes with one digit less
    sizes |= {f"{ratio * pool_bytes / GIB:.3g}" for ratio in _RATIOS} - alike
    radix = {"prefill.radix_cache": True}
    made = [Arm(_OFF, {**radix, **dict.fromkeys(caches)})]
    return made + [
        Arm(f"{size} GiB", {**radix, **dict.fromkeys(caches, f"{size} GiB")}, float(size))
        for size in sorted(sizes, key=float)
    ]


def _host_cache_verdict(study: Study) -> Verdict:
    """Recommends the smallest host cache with which throughput and mean TTFT are as good as with the largest. If this
    host cache improves neither: recommends no host cache. Raises ConfigError if a candidate has no result.
    """
    study.require_results()
    sizes = study.labels()[1:]
    enough = next(label for label in sizes if study.serves_alike(label, sizes[-1]))
    hits = [study.mean(label, "prefill_cache_hit_rate") for label in (_OFF, enough)]
    found = f"prefill finds {percent(hits[1])} of the prompt tokens in its caches"
    if not _memory_pays(study, enough, _OFF):
        return Verdict(_OFF, "Do without host memory", f"with {enough}, {found}, and without {percent(hits[0])}.")
    text = f"{found} instead of {percent(hits[0])}, {_memory_gain(study, enough, _OFF)}; "
    text += "a larger size saves no more." if enough != sizes[-1] else "a larger size may save more."
    tp = study.base.scenario.pair.prefill.tp
    pinned = number(float(enough.partition(" ")[0]) * tp)
    note = f"A prefill server of {tp} GPU{'s' if tp > 1 else ''} then pins {pinned} GiB of host memory."
    return Verdict(enough, f"Give each GPU {enough} of host memory", text, [note])


def _memory_pays(study: Study, label: str, off: str) -> bool:
    if study[off].is_saturated != study[label].is_saturated:
        return study[off].is_saturated
    rate = study.ratio(label, off, "request_throughput")
    ttft = study.ratio(label, off, "mean_ttft_ms")
    return (rate.is_told_apart and rate.mean > 1) or (ttft.is_told_apart and ttft.mean < 1)


def _memory_gain(study: Study, label: str, off: str) -> str:
    if study[off].is_saturated:
        rates = [number(study.mean(one, "request_throughput")) for one in (label, off)]
        return f"and the cluster serves {rates[0]} requests/s instead of {rates[1]}"
    means, tails = ([study.metric(one, f"{time}_ttft_ms").duration for one in (off, label)] for time in ("mean", "p99"))
    text = f"mean TTFT goes from {means[0]} to {means[1]} ({study.ratio(label, off, 'mean_ttft_ms').change})"
    text += f", p99 from {tails[0]} to {tails[1]}"
    rate = study.ratio(label, off, "request_throughput")
    return f"{text}, and throughput is {rate.times} as high" if rate.is_told_apart else text


HOST_CACHE = Question(
    asks="What does host memory behind the prefix caches save me?",
    columns=("attained", "rate", "ttft", "p99_ttft", "tpot", "prefill_hits", "decode_hits"),
    arms=_host_cache_arms,
    verdict=_host_cache_verdict,
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


_NO_STORAGE = "none"
_DRIVES = (1, 2, 4, 8)


def _storage_arms(base: Base) -> list[Arm]:
    """A candidate without storage, and candidates with several numbers of drives, including the scenario's number.
    Prefill instances have a radix cache and host memory in all candidates; other storage fields keep the scenario's
    values.
    """
    given = base.scenario.storage or StorageSettings()
    host: Changes = {"prefill.radix_cache": True}
    if base.scenario.pair.prefill.host_cache is None:
        host["prefill.host_cache"] = "auto"
    made = [Arm(_NO_STORAGE, {**host, "storage": None}, 0.0)]
    for drives in sorted({*_DRIVES, given.drives}):
        label = f"{drives} drive{'s' if drives > 1 else ''}"
        made.append(Arm(label, {**host, "storage": {**given.model_dump(), "drives": drives}}, float(drives)))
    return made


def _storage_verdict(study: Study) -> Verdict:
    """Recommends the smallest number of drives with which throughput and mean TTFT are as good as with the largest. If
    these drives improve neither in comparison with no storage: recommends no storage. Raises ConfigError if a
    candidate has no result.
    """
    study.require_results()
    labels = study.labels()
    enough = next(label for label in labels[1:] if study.serves_alike(label, labels[-1]))
    hits = {label: percent(study.mean(label, "prefill_cache_hit_rate")) for label in labels}
    found = f"prefill finds {hits[enough]} of the prompt tokens"
    if not _memory_pays(study, enough, _NO_STORAGE):
        return Verdict(_NO_STORAGE, "Do without storage", f"with {enough}, {found}, and without {hits[_NO_STORAGE]}.")
    storage = study.base.scenario.storage or StorageSettings()
    where = "the shared store" if storage.shared else "each server"
    rates = ", ".join(f"{label} {hit}" for label, hit in hits.items())
    text = f"{found} instead of {hits[_NO_STORAGE]}, {_memory_gain(study, enough, _NO_STORAGE)}."
    return Verdict(enough, f"Give {where} {enough}", text, [f"Hit rates on prefill: {rates}."])


STORAGE = Question(
    asks="What does storage behind host memory save me, and how many drives are enough?",
    columns=("attained", "rate", "ttft", "p99_ttft", "tpot", "prefill_hits"),
    arms=_storage_arms,
    verdict=_storage_verdict,
    starter={
        "workload.use": "prefix_pool",
        "workload.num_requests": 1200,
        "workload.num_prefixes": 480,
        "workload.prefix_tokens": 16384,
        "workload.input_tokens": {"use": "uniform", "low": 819, "high": 1229},
        "client": {"use": "open_loop", "arrivals": {"use": "poisson", "rate": "3/s"}},
        "page_size": 64,
        "prefill.host_cache": "auto",
        "storage": {"shared": True, "size": "500 GB"},
    },
    axis="drives",
)
