"""Every study with bounds but decode-radix-b200, which has its own file: each error is within its bound."""

import re
from pathlib import Path
from runpy import run_path
from statistics import median

import pytest

from docs.tables import met
from pdsim.calibration.validate.case import MEASURED, load_case
from tests.studies.reports import report

EXPERIMENTS = Path("experiments")
STUDIES = [
    path.parent.name
    for path in sorted(EXPERIMENTS.glob(f"*/{MEASURED}"))
    if path.parent.name != "decode-radix-b200" and re.search(r"\bwithin:", path.read_text())
]

MISSED = {
    "incremental-h20": {
        ("incremental", "mean_ttft_ms"): "the first wave waits for prefill, whose speed is the roofline's default",
    },
    "infersim-h20": {
        ("qwen3-30b-a3b-decode-roofline", "mean_tpot_ms"): "25 tokens of an expert take a tile of 64",
    },
    "vllm-rtx": {
        ("llama-8b-4090", "mean_ttft_ms"): "prompts are not computed in decode steps, and 16 requests are retracted",
    },
    "inferencex-tp": {
        ("b200-fp8-1024-1p1d-c4", "mean_ttft_ms"): "what a request takes outside the GPU is fitted on GB200",
        ("b200-fp8-8192-1p1d-c32", "mean_ttft_ms"): "of what a request takes outside the GPU, a part is taken in turn",
        ("b200-fp8-8192-1p1d-c64", "mean_ttft_ms"): "the same",
        ("b200-fp8-8192-1p4d-c64", "mean_ttft_ms"): "the same",
        ("gb200-fp4-1024-1p2d-c32", "mean_ttft_ms"): "the same",
    },
    "sglang-h200": {
        ("tp1to2_staging1g_c16", "mean_ttft_ms"): "a cold server stalls between two waves; here behind them",
        ("tp1to2_warm", "request_throughput"): "another host with slower launches, and staged KV merges late",
        ("tp1to2_warm", "mean_ttft_ms"): "the same",
        ("tp1to2_long", "request_throughput"): "the same",
        ("tp1to2_long", "mean_ttft_ms"): "the same",
    },
}
"""Bounds of predicted arms that are not met, and why; each study's page says more."""


@pytest.mark.parametrize("study", STUDIES)
def test_every_bound_is_met(study):
    missed = {
        (name, metric): f"{found['error']:+.1%}, asked for {arm['within'][metric]:.0%}"
        for name, arm in report(study).items()
        for metric, found in arm["metrics"].items()
        if not met(arm, metric)
    }
    assert missed.keys() == MISSED.get(study, {}).keys(), missed


def test_public_points_below_saturation_are_within_20_percent_at_the_median():
    """Of TTFT and of TPOT, over the predicted rows with fewer than 32 requests in flight, or on GB200."""
    rows = report("inferencex-tp")
    for metric in ("mean_ttft_ms", "mean_tpot_ms"):
        errors = [
            abs(row["metrics"][metric]["error"])
            for name, row in rows.items()
            if name not in {"gb200-fp4-1024-1p2d-c4", "b200-fp8-8192-1p1d-c4"}
            and (name.startswith("gb200") or name.endswith("-c4"))
        ]
        assert len(errors) == 7
        assert median(errors) < 0.20


def test_a_server_on_a_gpu_without_rows_is_predicted_at_the_median():
    """By a profile scaled from another GPU; all loads are predicted, with bursts, traces and retraction among them."""
    arms = report("sglang-h100").values()
    for metric, most in {
        "request_throughput": 0.01,
        "mean_ttft_ms": 0.15,
        "p99_ttft_ms": 0.06,
        "mean_tpot_ms": 0.05,
    }.items():
        assert median(abs(arm["metrics"][metric]["error"]) for arm in arms) < most, metric


def test_aggregated_points_are_within_8_percent_of_tpot_at_the_median():
    """By defaults alone. TTFT has what lies before the GPU, of which those rows say nothing. TPOT of one row chose how
    many drafts are accepted.
    """
    rows = [row["metrics"] for row in report("aiconfigurator-points").values()]
    errors = [abs(metrics["mean_tpot_ms"]["error"]) for metrics in rows if "mean_tpot_ms" in metrics]
    assert len(errors) == len(rows) - 1 == 12
    assert median(errors) < 0.08


def test_the_metrics_of_vllm_are_those_of_its_requests():
    metrics = run_path("experiments/vllm-rtx/measured.py")["metrics"]
    data = {"llama-8b-pro6000": "", "llama-8b-4090": "", "qwen3-32b-pro6000-tp2": "qwen3-32b-pro6000"}
    for arm in load_case(EXPERIMENTS / "vllm-rtx").arms:
        assert arm.measured == pytest.approx(metrics(data[arm.name] or arm.name), rel=1e-4)


LOADED = pytest.mark.xfail(
    reason="-12.0 % against -7.2 %: no row says how transfers slow forwards here, and it is not identifiable",
    raises=AssertionError,
    strict=True,
)


@pytest.mark.parametrize(
    ("load", "measured"), [("3500-c1", -0.146), pytest.param("3500-rate", -0.072, marks=LOADED), ("16000-c1", -0.150)]
)
def test_what_sending_layer_by_layer_brings(load, measured):
    """Within 3 points of the published change of mean TTFT."""
    arms = report("layerwise-tcp")
    off, on = (arms[f"{way}-{load}"]["metrics"]["mean_ttft_ms"]["simulated"] for way in ("off", "on"))
    assert on / off - 1 == pytest.approx(measured, abs=0.03)
