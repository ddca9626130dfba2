"""With the times of its loop, a server near its limit is simulated stage by stage."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

STUDY = Path(__file__).parents[2] / "experiments" / "sglang-stamps-h200"
PAGE = (STUDY / "README.md").read_text()
SPEC = spec_from_file_location("stages", STUDY / "stages.py")
stages = module_from_spec(SPEC)
SPEC.loader.exec_module(stages)


@pytest.mark.parametrize("load", stages.LOADS)
def test_the_page_has_the_measured_stages(load):
    assert stages.row(load, "measured", stages.measured(load).mean(axis=1), "") in PAGE


def test_the_loops_times_explain_when_the_gpu_begins_and_when_tokens_come():
    measured, simulated = (
        found.mean(axis=1) for found in (stages.measured("bf16_hi"), stages.simulated("bf16_hi", "stamps"))
    )
    assert simulated.sum() == pytest.approx(measured.sum(), rel=0.05)
    assert simulated[[0, 1, 3]] == pytest.approx(measured[[0, 1, 3]], rel=0.05)


def test_the_page_has_the_forwards(capsys):
    stages.report_forwards()
    stages.report_loop()
    assert all(line in PAGE for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("load", stages.SECOND_LOADS)
def test_the_page_has_the_measured_stages_of_the_second_machine(load):
    real = stages.measured(load, stages.SECOND)
    parts = stages.parts_of_second(load).items()
    assert all(stages.row(part, "measured", real[:, chosen].mean(axis=1), "") in PAGE for part, chosen in parts)


def test_the_page_has_the_misses_of_the_second_machine():
    real_ms = stages.measured("fp8_hi", stages.SECOND).mean(axis=1)
    requests = stages.records("fp8_hi", "stamps", stages.SECOND)
    found_ms = stages.stages_of(requests).mean(axis=1)
    miss = stages.error(found_ms.sum(), real_ms.sum())
    assert stages.row("", stages.SECOND_KNOWN["stamps"], found_ms, miss) in PAGE
    tpot_ms, speed = stages.measured_speed("fp8_hi")
    own_ms, own = stages.simulated_speed(requests)
    cells = (f"{own_ms:.2f} ms", stages.error(own_ms, tpot_ms), f"{own:,.0f}", stages.error(own, speed))
    assert f"| | {stages.SECOND_KNOWN['stamps']} | {' | '.join(cells)} |" in PAGE


def test_the_page_has_the_second_machines_loop(capsys):
    stages.report_loop(stages.SECOND_LOADS, stages.SECOND)
    assert all(line in PAGE for line in capsys.readouterr().out.splitlines())
