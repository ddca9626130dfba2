"""When does a push beat staging? python experiments/validation-h200-tp/push.py

A push is one kernel that writes pages into a peer's pages: no descriptor for each slice, no staging memory.
"""

from pathlib import Path
from statistics import fmean

from pdsim import load_scenario, simulate

HERE = Path(__file__).resolve().parent
SCENARIO = HERE.parent / "validation-h200" / "scenario.yaml"
WAYS = {
    "slices": (),
    "staging": ("network.staging={ring: 4 GiB}",),
    "push": ("network.descriptor_latency=0 ns", "network.bandwidth=370 GB/s"),
}
SIDES = {"TP2 to TP1": ("tp2to1", "prefill.tp=2"), "TP1 to TP2": ("tp1to2", "decode.tp=2")}
LOADS = ((256, 1, 50), (1024, 1, 50), (1024, 16, 240), (4096, 4, 60), (8192, 1, 20))
"""Tokens of a prompt, clients, requests."""
SEEDS = range(5)


def mean_ttft_ms(side: str, load: tuple[int, int, int], way: str) -> float:
    profile, change = SIDES[side]
    num_tokens, num_clients, num_requests = load
    from_profile = f"profile: {HERE / profile}.yaml"
    changes = [
        *(f"{section}={{{from_profile}}}" for section in ("cost", "front_end")),
        f"network={{{from_profile}, transport: mooncake-nvlink}}",
        f"workload.input_tokens={num_tokens}",
        f"workload.num_requests={num_requests}",
        f"client.concurrency={num_clients}",
        change,
        *WAYS[way],
    ]
    return fmean(simulate(load_scenario(SCENARIO, [*changes, f"seed={i}"])).summary()["mean_ttft_ms"] for i in SEEDS)


def main() -> None:
    print(f"| | tokens | clients | {', ms | '.join(WAYS)}, ms |")
    print("|---" * (3 + len(WAYS)) + "|")
    for side in SIDES:
        for load in LOADS:
            cells = [side, f"{load[0]:,}", str(load[1]), *(f"{mean_ttft_ms(side, load, way):,.1f}" for way in WAYS)]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
