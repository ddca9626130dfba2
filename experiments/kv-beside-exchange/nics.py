"""What KV and expert exchanges cost each other on one NIC: python nics.py"""

from pathlib import Path
from statistics import fmean

from pdsim import load_scenario, simulate
from pdsim.system.catalog import searched

FOLDER = Path(__file__).parent
BANDWIDTHS = ("45 GB/s", "22 GB/s", "11 GB/s")
TRANSPORTS = {"own": "own-nics", "the same": "mooncake-rdma"}
OVERLAPS = (False, True)


def main() -> None:
    print("| bandwidth of a NIC | overlap | NICs of KV | KV transfer, ms | forward, ms | TPOT, ms | requests/s |")
    print("|---|---|---|---|---|---|---|")
    for bandwidth in BANDWIDTHS:
        for overlap in OVERLAPS:
            for said, transport in TRANSPORTS.items():
                arm = f"{bandwidth} | {'yes' if overlap else 'no'} | {said}"
                print(f"| {arm} | {row(bandwidth, transport, overlap=overlap)} |")


def row(bandwidth: str, transport: str, *, overlap: bool) -> str:
    changes = [f"network.bandwidth={bandwidth}", f"network.transport={transport}"]
    changes += [f"{role}.two_batch_overlap={str(overlap).lower()}" for role in ("prefill", "decode")]
    result = simulate(load_scenario(FOLDER / "scenario.yaml", changes))
    moving = [sent.end_ns - sent.start_ns for sent in result.records.transfers]
    forwards = [step.duration_ns for step in result.records.steps if step.kind == "prefill"]
    found = result.summary()
    times = f"{fmean(moving) / 1e6:.1f} | {fmean(forwards) / 1e6:,.0f} | {found['mean_tpot_ms']:.1f}"
    return f"{times} | {found['request_throughput']:.1f}"


if __name__ == "__main__":
    with searched(FOLDER / "catalog"):
        main()
