"""Wrong sweep files: one clear message before anything runs, exit code 2."""

import sys
from types import SimpleNamespace

import pytest

from pdsim import ConfigError
from pdsim.cli import main
from pdsim.study.points.engine import open_engine
from tests.sweep_files import shards, write_sweep

HEAD = "scenario: base.yaml\n"

WRONG = [
    ("grid: {page_size: [4]}", "sweep.yaml: scenario is missing"),
    (HEAD, "sweep.yaml: nothing to sweep: give it grid, points, random, sobol or search"),
    (HEAD + "gird: {}", "sweep.yaml, line 2: unknown field 'gird' (did you mean 'grid'?); here are name, description"),
    (HEAD + "grid: {}", "sweep.yaml, line 2: grid: no fields: give it some"),
    (HEAD + "grid: {page_size: []}", "grid.page_size: an empty list"),
    (HEAD + "points: []", "sweep.yaml, line 2: points: Tuple should have at least 1 item"),
    (HEAD + "seeds: []\ngrid: {page_size: [4]}", "seeds: Tuple should have at least 1 item"),
    (HEAD + "seeds: [1, -2]\ngrid: {page_size: [4]}", "seeds.1: Input should be greater than or equal to 0, found -2"),
    (
        HEAD + "search: {trials: 1, seed: 4294967296, fields: {page_size: [4]}}",
        "search.seed: Input should be less than",
    ),
    (HEAD + "seeds: [1, true]\ngrid: {page_size: [4]}", "seeds: expected a number, found true"),
    (HEAD + "grid: {seed: [1, 2]}", "seed: give the sweep's field seeds instead, as in seeds: [1, 2, 3]"),
    (HEAD + "grid: {page_size: {from: 1.0, to: 2}}", "page_size: a range in a grid needs count, or step"),
    (HEAD + "grid: {'prefill.tp, decode.tp': [[1, 2], [2]]}", "expected a list of 2 values for each point, found [2]"),
    (
        HEAD + "grid: {'prefill.tp, decode.tp': {from: 1, to: 2}}",
        "fields that change together have a list, not a range",
    ),
    (HEAD + "grid: {'prefill.tp, page_size': [[1, 2]], page_size: [4]}", "page_size is given twice"),
    (HEAD + "sobol: {count: 12, fields: {page_size: [4]}}", "sobol.count: 12 is no power of two; near are 8 and 16"),
    (
        HEAD + "sobol: {count: 4, seed: -1, fields: {page_size: [4]}}",
        "sobol.seed: Input should be greater than or equal to 0, found -1",
    ),
    (HEAD + "random: {fields: {page_size: [4]}}", "random.count is missing"),
    (HEAD + "random: {count: 4, field: {page_size: [4]}}", "unknown field 'random.field' (did you mean 'fields'?)"),
    (
        HEAD + "grid: {page_size: [4]}\nslos: {chat: {ttft: 1 s}}",
        "slos.chat: expected text, such as 'ttft < 2 s and tpot < 50 ms",
    ),
    (HEAD + "grid: {page_size: [4]}\nslos: {chat: ttft < 2 for 99 %}", "slos.chat: bare number 2: write a duration"),
    (HEAD + "search: {trials: 4, fields: {page_size: [4]}}", "search.slo is missing; there are none; give it some"),
    (
        HEAD + "slos: {chat: ttft < 1 s for 99 %}\nsearch: {trials: 4, slo: chta, fields: {page_size: [4]}}",
        "search.slo: no SLO 'chta' (did you mean 'chat'?); there are chat",
    ),
    (
        HEAD + "grid: {decode.radix: [true]}",
        "sweep.yaml, point 1 (decode.radix=true): unknown field 'decode.radix' (did you mean 'radix_cache'?)",
    ),
    (
        HEAD + "grid: {page_size: [4, 0]}",
        "point 2 (page_size=0): page_size: Input should be greater than or equal to 1",
    ),
    (HEAD + "grid: {network.bandwidth: [3]}", "network.bandwidth: bare number 3: write a bandwidth with its unit"),
    (HEAD + "grid: {seeds.x: [4]}", "unknown field 'seeds' (did you mean 'seed'?)"),
    (HEAD + "grid: {prefill.gpu: [h1000, h2000]}", "no point can run; the first fails: prefill: no gpu 'h1000'"),
    ("scenario: bsae.yaml\ngrid: {page_size: [4]}", "bsae.yaml does not exist"),
    ("- a list", "sweep.yaml: expected a mapping of fields, found list"),
]


def message(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    error = capsys.readouterr().err
    assert stop.value.code == 2, error
    assert error.startswith("pdsim: ")
    return error


@pytest.mark.parametrize(("text", "expected"), WRONG)
def test_a_wrong_sweep_is_named_before_anything_runs(tmp_path, capsys, text, expected):
    error = message(capsys, "sweep", write_sweep(tmp_path, text), "--out", tmp_path / "out")
    assert expected in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--engine", "dask"], "--engine dask: there are pool, here, ray and ray:ADDRESS"),
        (["--jobs", "0"], "--jobs 0: at least 1"),
        (["--set", "page_sise=4"], "unknown field 'page_sise' (did you mean 'page_size'?)"),
    ],
)
def test_a_wrong_flag_is_named(tmp_path, capsys, flags, expected):
    path = write_sweep(tmp_path)
    assert expected in message(capsys, "sweep", path, "--out", tmp_path / "out", *flags)


def test_damaged_points_are_computed_again(tmp_path, capsys):
    path, out = write_sweep(tmp_path), tmp_path / "out"
    words = [str(path), "--out", str(out), "--engine", "here"]
    main_of("sweep", *words)
    before = shards(out)
    for (name, content), share in zip(before.items(), (0, 0.5, 0.999), strict=False):
        (out / "points" / name).write_bytes(content[: int(share * len(content))])
    main_of("report", str(out), "-o", str(tmp_path / "page.html"))
    assert "damaged runs: 3; their points are left out, until the sweep is started again" in capsys.readouterr().err
    main_of("sweep", *words)
    assert "3 runs computed, 5 kept from before, 3 damaged and computed again" in capsys.readouterr().out
    assert shards(out) == before


def test_a_ray_cluster_of_the_environment_that_nobody_serves_is_told_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=lambda **_: pytest.fail("Ray waits for minutes")))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"--engine ray: RAY_ADDRESS 127\.0\.0\.1:1: cannot be reached: .*ray start"):
        open_engine("ray", None)


@pytest.mark.parametrize("name", ["plan.jsonl", "sweep.json"])
def test_a_damaged_head_of_a_sweep_is_named(tmp_path, capsys, name):
    main_of("sweep", str(write_sweep(tmp_path)), "--out", str(tmp_path / "out"), "--engine", "here")
    (tmp_path / "out" / name).write_bytes(b"PAR1")
    assert f"{name} is damaged" in message(capsys, "report", tmp_path / "out").replace("sweep.json or plan.jsonl", name)


def main_of(*words):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert not stop.value.code
