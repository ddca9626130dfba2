"""Prefill forwards of the runs over what the profile says of each: python forwards.py

By the tokens that they compute, in each variant, and by the share of their time in which KV is on its way.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from pdsim.calibration.validate.suite import ValidationSuite, Variant, load_suite
from pdsim.core.messages import PrefillChunk, PrefillStep
from pdsim.metrics.records import RunRecords, StepRecord
from pdsim.metrics.run_folder import read_records

HERE = Path(__file__).parent
_TOKENS = (0, 512, 1024, 2048, 8192)
_SENDING = (-1.0, 0.0, 0.05, 0.15, float("inf"))
_FEWEST = 5
"""Forwards that a cell stands for."""


class Forward(NamedTuple):
    num_tokens: int
    ratio: float
    """Its time in the run over that of the profile."""
    sending: float
    """Time of the transfers beside it, over its own."""


def chunks_of(records: RunRecords) -> Iterator[tuple[StepRecord, PrefillStep]]:
    """What each forward computed: the prompts that had begun and were not done, first come first served."""
    steps = sorted((step for step in records.steps if step.kind == "prefill"), key=lambda step: step.start_ns)
    computed = {request.request_id: request.num_prefill_cached_tokens for request in records.requests}
    for step in steps:
        left, chunks = step.num_tokens, []
        among = [
            request
            for request in records.requests
            if request.prefill_start_ns <= step.start_ns < request.prefill_end_ns
            and computed[request.request_id] < request.num_prompt_tokens
        ]
        for request in sorted(among, key=lambda one: (one.prefill_start_ns, one.admitted_ns)):
            done = computed[request.request_id]
            new = min(left, request.num_prompt_tokens - done)
            if new:
                chunks.append(PrefillChunk(request.request_id, done, new, is_last=True))
            computed[request.request_id], left = done + new, left - new
        assert left == 0, step
        yield step, PrefillStep(0, tuple(chunks))


def forwards_of(suite: ValidationSuite, variant: Variant) -> list[Forward]:
    records = read_records(suite.runs / variant.name)
    model = suite.scenario(variant).cost.prefill.model(None)
    found = []
    for step, work in chunks_of(records):
        begin, end = step.start_ns, step.start_ns + step.duration_ns
        beside_ns = sum(max(0, min(end, one.end_ns) - max(begin, one.start_ns)) for one in records.transfers)
        ratio = step.duration_ns / model.prefill_ns(work, begin)
        found.append(Forward(step.num_tokens, ratio, beside_ns / step.duration_ns))
    return found


def cells(forwards: Sequence[Forward]) -> str:
    """Medians by tokens."""
    told = []
    for least, most in pairwise(_TOKENS):
        ratios = [forward.ratio for forward in forwards if least < forward.num_tokens <= most]
        told.append(f"{median(ratios) - 1:+.0%} of {len(ratios)}" if len(ratios) >= _FEWEST else "")
    return " | ".join(told)


def table(name: str, rows: Sequence[tuple[str, Sequence[Forward]]]) -> None:
    print(
        f"\n| {name} | " + " | ".join(f"{least + 1:,} to {most:,} tokens" for least, most in pairwise(_TOKENS)) + " |"
    )
    print("|---" * len(_TOKENS) + "|")
    for first, forwards in rows:
        print(f"| {first} | {cells(forwards)} |")


def main() -> None:
    suite = load_suite(str(HERE / "matrix.yaml"), HERE.parent)
    runs = {variant.name: forwards_of(suite, variant) for variant in suite.variants}
    table("variant", [(f"`{name}`", forwards) for name, forwards in runs.items()])
    every = [forward for forwards in runs.values() for forward in forwards]
    names = ("none", "to 5 %", "5 to 15 %", "more")
    beside = [[one for one in every if low < one.sending <= high] for low, high in pairwise(_SENDING)]
    table("transfers beside it", list(zip(names, beside, strict=True)))


if __name__ == "__main__":
    main()
