"""Entries of the user's own: where they are found, and what is said of those that are wrong."""

import json
from contextlib import suppress
from dataclasses import asdict
from os import utime
from shutil import rmtree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdsim.cli import main
from pdsim.scenario.yaml_file import read_yaml
from pdsim.study.points.tasks import Planner
from pdsim.study.points.worker import compute
from pdsim.system.catalog import (
    KINDS,
    SHIPPED,
    VARIABLE,
    CatalogError,
    EntryError,
    build,
    file_of,
    load_gpu,
    load_model,
    load_transport,
    lookups_remembered,
    names,
    searched,
)

GPU = """\
memory_bytes: 24e+9
memory_bandwidth: 0.9e+12
flops: {bf16: 100e+12}
nvlink_bandwidth: 32e+9
nic_bandwidth: 25e+9
host_bandwidth: 32e+9
gpus_per_server: 2
sources: {everything: a data sheet}
"""
SCENARIO = """\
model: qwen3-0.6b
prefill: {gpu: mine}
decode: {gpu: mine}
workload: {use: random_lengths, num_requests: 3, input_tokens: 10, output_tokens: 5}
"""
MODEL = (SHIPPED / "models" / "qwen3-0.6b.yaml").read_text()


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """The user's folder, empty."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path / "config" / "pdsim"


def put(folder, kind, name, text):
    path = folder / kind / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("kind", ["models", "gpus", "transports"])
def test_a_copy_of_a_shipped_entry_is_the_same_entry(kind, own):
    load = {"models": load_model, "gpus": load_gpu, "transports": load_transport}[kind]
    for name in names(kind):
        put(own, kind, f"my-{name}", file_of(kind, name).read_text())
        assert asdict(load(f"my-{name}")) == asdict(load(name)) | {"name": f"my-{name}"}


def call(*words):
    """The command's exit code."""
    with pytest.raises(SystemExit) as ended:
        main([*map(str, words)])
    return ended.value.code or 0


def test_an_entry_is_found_in_the_named_folder_and_in_the_users(own, tmp_path, capsys):
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(SCENARIO)
    put(tmp_path / "shared", "gpus", "mine", GPU)
    assert call("run", scenario, "--catalog", tmp_path / "shared") == 0
    assert call("run", scenario) == 2
    assert "no gpu 'mine' in the catalog" in capsys.readouterr().err
    put(own, "gpus", "mine", GPU)
    assert call("run", scenario) == 0
    assert load_gpu("mine").gpus_per_server == 2


def test_a_remembered_entry_stands_as_it_was_until_the_end(own):
    path = put(own, "gpus", "mine", GPU)
    with lookups_remembered():
        assert load_gpu("mine").gpus_per_server == 2
        path.unlink()
        with lookups_remembered():
            assert load_gpu("mine").gpus_per_server == 2
    with pytest.raises(CatalogError):
        load_gpu("mine")


def test_a_context_within_another_shares_what_it_has_looked_up(own):
    path = put(own, "gpus", "mine", GPU)
    with lookups_remembered():
        with lookups_remembered():
            assert load_gpu("mine").gpus_per_server == 2
        path.unlink()
        assert load_gpu("mine").gpus_per_server == 2


def test_an_entry_changes_with_the_entry_that_it_is_the_same_as(own):
    put(own, "gpus", "mine", "same_as: base\n")
    path = put(own, "gpus", "base", GPU)
    assert load_gpu("mine").gpus_per_server == 2
    path.write_text(GPU.replace("gpus_per_server: 2", "gpus_per_server: 4"))
    utime(path, ns=(0, 10**9))
    assert load_gpu("mine").gpus_per_server == 4
    assert load_gpu("mine") is load_gpu("mine")


def test_more_points_look_for_no_more_entries(own, tmp_path, monkeypatch):
    path = put(tmp_path, "scenarios", "mine", SCENARIO)
    put(own, "gpus", "mine", GPU)
    looked_for = []
    monkeypatch.setattr("pdsim.system.catalog.folders", lambda: looked_for.append(1) or [SHIPPED, own])

    def num_lookups(num_points):
        looked_for.clear()
        planner = Planner(path, path, changes=(), seeds=None)
        planner.plan([{"decode.max_running_requests": n + 1} for n in range(num_points)])
        return len(looked_for)

    assert num_lookups(20) == num_lookups(1)


def test_processes_that_are_started_meanwhile_find_it(tmp_path, capsys):
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    (tmp_path / "sweep.yaml").write_text("scenario: scenario.yaml\ngrid: {decode.tp: [1, 2]}\n")
    put(tmp_path / "shared", "gpus", "mine", GPU)
    out = ("--out", tmp_path / "out", "--json")
    assert call("sweep", tmp_path / "sweep.yaml", "--jobs", 2, "--catalog", tmp_path / "shared", *out) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["metrics"]["completed"]["mean"] for point in points] == [3, 3]


def test_a_run_folder_has_the_entries_that_it_used_and_needs_no_others(own, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pdsim.system.catalog._lent", [])
    (tmp_path / "plain.yaml").write_text(SCENARIO.replace("model: qwen3-0.6b", "model: my-qwen"))
    put(tmp_path / "shared", "gpus", "mine", GPU)
    put(tmp_path / "shared", "models", "my-qwen", "same_as: my-base\n")
    put(tmp_path / "shared", "models", "my-base", MODEL)
    folder = tmp_path / "run"
    assert call("run", tmp_path / "plain.yaml", "--catalog", tmp_path / "shared", "--out", folder) == 0
    kept = sorted(path.relative_to(folder / "catalog").as_posix() for path in (folder / "catalog").rglob("*.yaml"))
    assert kept == ["gpus/mine.yaml", "models/my-base.yaml", "models/my-qwen.yaml"]
    rmtree(tmp_path / "shared")
    assert call("replay", folder) == 0
    assert call("report", folder, "--out", tmp_path / "page.html") == 0
    capsys.readouterr()
    put(own, "gpus", "mine", GPU.replace("24e+9", "48e+9"))
    assert call("explain", folder, "--tornado") == 0
    assert "gpus/mine.yaml, and is used" in capsys.readouterr().err


def test_a_run_of_shipped_entries_has_no_catalog(own, tmp_path):
    (tmp_path / "plain.yaml").write_text(SCENARIO.replace("mine", "h100"))
    assert call("run", tmp_path / "plain.yaml", "--out", tmp_path / "run") == 0
    assert not (tmp_path / "run" / "catalog").exists()


def test_a_worker_on_another_machine_gets_the_entries(own, tmp_path, monkeypatch):
    """A task alone is enough, where no folder has the entry."""
    monkeypatch.setattr("pdsim.system.catalog._lent", [])
    (tmp_path / "base.yaml").write_text(SCENARIO)
    path = put(own, "gpus", "mine", GPU)
    planner = Planner(tmp_path / "sweep.yaml", tmp_path / "base.yaml", changes=(), seeds=None)
    (task,) = planner.plan([{}])[0].tasks.values()
    there = compute(task).row
    path.unlink()
    with pytest.raises(CatalogError):
        load_gpu("mine")
    assert compute(task).row == there


def test_a_changed_file_is_read_again(own):
    put(own, "gpus", "mine", GPU)
    assert load_gpu("mine").memory_bytes == 24e9
    put(own, "gpus", "mine", GPU.replace("24e+9", "48.0e+9"))
    assert load_gpu("mine").memory_bytes == 48e9


def test_a_name_that_two_folders_have_is_refused(own, tmp_path):
    path = put(own, "gpus", "h100", GPU)
    with pytest.raises(CatalogError, match=rf"{path}: {SHIPPED}/gpus has a gpu 'h100' too: give the file another name"):
        load_gpu("h100")
    put(own, "gpus", "mine", GPU)
    put(tmp_path, "gpus", "mine", GPU)
    with searched(tmp_path), pytest.raises(CatalogError, match="mine"):
        load_gpu("mine")
    with searched(own):
        assert load_gpu("mine").memory_bytes == 24e9


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[1, 2", "not YAML: "),
        ("5", "the file: expected a mapping of fields, found 5"),
        (GPU + "colour: red\n", "unknown field 'colour'; here are memory_bytes, memory_bandwidth"),
        (GPU + "memory_byte: 3\n", "unknown field 'memory_byte'; here are .*; did you mean 'memory_bytes'?"),
        (GPU.replace("nic_bandwidth: 25e+9\n", ""), "nic_bandwidth is missing"),
        (GPU.replace("24e+9", "24 GB"), "memory_bytes: expected a number from 0 on, found '24 GB'"),
        (GPU.replace("24e+9", "0"), "memory_bytes: expected a number above 0, found 0"),
        (GPU.replace("24e+9", "-1"), "memory_bytes: expected a number from 0 on, found -1"),
        (GPU.replace("24e+9", ".nan"), "memory_bytes: expected a number from 0 on, found nan"),
        (GPU.replace("server: 2", "server: 1.5"), "gpus_per_server: expected a whole number from 0 on, found 1.5"),
        (GPU.replace("bf16", "int7"), "flops: expected one of bf16, fp8, fp4, int4, int8, found 'int"),
        (GPU.replace("bf16", "fp8"), "flops.bf16 is missing"),
        ("same_as: mine", "same_as: mine is mine"),
        ("same_as: h1000", "no gpu 'h1000' in the catalog.*; did you mean 'h100'?"),
    ],
)
def test_a_wrong_file_is_told_with_its_field(text, complaint, own):
    path = put(own, "gpus", "mine", text)
    with pytest.raises(CatalogError, match=complaint) as caught:
        load_gpu("mine")
    assert str(path) in str(caught.value) or "h1000" in text


@pytest.mark.parametrize(
    ("field", "changed", "complaint"),
    [
        ("kind: grouped-query", "kind: mla", "attention.kind: expected one of grouped-query, latent, found 'mla'"),
        ("kind: grouped-query, ", "", "attention.kind: expected one of grouped-query, latent, found None"),
        ("head_dim: 128", "head_size: 128", "unknown field 'attention.head_size'; here are num_layers"),
        (
            "weight_dtype: bf16",
            "weight_dtype: int7",
            "weight_dtype: expected one of bf16, fp8, fp4, int4, int8, found 'int7'",
        ),
        ("tied_embeddings: true", "tied_embeddings: 1", "tied_embeddings: expected true or false, found 1"),
        ("qk_norm: true", "qk_norm: 3", "llama.qk_norm: expected true or false, found 3"),
    ],
)
def test_a_wrong_field_of_a_model(field, changed, complaint, own):
    assert field in MODEL
    path = put(own, "models", "mine", MODEL.replace(field, changed))
    with pytest.raises(CatalogError) as caught:
        load_model("mine")
    assert str(caught.value).startswith(f"{path}: ")
    assert complaint in str(caught.value)


LEAVES = st.none() | st.booleans() | st.integers(-1, 1 << 70) | st.floats() | st.text(max_size=3)
VALUES = LEAVES | st.lists(LEAVES, max_size=3) | st.dictionaries(st.text(max_size=3), LEAVES, max_size=3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the empty folder stays empty
@given(st.sampled_from(sorted(KINDS)), VALUES, st.data())
def test_a_wrong_value_is_an_error_and_no_traceback(kind, value, data):
    fields = read_yaml(file_of(kind, {"models": "kimi-k2", "gpus": "h200", "transports": "nixl-rdma"}[kind]))
    section = data.draw(st.sampled_from([fields, *(part for part in fields.values() if isinstance(part, dict))]))
    section[data.draw(st.sampled_from(sorted(section)))] = value
    with suppress(EntryError):
        build(KINDS[kind], fields, name="mine")


def test_a_wrong_entry_or_folder_is_one_message_and_exit_code_2(own, tmp_path, capsys):
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    path = put(own, "gpus", "mine", "memory_bytes: many")
    for words, message in (
        (
            [],
            (
                f"pdsim: {tmp_path / 'scenario.yaml'}: prefill: {path}: "
                "memory_bytes: expected a number from 0 on, found 'many'\n"
            ),
        ),
        (["--catalog", "nowhere"], "pdsim: catalog nowhere: no such folder\n"),
    ):
        assert call("run", tmp_path / "scenario.yaml", *words) == 2
        assert capsys.readouterr().err == message


def test_a_name_is_no_path(own):
    path = put(own, "gpus", "mine", GPU)
    with pytest.raises(CatalogError, match="no gpu"):
        load_gpu(str(path.with_suffix("")))
