"""What became of a cluster: its runs read back, whole or ended when they missed the SLO."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pyarrow import parquet

from pdsim.study.planning.slo import Slo

SATURATED = "cannot take the load"


@dataclass(frozen=True)
class Outcome:
    """Of all seeds together."""

    meets: bool
    reason: str
    """Why it does not; empty if it does."""
    num_ended: int
    """Requests that had ended when it was sure."""
    tails_ms: Mapping[str, float]
    """Each term's percentile, by its name; empty if the run was not whole."""
    strain: float
    """The largest of them over its limit; infinite if they are not known."""

    def to_json(self) -> dict[str, Any]:
        return {"meets": self.meets, "reason": self.reason, "tails_ms": dict(self.tails_ms)}


def read_outcome(paths: list[Path], slo: Slo, *, is_record: bool) -> Outcome:
    """From the shards of a point, one for each seed. Generated arrivals must not leave a growing queue;
    a record, with its own times, is judged as it was.
    """
    rows = [parquet.read_table(path).to_pylist()[0] for path in paths]
    num_ended = sum(row["completed"] or 0 for row in rows)
    bad = [row for row in rows if row["status"] != "ok"]
    if bad:
        return Outcome(meets=False, reason=bad[0]["message"], num_ended=num_ended, tails_ms={}, strain=float("inf"))
    tails = {str(term): fmean(term.tail_ms(row) for row in rows) for term in slo.terms}
    strain = max(tails[str(term)] / term.limit_ms for term in slo.terms)
    missed = [f"{term} is above {term.limit_ms:g} ms" for term in slo.terms if tails[str(term)] > term.limit_ms]
    reason = SATURATED if not is_record and any(row["saturated"] for row in rows) else " and ".join(missed)
    return Outcome(meets=not reason, reason=reason, num_ended=num_ended, tails_ms=tails, strain=strain)
