"""`pdsim observe` against a real server: opt in with its address, for the three minutes that it takes."""

import os

import pytest

from pdsim.calibration.observe.probes import totals
from pdsim.calibration.observe.server_client import _RUNNING, ServerClient
from pdsim.cli import main
from pdsim.scenario.yaml_file import read_yaml

URL = os.environ.get("PDSIM_OBSERVE_URL", "")
BUDGET = ("--concurrency", "4", "--requests", "300", "--longest-prompt", "1024", "--minutes", "3")

pytestmark = pytest.mark.skipif(not URL, reason="set PDSIM_OBSERVE_URL to the address of SGLang, vLLM or llama.cpp")


def test_a_server_is_measured_and_fitted(tmp_path, capsys):
    for words in (
        ("observe", URL, "-o", tmp_path / "observed", *BUDGET),
        ("calibrate", tmp_path / "observed" / "rows.csv", "-o", tmp_path / "profile.yaml"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, words)])
        assert not ended.value.code, capsys.readouterr().err
    assert read_yaml(tmp_path / "profile.yaml")["cost"]["decode"]


def test_its_metrics_have_the_names_that_are_looked_for():
    server = ServerClient(URL)
    told = server.describe()
    if not told["metrics"]:
        pytest.skip(f"{told['server']} has no /metrics")
    server.learn_sizes()
    server.complete(server.text(16), 4)
    metrics = server.metrics()
    assert _RUNNING.search(metrics)
    if told["server"] in ("sglang", "vllm"):
        stages = {stage for stage, _ in totals(metrics)}
        assert stages >= {"server_ttft", "server_e2e_latency", "prefill_waiting"}
