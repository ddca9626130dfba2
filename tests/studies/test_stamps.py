"""With the times of its loop, a server near its limit is simulated stage by stage."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tests.markdown import has_row

STUDY = Path(__file__).parents[2] / "experiments" / "sglang-stamps-h200"
PAGE = (STUDY / "README.md").read_text()
SPEC = spec_from_file_location("stages", STUDY / "stages.py")
stages = module_from_spec(SPEC)
SPEC.loader.exec_module(stages)


MACHINES = (stages.FIRST, stages.SECOND)


@pytest.mark.parametrize(("machine", "load"), [(one, load) for one in MACHINES for load in one.loads])
def test_the_page_has_the_measured_stages(machine, load):
    real = stages.measured(load, machine)
    parts = stages.parts_of(load, machine).items()
    assert all(stages.row(part, "measured", real[:, chosen].mean(axis=1), "") in PAGE for part, chosen in parts)


def test_the_busy_loop_explains_when_the_gpu_begins_and_when_tokens_come():
    measured = stages.measured("bf16_hi").mean(axis=1)
    simulated = stages.stages_of(stages.records("bf16_hi", "loop")).mean(axis=1)
    assert simulated.sum() == pytest.approx(measured.sum(), rel=0.05)
    assert simulated[[0, 1, 3]] == pytest.approx(measured[[0, 1, 3]], rel=0.05)


def test_the_page_has_the_forwards_and_the_loops(capsys):
    stages.report_forwards()
    for machine in MACHINES:
        stages.report_loop(machine)
    assert all(line in PAGE for line in capsys.readouterr().out.splitlines())


def test_the_page_has_the_misses_of_the_second_machine():
    real_ms = stages.measured("fp8_hi", stages.SECOND).mean(axis=1)
    requests = stages.records("fp8_hi", "loop", stages.SECOND)
    found_ms = stages.stages_of(requests).mean(axis=1)
    miss = stages.error(found_ms.sum(), real_ms.sum())
    name = stages.SECOND.knows["loop"]
    assert has_row(PAGE, stages.row("", name, found_ms, miss))
    tpot_ms, speed = stages.measured_speed("fp8_hi", stages.SECOND)
    own_ms, own = stages.simulated_speed(requests)
    cells = (f"{own_ms:.2f} ms", stages.error(own_ms, tpot_ms), f"{own:,.0f}", stages.error(own, speed))
    assert has_row(PAGE, f"| | {name} | {' | '.join(cells)} |")


def test_rows_of_a_late_launch_do_not_show_it_and_the_loop_does():
    found = {}
    for knows in ("singles", "loop"):
        rows = stages.rows_of("bf16", knows, stages.SECOND, Path())
        found[knows] = stages.profile_of(stages.calibrate(stages.read_rows(rows)), "", "")["cost"]["host"]
    assert "launch" not in found["singles"]
    assert found["loop"]["launch"] == "19.95 ms"
