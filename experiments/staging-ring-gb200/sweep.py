"""Throughput by concurrency, and by the size of the staging ring: python experiments/staging-ring-gb200/sweep.py

A request of 1,000 tokens takes 62.9 MB of one decode rank's ring. Too small a ring makes
cells wait for the watermark, which moves only when decode's loop gets to it.
"""

from pathlib import Path

from pdsim import load_scenario, simulate
from pdsim.sim.result import RunResult

HERE = Path(__file__).parent
RINGS = ("64 MiB", "128 MiB", "256 MiB", "512 MiB", "1 GiB", "2 GiB", "4 GiB", "8 GiB")
CONCURRENCIES = (8, 32, 128, 256, 512, 1024, 2048)
NUM_GPUS = 8
LAYOUTS = {
    "slices": (),
    "staging": ("network.staging={ring: 4 GiB}",),
    "TP4 to TP4": ("decode.dp=1",),
    "DEP4 to DEP4": ("prefill.dp=4",),
}
LOADS = {
    "1 prefill instance, 1,000 tokens in, 1,000 out, 1,024 at a time": (1, 1000, 1000, 1024),
    "12 prefill instances, 1,000 tokens in, 60 out, 1,024 at a time": (12, 1000, 60, 1024),
}


def run(load: tuple[int, int, int, int], *changes: str) -> RunResult:
    instances, input_tokens, output_tokens, concurrency = load
    settings = (
        f"prefill.instances={instances}",
        f"workload.input_tokens={input_tokens}",
        f"workload.output_tokens={output_tokens}",
        f"client.concurrency={concurrency}",
        f"workload.num_requests={3 * concurrency}",
        "prefill.chunked_prefill_tokens=4096",
    )
    return simulate(load_scenario(HERE / "scenario.yaml", [*settings, *changes]))


def row(name: str, result: RunResult) -> str:
    summary = result.summary()
    if not summary["completed"]:
        return f"{name:>22} {'every request is larger than the ring':>10}"
    waits = [t.start_ns - t.queued_ns for t in result.records.transfers if t.num_pages]
    return (
        f"{name:>22} {summary['output_throughput']:10,.0f} {summary['mean_ttft_ms'] / 1e3:10.2f} "
        f"{summary['mean_tpot_ms']:8.2f} {sum(waits) / len(waits) / 1e6:14.1f}"
    )


def print_curves() -> None:
    """Output tokens per second and GPU of each layout, by the number of requests at a time."""
    print("output tokens/s a GPU, 1,000 tokens in, 1,000 out")
    print(f"{'at a time':>10}" + "".join(f"{name:>14}" for name in LAYOUTS))
    for concurrency in CONCURRENCIES:
        rates = [
            run((1, 1000, 1000, concurrency), *changes).summary()["output_throughput"] for changes in LAYOUTS.values()
        ]
        print(f"{concurrency:>10}" + "".join(f"{rate / NUM_GPUS:14,.0f}" for rate in rates))


def main() -> None:
    print_curves()
    for title, load in LOADS.items():
        print(f"\n{title}")
        print(f"{'':>22} {'tokens/s':>10} {'TTFT, s':>10} {'TPOT, ms':>8} {'unit waits, ms':>14}")
        print(row("slices", run(load)))
        for ring in RINGS:
            print(row(f"ring of {ring}", run(load, f"network.staging={{ring: {ring}}}")))
        print(row("TP4 to TP4", run(load, "decode.dp=1")))
        print(row("DEP4 to DEP4", run(load, "prefill.dp=4")))


if __name__ == "__main__":
    main()
