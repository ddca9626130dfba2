"""A profile of rows that `pdsim observe` gave predicts the loads that nothing was fitted to."""

import json
from contextlib import suppress
from pathlib import Path
from statistics import median

import pytest

from pdsim.cli import main
from pdsim.scenario.yaml_file import read_yaml

STUDY = Path(__file__).parents[2] / "experiments" / "observed-sglang-h100"


@pytest.mark.parametrize("load", ["observed", "again"])
def test_an_observed_server_is_predicted(load, tmp_path, capsys):
    profile = tmp_path / "profile.yaml"
    with suppress(SystemExit):
        main(["calibrate", str(STUDY / "observed" / "rows.csv"), "-o", str(profile)])
    capsys.readouterr()
    arguments = ["--observed", str(STUDY / load), "--profile", str(profile)]
    with suppress(SystemExit):
        main(["validate", str(STUDY / "server.yaml"), *arguments, "--json"])
    for arm in json.loads(capsys.readouterr().out):
        assert not arm["fitted"]
        errors = {metric: abs(found["error"]) for metric, found in arm["metrics"].items()}
        assert errors["request_throughput"] < 0.12
        assert errors["mean_tpot_ms"] < 0.12
        assert errors["median_itl_ms"] < 0.07


@pytest.mark.parametrize("observation", ["observed", "again"])
def test_an_observation_predicts_its_own_loads(observation, tmp_path, capsys):
    profile = tmp_path / "profile.yaml"
    with suppress(SystemExit):
        main(["calibrate", str(STUDY / observation / "rows.csv"), "-o", str(profile)])
    capsys.readouterr()
    with suppress(SystemExit):
        observed = ["--observed", str(STUDY / observation), "--profile", str(profile)]
        main(["validate", str(STUDY / "server.yaml"), *observed, "--json"])
    names = ("request_throughput", "mean_ttft_ms", "mean_tpot_ms", "median_itl_ms", "mean_e2e_latency_ms")
    arms = json.loads(capsys.readouterr().out)
    assert median(abs(arm["metrics"][name]["error"]) for arm in arms for name in names) < 0.08


def test_a_coefficient_that_no_row_of_a_fold_tells_is_nothing(tmp_path):
    profile = tmp_path / "profile.yaml"
    with suppress(SystemExit):
        main(["calibrate", str(STUDY / "again" / "rows.csv"), "-o", str(profile)])
    told = read_yaml(profile)["provenance"]["fitted"]["prefill"]["held_out_error"]
    assert float(told.partition("%")[0]) < 100, told
