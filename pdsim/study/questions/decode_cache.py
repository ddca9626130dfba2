"""Does a radix cache on decode pay, and what does it cost?"""

from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.questions.base import Base
from pdsim.study.questions.question import Arm, Question, Verdict
from pdsim.study.questions.study import Study
from pdsim.study.questions.words import change, is_told_apart, milliseconds, number, percent, times
from pdsim.study.result import Estimate
from pdsim.workload.client_driver import ClosedLoop

_OFF, _ON = "off", "on"
_FIELD = "decode.radix_cache"


def arms(base: Base) -> list[Arm]:
    """Also with half and a quarter of the requests in the batch, which takes back part of what ITL costs."""
    made = [Arm(_OFF, {_FIELD: False}), Arm(_ON, {_FIELD: True})]
    client = base.scenario.client
    caps = [client.concurrency // part for part in (2, 4)] if isinstance(client, ClosedLoop) else []
    return made + [
        Arm(f"on, at most {cap} decode", {_FIELD: True, "decode.max_running_requests": cap}) for cap in caps if cap
    ]


def verdict(study: Study) -> Verdict:
    """Judges by throughput and latency, of which either may gain."""
    if failed := study.error(_OFF) or study.error(_ON):
        raise ConfigError(failed)
    rate = study.ratio(_ON, _OFF, "request_throughput")
    text = f"with {percent(study.metric(_ON, 'decode_cache_hit_rate').mean)} of the prompt tokens found on decode, "
    text += f"requests/s are {times(rate)} as many"
    if study[_ON].is_saturated:
        text += "; the load is too much even so"
    elif not study[_OFF].is_saturated:
        ttft = [milliseconds(study.metric(label, "median_ttft_ms")) for label in (_OFF, _ON)]
        text += f", median TTFT goes from {ttft[0]} to {ttft[1]}, "
        text += f"and mean ITL is {change(study.ratio(_ON, _OFF, 'mean_itl_ms'))}"
    if _pays(study, rate):
        return Verdict(_ON, "Switch it on", f"{text}.", [_why(study)])
    return Verdict(_OFF, "Leave it off, it does not pay", f"{text}.", [_why(study)])


def _pays(study: Study, rate: Estimate) -> bool:
    if study[_OFF].is_saturated != study[_ON].is_saturated:
        return study[_OFF].is_saturated
    if is_told_apart(rate):
        return rate.mean > 1
    latency = study.ratio(_ON, _OFF, "mean_e2e_latency_ms")
    return is_told_apart(latency) and latency.mean < 1


def _why(study: Study) -> str:
    sent = study.ratio(_ON, _OFF, "transfer_bytes").mean
    before, after = (number(study.metric(label, "mean_running_requests").mean) for label in (_OFF, _ON))
    text = f"It sends {percent(sent)} of the bytes, and {after} instead of {before} requests decode at once"
    where = "Throughput gains where decode is short of pages; ITL pays where more requests then share a step"
    return f"{text}. {where}."


QUESTION = Question(
    asks="Does a radix cache on decode pay, and what does it cost?",
    columns=("attained", "rate", "median_ttft", "tail_ttft", "itl", "latency", "running", "decode_hits", "gigabytes"),
    arms=arms,
    verdict=verdict,
    starter={
        "workload.use": "prefix_pool",
        "workload.num_prefixes": 10,
        "workload.prefix_tokens": 32768,
        "workload.input_tokens": {"use": "uniform", "low": 1638, "high": 2458},
    },
)
