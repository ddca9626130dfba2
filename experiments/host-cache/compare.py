"""SGLang's host cache on one H100 beside its simulation: python compare.py"""

from csv import DictReader
from pathlib import Path
from statistics import fmean

from pdsim import load_scenario, simulate

HERE = Path(__file__).parent / "sglang_h100"
SERVERS = {
    "none": [],
    "write_through": ["aggregated.host_cache={size: 32 GB}"],
    "write_back": ["aggregated.host_cache={size: 16 GB, write: write_back}"],
}


def measured() -> dict[str, list[float]]:
    """Of each server: cached tokens, those loaded from host memory, mean TTFT and TPOT in ms."""
    with (HERE / "measured.csv").open() as file:
        rows = list(DictReader(file))
    found = {}
    for server in SERVERS:
        own = [row for row in rows if row["server"] == server]
        columns = {name: [float(row[name]) for row in own] for name in rows[0] if name != "server"}
        totals = [sum(columns[name]) for name in ("cached_tokens", "host_tokens")]
        found[server] = totals + [fmean(columns[name]) for name in ("ttft_ms", "tpot_ms")]
    return found


def simulated(changes: list[str]) -> list[float]:
    summary = simulate(load_scenario(HERE / "server.yaml", changes)).summary()
    own = summary["pdsim"]
    cached = own["prefill_cache_hit_rate"] * summary["total_input_tokens"]
    return [cached, own.get("host_hit_tokens", 0), summary["mean_ttft_ms"], summary["mean_tpot_ms"]]


def main() -> None:
    print("| host cache | | cached tokens | of these loaded | mean TTFT | mean TPOT |\n|---|---|---|---|---|---|")
    for server, real in measured().items():
        for side, values in (("measured", real), ("simulated", simulated(SERVERS[server]))):
            cached, loaded, ttft_ms, tpot_ms = values
            print(f"| {server} | {side} | {cached:,.0f} | {loaded:,.0f} | {ttft_ms:.1f} ms | {tpot_ms:.2f} ms |")


if __name__ == "__main__":
    main()
