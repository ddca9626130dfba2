"""Files of small sweeps for tests."""

from pathlib import Path

SCENARIO = """\
model: qwen3-0.6b
page_size: 4
prefill: {gpu: h100, pool_tokens: 4096}
decode: {gpu: h100, pool_tokens: 4096}
router: round_robin
cost: roofline
workload: {use: random_lengths, num_requests: 20, input_tokens: 60, output_tokens: {use: uniform, low: 2, high: 9}}
client: {use: open_loop, arrivals: {use: poisson, rate: 20/s}}
"""

SWEEP = """\
scenario: base.yaml
seeds: [1, 2]
grid:
  page_size: [4, 8]
  decode.radix_cache: [false, true]
slos: {chat: ttft < 1 s for 90 %}
"""


def write_sweep(folder: Path, sweep: str = SWEEP, scenario: str = SCENARIO) -> Path:
    (folder / "base.yaml").write_text(scenario)
    path = folder / "sweep.yaml"
    path.write_text(sweep)
    return path


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "points").glob("*.json"))}
