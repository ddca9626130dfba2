"""First waves of measured loads that are later than predicted, by the rule of `pdsim compare`: python first_waves.py"""

import csv
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pdsim import simulate
from pdsim.calibration.validate.case import load_case
from pdsim.metrics.records import RequestRecord
from pdsim.study.verdict.cold import ColdWave, cold_wave

STUDIES = Path(__file__).parent.parent
FEWEST = 9
"""Fewest requests of a load that can have a first wave and later requests."""


class Measured(NamedTuple):
    requests: list[RequestRecord]


def waves(study: str) -> Iterator[tuple[str, ColdWave | None]]:
    """The loads of a study that have a table of requests, simulated with warm servers."""
    case = load_case(STUDIES / study)
    for arm in case.arms:
        table = STUDIES / study / "data" / f"requests_{arm.name}.csv.gz"
        if not table.exists():
            continue
        records = simulate(case.scenario(arm, case.seeds[0], ("cost.cold_start={}",))).records
        predicted = {one.request_id: one for one in records.requests}
        with gzip.open(table, "rt") as file:
            rows = [row for i, row in enumerate(csv.DictReader(file)) if i in predicted]
        if len(rows) >= FEWEST:
            yield arm.name, cold_wave(Measured([_record(predicted[i], row) for i, row in enumerate(rows)]), records)


def _record(predicted: RequestRecord, row: dict[str, str]) -> RequestRecord:
    """The measured times of a request, in ns."""
    sent, first, end = (
        round(1e9 * float(row[next(name for name in names if row.get(name))]))
        for names in (("send_s", "sent_s"), ("first_token_s",), ("end_s",))
    )
    return RequestRecord(
        request_id=predicted.request_id,
        num_prompt_tokens=predicted.num_prompt_tokens,
        num_output_tokens=predicted.num_output_tokens,
        arrival_ns=sent,
        first_token_ns=first,
        end_ns=end,
        outcome="finished",
    )


def main() -> None:
    found = {
        f"{study} {name}": wave
        for study in ("sglang-h200", "sglang-llama", "sglang-h100")
        for name, wave in waves(study)
    }
    print(
        f"of {len(found)} loads, these begin with a wave that is late:\n\n| load | requests | late, ms |\n|---|---|---|"
    )
    for load, wave in found.items():
        if wave is not None:
            print(f"| {load} | {wave.num_requests} | {wave.late_ns / 1e6:.0f} |")


if __name__ == "__main__":
    main()
