"""Loads of the GPUs that routed experts are spread over, when tokens do not choose experts evenly.

Popularities follow a power law, as steep as it takes to give the busiest GPU its load with experts in the order of the
checkpoint. With redundant experts a balancer (DeepSeek's EPLB) copies the most loaded, and deals all to the GPUs.
"""

from functools import cache
from random import Random

_STEEPEST = 8.0
"""Exponent at which one expert has nearly all tokens."""
_ROUNDS = 50


@cache
def balanced_skew(skew: float, num_experts: int, num_redundant: int, num_gpus: int) -> float:
    """Excess of the busiest GPU over the mean with redundant experts, where it was `skew` without."""
    if skew == 0 or num_redundant >= num_experts * (num_gpus - 1):
        return 0.0
    low, high = 0.0, _STEEPEST
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        as_stored = loads(popularities(middle, num_experts), num_gpus)
        low, high = (low, middle) if skew_of(as_stored) > skew else (middle, high)
    balanced = balance(popularities(high, num_experts), num_redundant, num_gpus)
    return min(skew, skew_of(balanced))


def popularities(exponent: float, num_experts: int) -> list[float]:
    """Popularities of experts, in the order of a checkpoint: popular ones lie anywhere."""
    popular = [(1 + i) ** -exponent for i in range(num_experts)]
    Random(0).shuffle(popular)
    return popular


def loads(popular: list[float], num_gpus: int) -> list[float]:
    """Loads of GPUs that hold one block of experts each."""
    size = len(popular) // num_gpus
    return [sum(popular[gpu * size : (gpu + 1) * size]) for gpu in range(num_gpus)]


def balance(popular: list[float], num_redundant: int, num_gpus: int) -> list[float]:
    """Loads of GPUs with as many experts each: the most loaded was copied, again and again; then the heaviest goes
    first, to the least loaded GPU that has room.
    """
    copies = [1] * len(popular)
    for _ in range(num_redundant):
        most = max(range(len(popular)), key=lambda i: popular[i] / copies[i])
        copies[most] += 1
    parts = sorted((load / n for load, n in zip(popular, copies, strict=True) for _ in range(n)), reverse=True)
    room = len(parts) // num_gpus
    dealt: list[list[float]] = [[] for _ in range(num_gpus)]
    for part in parts:
        min((gpu for gpu in dealt if len(gpu) < room), key=sum).append(part)
    return [sum(gpu) for gpu in dealt]


def skew_of(of_gpus: list[float]) -> float:
    """The busiest over the mean, beyond 1; sums may be rounded below their mean."""
    return max(0.0, max(of_gpus) * len(of_gpus) / sum(of_gpus) - 1)
