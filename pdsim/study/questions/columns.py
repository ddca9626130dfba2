"""The numbers that tables and figures of answers show."""

from collections.abc import Callable
from dataclasses import dataclass

from pdsim.study.interval import Estimate
from pdsim.study.questions.study import SLO, Study


@dataclass(frozen=True)
class Column:
    title: str
    field: str = ""
    """Of a sweep's row; empty: see read."""
    scale: float = 1.0
    is_latency: bool = True
    """Says nothing of a saturated arm."""
    per: str = ""
    """Another field, by which it is divided."""
    read: Callable[[Study, str], Estimate] | None = None
    digits: int = 3

    def value(self, study: Study, label: str) -> Estimate | None:
        point = study[label]
        if study.error(label) or (self.is_latency and point.is_saturated):
            return None
        if self.read is not None:
            return self.read(study, label)
        if any(replication.row[self.field] is None for replication in point.replications):
            return None
        found = point.metric(self.field)
        scale = self.scale / (point.metric(self.per).mean or 1.0) if self.per else self.scale
        return Estimate(found.mean * scale, None if found.half_width is None else found.half_width * scale)


def _attained(study: Study, arm: str) -> Estimate:
    found = study[arm].attainment(SLO)
    return Estimate(100 * found.mean, None if found.half_width is None else 100 * found.half_width)


def _goodput(study: Study, arm: str) -> Estimate:
    return study[arm].goodput_per_gpu(SLO)


COLUMNS = {
    "attained": Column("meet SLO, %", read=_attained, is_latency=False, digits=4),
    "goodput": Column("goodput, requests/s, per GPU", read=_goodput, is_latency=False),
    "rate": Column("requests/s", "request_throughput", is_latency=False),
    "tokens": Column("output tokens/s", "output_throughput", is_latency=False),
    "ttft": Column("TTFT, mean, ms", "mean_ttft_ms"),
    "median_ttft": Column("TTFT, median, ms", "median_ttft_ms"),
    "tail_ttft": Column("TTFT, {p}, ms", read=lambda study, arm: study.tail_ms(arm, "ttft")),
    "tpot": Column("TPOT, mean, ms", "mean_tpot_ms"),
    "tail_tpot": Column("TPOT, {p}, ms", read=lambda study, arm: study.tail_ms(arm, "tpot")),
    "itl": Column("ITL, mean, ms", "mean_itl_ms"),
    "latency": Column("latency, mean, ms", "mean_e2e_latency_ms"),
    "running": Column("decoding at once", "mean_running_requests", is_latency=False),
    "retractions": Column("retractions", "retractions", is_latency=False),
    "prefill_hits": Column("hits on prefill, %", "prefill_cache_hit_rate", 100, is_latency=False),
    "decode_hits": Column("hits on decode, %", "decode_cache_hit_rate", 100, is_latency=False),
    "gigabytes": Column("KV sent, GB", "transfer_bytes", 1e-9, is_latency=False),
    "descriptors": Column("descriptors a request", "descriptors", is_latency=False, per="completed"),
    "admission": Column("wait for decode, ms", "mean_decode_bootstrap_ms"),
    "queue": Column("wait for prefill, ms", "mean_prefill_waiting_ms"),
    "forward": Column("forward, ms", "mean_prefill_forward_ms"),
    "transfer": Column("exposed transfer, ms", "mean_prefill_transfer_kv_cache_ms"),
    "merge": Column("wait for merge, ms", "mean_decode_transferred_ms"),
    "outside": Column("front end, ms", "mean_front_end_ms"),
}
"""In titles, {p} is the percentile that is to meet the SLO."""
