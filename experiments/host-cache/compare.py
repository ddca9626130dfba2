"""SGLang's host cache on one H100 beside its simulation: python compare.py"""

from csv import DictReader
from pathlib import Path
from statistics import fmean, median

from pdsim import load_scenario, simulate
from pdsim.metrics.summary import ttft_ms

HERE = Path(__file__).parent / "sglang_h100"
SERVERS = {
    "none": [],
    "write_through": ["aggregated.host_cache=32 GB"],
    "write_back": ["aggregated.host_cache=16 GB", "aggregated.host_cache_write=write_back"],
}


def measured() -> dict[str, list[float]]:
    """By server: cached tokens, those loaded, mean TTFT, median TTFT of hits, mean TPOT; in ms."""
    with (HERE / "measured.csv").open() as file:
        rows = list(DictReader(file))
    found = {}
    for server in SERVERS:
        own = [row for row in rows if row["server"] == server]
        columns = {name: [float(row[name]) for row in own] for name in rows[0] if name != "server"}
        totals = [sum(columns[name]) for name in ("cached_tokens", "host_tokens")]
        hits_ms = [float(row["ttft_ms"]) for row in own if row["cached_tokens"] != "0"]
        found[server] = [*totals, fmean(columns["ttft_ms"]), median(hits_ms), fmean(columns["tpot_ms"])]
    return found


def simulated(changes: list[str]) -> list[float]:
    result = simulate(load_scenario(HERE / "server.yaml", changes))
    summary = result.summary()
    own = summary["pdsim"]
    cached = own["prefill_cache_hit_rate"] * summary["total_input_tokens"]
    hits_ms = [ttft_ms(request) for request in result.records.requests if request.num_prefill_cached_tokens]
    times_ms = [summary["mean_ttft_ms"], median(hits_ms), summary["mean_tpot_ms"]]
    return [cached, own.get("host_hit_tokens", 0), *times_ms]


def main() -> None:
    print("| host cache | | cached tokens | of these loaded | mean TTFT | median TTFT of hits | mean TPOT |")
    print("|---|---|---|---|---|---|---|")
    for server, real in measured().items():
        for side, values in (("measured", real), ("simulated", simulated(SERVERS[server]))):
            tokens, times_ms = values[:2], values[2:]
            cells = [server, side, *(f"{n:,.0f}" for n in tokens), *(f"{ms:.1f} ms" for ms in times_ms)]
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
