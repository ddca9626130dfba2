"""pdreal campaign: what it would call, and the folder that it leaves."""

import json
import shutil
import tarfile
from pathlib import Path
from subprocess import CompletedProcess

import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install 'pdsim[real]'")
pytest.importorskip("torch", reason="needs torch: pip install 'pdsim[real]'")

from pdreal.cli import main

from pdsim.cli import matrix as matrix_commands
from pdsim.cli.matrix import prepare, steps
from pdsim.scenario.yaml_file import ConfigError, read_yaml

EXPERIMENTS = Path("experiments")


def commands(suite, num_gpus):
    return {step.makes: " ".join(step.command) for step in steps(suite, rounds=1, num_gpus=num_gpus)}


def test_each_tensor_parallel_size_has_rows_and_each_pair_a_profile(tmp_path):
    suite = prepare("validation-h200-tp", tmp_path / "b200", ["decode.gpu=b200", "prefill.gpu=b200"], None)
    made = commands(suite, num_gpus=2)
    assert "--tp 2 --only prefill,decode " in made["data/rows-tp2.csv"] + " "
    assert "prefill,decode,host" in commands(suite, num_gpus=4)["data/rows-tp2.csv"]
    profiles = {(variant.profile or suite.profile).name for variant in suite.variants}
    assert profiles == {name for name in made if name.startswith("profile")}
    assert all("--gpu b200" in made[profile] for profile in profiles)


def test_ranks_are_those_of_the_changed_scenario(tmp_path):
    suite = prepare("validation-h200-tp", tmp_path / "mine", ["prefill.tp=2", "decode.tp=2"], None)
    assert {(variant.profile or suite.profile).name for variant in suite.variants} == {"profile.yaml"}
    assert "--prefill-tp 2 --decode-tp 2" in commands(suite, num_gpus=4)["profile.yaml"]


def test_a_matrix_is_copied_with_its_own_settings_and_without_the_results_of_others(tmp_path):
    """The scenario is that of another matrix, which has results."""
    shared, own, out = (tmp_path / name for name in ("shared", "own", "mine"))
    for folder in (shared, own):
        folder.mkdir()
    shutil.copy(EXPERIMENTS / "validation-cpu" / "scenario.yaml", shared)
    for name in ("matrix.yaml", "profile.yaml", "errors.txt", "trace.jsonl"):
        (shared / name).write_text("real: {timeout: 1 s}\nwithin: {mean: 1 %}\n")
    (own / "hosts.yaml").write_text("hosts: {a: {address: 10.0.0.1}}\n")
    real = {"timeout": "7 s", "hosts": "hosts.yaml"}
    matrix = {"scenario": "../shared/scenario.yaml", "real": real, "within": {"mean": "15 %"}, "variants": {"c8": []}}
    (own / "matrix.yaml").write_text(json.dumps(matrix))
    suite = prepare(str(own), out, [], None)
    assert (suite.real.timeout, suite.tolerances.mean) == (7 * 10**9, 0.15)
    assert {path.name for path in out.iterdir()} == {
        "scenario.yaml",
        "matrix.yaml",
        "hosts.yaml",
        "trace.jsonl",
        "data",
    }
    for folder in (shared, own):
        with pytest.raises(ConfigError, match="is the matrix itself"):
            prepare(str(own), folder, [], None)


def test_whole_experts_have_rows_of_their_own(tmp_path):
    sizes = [f"{role}.{name}=2" for role in ("prefill", "decode") for name in ("tp", "ep")]
    suite = prepare("validation-cpu", tmp_path / "mine", ["model=tiny-qwen3-moe", *sizes], None)
    made = commands(suite, num_gpus=0)
    assert "--tp 2 --only prefill,decode,host --ep 2" in made["data/rows-tp2ep2.csv"]
    assert "--prefill-tp 2 --decode-tp 2 --prefill-ep 2 --decode-ep 2" in made["profile.yaml"]


def test_hosts_are_measured_and_run_on(tmp_path):
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text("hosts:\n  a: {address: 10.0.0.1}\n  b: {address: 10.0.0.2, start: ssh b pdreal host}\n")
    suite = prepare("validation-cpu", tmp_path / "mine", [], hosts)
    assert "--hosts hosts.yaml" in commands(suite, num_gpus=0)["data/rows.csv"]
    assert suite.real.flags[-2:] == ("--hosts", str(tmp_path / "mine" / "hosts.yaml"))


def test_a_campaign_goes_on_where_it_was_and_packs_all(tmp_path, capsys):
    """Its rows and its run are there: it calibrates, simulates and packs."""
    source = EXPERIMENTS / "validation-cpu"
    matrix = read_yaml(source / "matrix.yaml") | {"variants": {"c8": []}}
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "matrix.yaml").write_text(json.dumps(matrix))
    shutil.copy(source / "scenario.yaml", tmp_path / "cpu")
    out = tmp_path / "mine"
    shutil.copytree(source / "data" / "c8", out / "data" / "c8")
    shutil.copy(source / "data" / "rows.csv", out / "data")
    (out / "matrix.yaml").touch()  # as a campaign that was interrupted leaves it
    with pytest.raises(SystemExit) as stop:
        main(["campaign", str(tmp_path / "cpu"), "--out", str(out)])
    assert stop.value.code == 0
    said = capsys.readouterr()
    assert "has data/rows.csv" in said.err
    assert "errors over all variants" in said.out
    provenance = read_yaml(out / "provenance.yaml")
    assert provenance["model"] == "tiny-qwen3"
    assert [command.split()[1] for command in provenance["commands"]] == ["measure", "calibrate", "validate"]
    assert all(command in (out / "README.md").read_text() for command in provenance["commands"])
    with tarfile.open(tmp_path / "mine.tar.gz") as packed:
        names = set(packed.getnames())
    kept = ("README.md", "matrix.yaml", "scenario.yaml", "profile.yaml", "data/rows.csv", "data/c8/summary.json")
    assert {f"mine/{name}" for name in kept} <= names


def test_a_campaign_fails_with_its_validation_and_packs_what_there_is(tmp_path, capsys, monkeypatch):
    out = tmp_path / "mine"
    (out / "data").mkdir(parents=True)
    shutil.copy(EXPERIMENTS / "validation-cpu" / "data" / "rows.csv", out / "data")
    for name in ("matrix.yaml", "profile.yaml"):
        (out / name).touch()
    told = CompletedProcess([], 1, stdout="errors over all variants but one\n")
    monkeypatch.setattr(matrix_commands.subprocess, "run", lambda *_, **__: told)
    with pytest.raises(SystemExit) as stop:
        main(["campaign", "validation-cpu", "--out", str(out)])
    assert stop.value.code == 1
    said = capsys.readouterr()
    assert "errors over all variants but one" in said.out
    assert "pdsim validate ended with exit code 1" in said.err
    assert (tmp_path / "mine.tar.gz").is_file()


def test_a_campaign_repeats_its_validation_alone(tmp_path, monkeypatch):
    """A validation that failed fails again, though errors.txt has what it printed."""
    ran = []
    monkeypatch.setattr(matrix_commands, "_run_step", lambda step, _: ran.append(step.makes) or 1)
    out = tmp_path / "mine"
    (out / "data").mkdir(parents=True)
    shutil.copy(EXPERIMENTS / "validation-cpu" / "data" / "rows.csv", out / "data")
    for name in ("matrix.yaml", "profile.yaml", "errors.txt"):
        (out / name).touch()
    _, exit_code = matrix_commands.carry_out("validation-cpu", out, [], None, rounds=1, num_gpus=0, tell=lambda _: None)
    assert (ran, exit_code) == (["errors.txt"], 1)


def test_a_step_that_fails_ends_the_campaign(tmp_path, capsys):
    out = tmp_path / "mine"
    (out / "data").mkdir(parents=True)
    (out / "data" / "rows.csv").write_text("kind\n")
    (out / "matrix.yaml").touch()
    with pytest.raises(SystemExit) as stop:
        main(["campaign", "validation-cpu", "--out", str(out)])
    assert stop.value.code == 2
    assert "calibrate" in capsys.readouterr().err
    assert not (out / "profile.yaml").exists()


def test_a_matrix_that_is_not_there_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["campaign", "validation-h20", "--out", str(tmp_path / "mine")])
    assert stop.value.code == 2
    assert "no matrix 'validation-h20' (did you mean 'validation-h200'?)" in capsys.readouterr().err
    assert not (tmp_path / "mine").exists()
