"""Whether the default cost finds the better of two layouts.

Pairs are arms of one study that differ in one choice. Where a measured metric differs by more than LEAST, the predicted
metric should differ the same way. Numbers are those of docs/accuracy.csv, without the kernels of the arm's own GPU and,
where there are some, with them. A prediction may also say that the sign is not known, by one of the RULES.
"""

# ruff: noqa: INP001  no package: modules of the site and its tables

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from docs.accuracy import BLIND, METRICS, Number

PAIRS = {
    "radix cache on decode": ("decode-radix-b200", [("baseline", "radix"), ("baseline", "radix-64")]),
    "KV sent as increments": ("incremental-h20", [("main", "incremental")]),
    "prefill/decode or aggregated": ("sglang-h200", [("agg_c32", "c32"), ("agg_q16", "q16")]),
    "the same on A10": ("mooncake-a10", [("case1-2regular", "case1-pd"), ("case2-2regular", "case2-pd")]),
    "tensor-parallel sizes": (
        "sglang-h200",
        [
            *combinations(("c1", "tp2to2_c1", "tp2to1_slice_c1", "tp2to1_staging1g_c1"), 2),
            *combinations(("tp1to2_staging1g_c16", "tp2to1_slice_c16", "tp2to2_c16"), 2),
        ],
    ),
    "decode servers": ("inferencex-tp", [("b200-fp8-8192-1p1d-c64", "b200-fp8-8192-1p4d-c64")]),
    "router": ("sglang-llama", [("2p2d_round_robin_hi", "2p2d_cache_aware_hi")]),
}
LEAST = 0.05
VERDICTS = ("right", "wrong", "said unknown")


class Sign(NamedTuple):
    """A metric of two arms that differ in one choice, with the measured values and the predictions."""

    choice: str
    before: Number
    after: Number

    @property
    def measured(self) -> float:
        """Relative change of the measured value from the first arm to the second."""
        return self.after.measured / self.before.measured - 1

    @property
    def predicted(self) -> float:
        return self.after.predicted / self.before.predicted - 1

    def verdict(self, is_known: Callable[["Sign"], bool]) -> str:
        """One of VERDICTS. is_known: a rule, which says whether the prediction has a sign."""
        if not is_known(self):
            return "said unknown"
        return "right" if self.measured * self.predicted > 0 else "wrong"


def holds_at_both_ends(sign: Sign) -> bool:
    """True if the sign is the same with the fastest and with the slowest step times of both arms, as `pdsim ask` and
    `pdsim compare` say.
    """
    (before, after), predicted = (sign.before, sign.after), sign.predicted
    return all(predicted * (last - first) > 0 for first, last in ((before.low, after.low), (before.high, after.high)))


def ranges_are_apart(sign: Sign) -> bool:
    """True if the ranges of the two arms do not overlap, so that the sign holds even if only one arm is slow."""
    return sign.after.low > sign.before.high or sign.before.low > sign.after.high


RULES: Mapping[str, Callable[[Sign], bool]] = {
    "always": lambda _: True,
    "if it holds at both ends of the range": holds_at_both_ends,
    "if the two ranges do not overlap": ranges_are_apart,
}
"""For each rule, by its name: a function that says whether a prediction has a sign."""


def signs(numbers: Sequence[Number]) -> Iterator[Sign]:
    for choice, (study, pairs) in PAIRS.items():
        found = {(one.known, one.metric, one.arm): one for one in numbers if one.study == study}
        for known in BLIND:
            for metric in METRICS:
                for pair in pairs:
                    arms = [found[known, metric, arm] for arm in pair if (known, metric, arm) in found]
                    if len(arms) == len(pair) and abs((made := Sign(choice, *arms)).measured) > LEAST:
                        yield made


def counted(numbers: Sequence[Number]) -> list[list[str]]:
    """Rows of a table, one for each rule: how many signs are right, how many are wrong, and how many are not known."""
    rows = []
    for rule, is_known in RULES.items():
        counts = Counter(sign.verdict(is_known) for sign in signs(numbers))
        rows.append([rule, *(str(counts[verdict]) for verdict in VERDICTS)])
    return rows
