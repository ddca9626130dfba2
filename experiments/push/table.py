"""Slices, staging and push beside each other, real and simulated: python experiments/push/table.py"""

from pathlib import Path
from statistics import fmean

from pdsim.calibration.validate.suite import load_suite
from pdsim.metrics.records import RunRecords
from pdsim.metrics.run_folder import SUMMARY, read_records, read_summary
from pdsim.sim.simulation import simulate

SUITE = load_suite(str(Path(__file__).parent), Path())


def mean_transfer_ms(records: RunRecords) -> float:
    """Time from the end of prefill until decode has the KV."""
    ended = [row for row in records.requests if row.outcome == "finished"]
    return fmean((row.transfer_end_ns or 0) - (row.prefill_end_ns or 0) for row in ended) / 1e6


def main() -> None:
    print("| variant | requests/s | mean TTFT, ms | transfer, ms | simulated transfer, ms |")
    print("|---|---|---|---|---|")
    for variant in SUITE.variants:
        folder = SUITE.runs / variant.name
        if not (folder / SUMMARY).is_file():
            continue
        summary, simulated = read_summary(folder), ""
        profile = variant.profile or SUITE.profile
        if profile is not None and profile.is_file():
            simulated = f"{mean_transfer_ms(simulate(SUITE.scenario(variant)).records):.2f}"
        measured = f"{summary['request_throughput']:.2f} | {summary['mean_ttft_ms']:.1f}"
        print(f"| `{variant.name}` | {measured} | {mean_transfer_ms(read_records(folder)):.2f} | {simulated} |")


if __name__ == "__main__":
    main()
