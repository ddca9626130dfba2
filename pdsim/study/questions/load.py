"""Questions on the load: the largest load that the cluster can serve within the SLO, and the stages in which requests
spend the time to the first token.
"""

from collections.abc import Sequence
from math import ceil

from pdsim.metrics.explanation.stages import ALL_STAGES, STAGES
from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.base import Base
from pdsim.study.points.estimate import number, percent
from pdsim.study.questions.study import Arm, Question, Study, Verdict, place_of
from pdsim.workload.client import Poisson

_ALL_AT_ONCE = "all at once"
_SHARES = (0.5, 0.7, 0.8, 0.9, 0.95)
"""Rates to try, as shares of the throughput of a run in which all requests are sent at the start. The largest share is
below 1, because at rates still nearer to this throughput the run would end before its queues are stable.
"""
_FINER = (1 / 3, 2 / 3)
"""Positions of further rates (or speed-ups of a trace) to try, between the highest rate that meets the SLO (0) and the
lowest that misses the SLO (1).
"""
_UNBOUNDED = 1_000_000
_RATES, _OWN_RATES = "Poisson arrivals", "arrivals as the scenario has them"
_SPEEDUPS = (0.5, 1.0, 2.0, 4.0)
_SLOWEST, _FASTEST = 1 / 8, 32.0
_NEAR = 1.4
"""The search for the highest speed-up tries further speed-ups between the lowest that misses the SLO and the highest
that meets it, if the lowest is more than this many times the highest.
"""
_SPEEDUP, _SPEEDUP_AXIS = "the trace's own times", "speed-up of the trace"


def _capacity_arms(base: Base) -> list[Arm]:
    if base.is_sample and not base.keeps_times:
        rate = "client={use: open_loop, arrivals: {use: poisson, rate: 8/s}}"
        raise ConfigError(f"capacity varies the rate, and this trace has no times; give a rate: --set '{rate}'")
    return [Arm(_ALL_AT_ONCE, {"client": {"use": "closed_loop", "concurrency": _UNBOUNDED}})]


def rates(study: Study) -> list[Arm]:
    """The next candidates to try, by the results so far. First a coarse grid of rates, or of speed-ups of a trace; then
    values between the highest that meets the SLO and the lowest that misses it. Empty: no further candidate is needed.
    """
    tried = [arm.x for arm in study.arms if arm.series and arm.x is not None]
    if study.base.keeps_times:
        return [_sped_up(study.base, factor) for factor in _speedups(study, tried)]
    if not tried:
        most = study.mean(_ALL_AT_ONCE, "request_throughput")
        return [_arm(study.base, most * share) for share in _SHARES]
    if len(tried) > len(_SHARES):
        return []
    low = _highest(study)
    high = min((rate for rate in tried if rate > low), default=None)
    return [] if high is None else [_arm(study.base, low + (high - low) * share) for share in _FINER]


def _speedups(study: Study, tried: list[float]) -> Sequence[float]:
    """Next speed-ups to try. If the user gave speed-ups: only these. Otherwise a coarse grid, then larger or smaller
    ones (up to _FASTEST, down to _SLOWEST) until one meets the SLO and one misses it, then values between these two.
    tried: the speed-ups that were tried so far. Empty result: no further speed-up is needed.
    """
    if not tried or study.options.speedups:
        return [] if tried else study.options.speedups or _SPEEDUPS
    low = _highest(study)
    high = min((factor for factor in tried if factor > low), default=None)
    if high is None:
        return [2 * low] if low < _FASTEST else []
    if not low:
        return [high / 2] if high > _SLOWEST else []
    return [low + (high - low) * share for share in _FINER] if high > _NEAR * low else []


def _sped_up(base: Base, factor: float) -> Arm:
    factor = float(f"{factor:.3g}")
    return Arm(f"speed-up {factor:g}", base.scaled(factor), factor, _SPEEDUP, _SPEEDUP_AXIS)


def _arm(base: Base, rate: float) -> Arm:
    """A candidate with this rate in requests per second. Arrivals that have a mean rate (gamma, constant, bursts, rate
    profiles) keep their shape; all other loads become Poisson arrivals.
    """
    rate = float(f"{rate:.3g}")
    arrivals = getattr(base.scenario.client, "arrivals", None)
    if hasattr(arrivals, "rate_per_s") and not isinstance(arrivals, Poisson):
        return Arm(f"{rate:g}/s", {"client.arrivals.rate": f"{rate} /s"}, rate, _OWN_RATES)
    client = {"use": "open_loop", "arrivals": {"use": "poisson", "rate": f"{rate} /s"}}
    return Arm(f"{rate:g}/s", {"client": client}, rate, _RATES)


def _highest(study: Study) -> float:
    """The highest rate in requests per second (or speed-up) up to which every tried rate meets the SLO. 0: the lowest
    tried rate misses the SLO, or has no result.
    """
    highest = 0.0
    for arm in sorted((arm for arm in study.arms if arm.series), key=place_of):
        if study.error(arm.label) or not study.meets(arm.label):
            break
        highest = place_of(arm)
    return highest


def _capacity_verdict(study: Study) -> Verdict:
    highest, num_gpus = _highest(study), study.base.scenario.num_gpus
    if not highest:
        lowest = min((arm for arm in study.arms if arm.series), key=place_of).label
        return Verdict(lowest, "", "The cluster misses the SLO even at the lowest rate that was tried.")
    most = study.mean(_ALL_AT_ONCE, "request_throughput")
    label = next(arm.label for arm in study.arms if arm.x == highest)
    rate, speed = highest, ""
    if study.base.keeps_times:
        rate, speed = study.mean(label, "request_throughput"), f"the trace at {highest:g} times its speed, "
    per_gpu = number(rate / num_gpus)
    text = f"These {num_gpus} GPUs take {speed}{number(rate)} requests/s within the SLO, {per_gpu} per GPU"
    why = f"{percent(rate / most)} of their throughput without an SLO."
    return Verdict(label, text, why, _needed(study, highest))


def _needed(study: Study, highest: float) -> list[str]:
    rate = getattr(getattr(study.base.scenario.client, "arrivals", None), "rate_per_s", None)
    if rate is None:
        return []
    copies = ceil(rate / highest)
    count = copies * study.base.scenario.num_gpus
    return [f"A load of {rate:g}/s needs {count} GPUs, {copies} times this cluster, with requests spread evenly."]


CAPACITY = Question(
    asks="How much load does the cluster take within the SLO?",
    columns=("attained", "rate", "tail_ttft", "tail_tpot", "goodput"),
    arms=_capacity_arms,
    then=rates,
    verdict=_capacity_verdict,
    axis="requests/s",
    starter={"workload.num_requests": 800},
)


_APART, _ALONE, _AGGREGATED = "disaggregated", "one request at a time", "aggregated"
_NUM_NAMED = 3
"""Number of stages that the answer's text names, the longest first. The answer's table has columns for further stages.
"""


def _explain_ttft_arms(base: Base) -> list[Arm]:
    alone = {"client": {"use": "closed_loop", "concurrency": 1}}
    return [Arm(_APART, {}), Arm(_ALONE, alone), Arm(_AGGREGATED, base.aggregated)]


def _explain_ttft_verdict(study: Study) -> Verdict:
    if study.error(_APART):
        raise ConfigError(study.error(_APART))
    ttft = study.metric(_APART, "mean_ttft_ms")
    if study[_APART].is_saturated:
        rate = study.metric(_APART, "request_throughput")
        text = f"The cluster serves only {number(rate.mean)} requests/s of the load, so TTFT keeps growing."
        return Verdict(_APART, "", text)
    passed = STAGES if study.base.scenario.encode is None else ALL_STAGES
    stages = {stage: study.metric(_APART, f"mean_{stage}_ms") for stage in passed if stage != "decode_forward"}
    longest = sorted(stages, key=lambda stage: -stages[stage].mean)[:_NUM_NAMED]
    parts = [f"{percent(stages[one].mean / ttft.mean)} {one} ({ALL_STAGES[one][2]})" for one in longest]
    return Verdict(_APART, "", f"A mean TTFT of {ttft.duration} is {', '.join(parts)}.", _compared(study))


def _compared(study: Study) -> list[str]:
    if _AGGREGATED not in study.labels():
        return []
    if study[_AGGREGATED].is_saturated:
        return ["The same GPUs without disaggregation cannot take the load."]
    ratio = study.ratio(_APART, _AGGREGATED, "mean_ttft_ms")
    return [f"Against the same GPUs without disaggregation, TTFT is {ratio.change}."]


EXPLAIN_TTFT = Question(
    asks="Where does the time to the first token go?",
    columns=("attained", "tail_ttft", "ttft", "queue", "forward", "transfer", "admission", "merge", "outside"),
    arms=_explain_ttft_arms,
    verdict=_explain_ttft_verdict,
)
