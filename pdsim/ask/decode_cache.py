"""Does a radix cache on decode pay, and what does it cost?"""

from pdsim.ask.base import Base
from pdsim.ask.question import Arm, Question, Verdict
from pdsim.ask.study import Study
from pdsim.ask.words import change, is_told_apart, milliseconds, percent, times

_OFF, _ON = "off", "on"
_FIELD = "decode.radix_cache"


def arms(base: Base) -> list[Arm]:
    """Also with half and a quarter of the requests in the batch, which takes back part of what ITL costs."""
    made = [Arm(_OFF, {_FIELD: False}), Arm(_ON, {_FIELD: True})]
    if base.concurrency is None:
        return made
    caps = [base.concurrency // part for part in (2, 4) if base.concurrency >= part]
    return made + [Arm(f"on, at most {cap} decode", {_FIELD: True, "decode.max_running_requests": cap}) for cap in caps]


def verdict(study: Study) -> Verdict:
    if study[_OFF].is_saturated and study[_ON].is_saturated:
        rate = study.ratio(_ON, _OFF, "request_throughput")
        return Verdict(_ON, f"The load is too much with and without it; with it, requests/s are {times(rate)} as many.")
    rate = study.ratio(_ON, _OFF, "request_throughput")
    latency = study.ratio(_ON, _OFF, "mean_e2e_latency_ms")
    pays = study[_OFF].is_saturated or (is_told_apart(rate) and rate.mean > 1) or (is_told_apart(latency) and latency.mean < 1)
    hits = study.metric(_ON, "decode_cache_hit_rate").mean
    text = f"Switch it {'on' if pays else 'off: it does not pay'}: with {percent(hits)} of the prompt tokens found on decode, "
    text += f"requests/s are {times(rate)} as many"
    if not study[_OFF].is_saturated:
        ttft = [milliseconds(study.metric(label, "median_ttft_ms")) for label in (_OFF, _ON)]
        text += f", median TTFT goes from {ttft[0]} to {ttft[1]}, and mean ITL is {change(study.ratio(_ON, _OFF, 'mean_itl_ms'))}"
    return Verdict(_ON if pays else _OFF, text + ".", _why(study))


def _why(study: Study) -> list[str]:
    sent = study.ratio(_ON, _OFF, "transfer_bytes").mean
    running = [study.metric(label, "mean_running_requests").mean for label in (_OFF, _ON)]
    return [
        f"It sends {percent(sent)} of the bytes, and {running[1]:,.1f} instead of {running[0]:,.1f} requests decode at once. It "
        "raises throughput where decode is short of pages for requests that share prefixes; more requests share each step."
    ]


QUESTION = Question(
    asks="Does a radix cache on decode pay, and what does it cost?",
    columns=("goodput", "rate", "median_ttft", "itl", "latency", "running", "decode_hits", "gigabytes"),
    arms=arms,
    verdict=verdict,
    defaults={"gpus": 4, "prefixes": 10, "prefix_tokens": 32768, "input_tokens": "2048"},
)
