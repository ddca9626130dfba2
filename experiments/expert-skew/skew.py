"""What a busy GPU of experts costs, and what copies of popular experts give back: python skew.py"""

from pathlib import Path

from pdsim import load_scenario, simulate
from pdsim.scenario.building.sizing import layout_of

SCENARIO = Path(__file__).parent / "scenario.yaml"
ARMS = [(0.0, None), (0.5, None), (1.0, None), (2.0, None), (1.0, 0), (1.0, 8), (1.0, 32)]
"""Skews and redundant experts."""


def main() -> None:
    print("| skew | redundant experts | left | requests/s | mean TPOT, ms | mean TTFT, ms | weights of a GPU, GB |")
    print("|---|---|---|---|---|---|---|")
    for skew, redundant in ARMS:
        fields = {"expert_skew": skew, "redundant_experts": "null" if redundant is None else redundant}
        changes = [f"{role}.{name}={value}" for role in ("prefill", "decode") for name, value in fields.items()]
        scenario = load_scenario(SCENARIO, changes)
        layout, found = layout_of(scenario, "decode"), simulate(scenario).summary()
        latencies = f"{found['mean_tpot_ms']:.1f} | {found['mean_ttft_ms']:,.0f}"
        said = "none" if redundant is None else redundant
        print(
            f"| {skew:g} | {said} | {layout.expert_skew:.2f} | {found['request_throughput']:.2f} | {latencies} "
            f"| {layout.weight_bytes_per_rank / 1e9:.0f} |"
        )


if __name__ == "__main__":
    main()
