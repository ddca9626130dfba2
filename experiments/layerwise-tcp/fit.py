"""Profile of the layerwise-tcp study: python experiments/layerwise-tcp/fit.py

Four numbers from what the pull request says of synchronous sending alone: TTFT of 3,500 and 16,000 tokens at
concurrency 1, and for 16,000 tokens that compute reaches submission after 838 ms and the transfer's tail takes 167 ms.
"""

from pathlib import Path

from pdsim.scenario.building.cluster import build
from pdsim.scenario.loading import load_scenario

HERE = Path(__file__).parent
TTFT_MS = {3_500: 370.74, 16_000: 1074.93}
SUBMISSION_MS, TAIL_MS = 838.0, 167.0


def sent_bytes(num_tokens: int) -> int:
    """KV and state of one prompt on one rank."""
    scenario = load_scenario(HERE / "scenario.yaml", ["cost=roofline"])
    interconnect = build(scenario).interconnect
    assert interconnect is not None
    wire = interconnect.wire
    return wire.page_bytes * -(-num_tokens // scenario.page_size) + wire.state_bytes


def main() -> None:
    bandwidth = sent_bytes(16_000) / (TAIL_MS / 1e3)
    fixed_ms = TTFT_MS[16_000] - SUBMISSION_MS - TAIL_MS
    short_ms = TTFT_MS[3_500] - fixed_ms - 1e3 * sent_bytes(3_500) / bandwidth
    per_token_us = 1e3 * (SUBMISSION_MS - short_ms) / (16_000 - 3_500)
    base_ms = short_ms - 3_500 * per_token_us / 1e3
    text = f"""name: qwen3.5-397b-tp8
cost:
  use: affine
  prefill_base: {base_ms:.2f} ms
  prefill_per_token: {per_token_us:.3f} us
  decode_base: 20 ms
  measured:
    model: qwen3.5-397b-a17b
    weight_dtype: fp8
    kv_dtype: fp8
    tp: [8, 8]
    prefill_new_tokens: [3500, 16000]
provenance:
  fitted_on: "TTFT of 3,500 and 16,000 tokens at concurrency 1, asynchronous sending off; submission at 838 ms"
  not_fitted: "decode_base: nothing is decoded here"
  command: python experiments/layerwise-tcp/fit.py
  date: '2026-11-21'
"""
    (HERE / "profile.yaml").write_text(text, encoding="utf-8")
    print(text)
    print(f"network.bandwidth {bandwidth / 1e6:.1f} MB/s a rank, front_end.latency_out {fixed_ms:.1f} ms")


if __name__ == "__main__":
    main()
