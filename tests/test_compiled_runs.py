"""Compiled, interpreted and step by step, 200 random scenarios of every kind run the same."""

import json
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.internal.conjecture import providers

import pdsim
from compiled import ROOT
from pdsim.core.journal.lines import digest
from tests.strategies import any_scenarios
from tests.support import decisions, run

NUM_EXAMPLES, NUM_SCENARIOS = 260, 200


def fingerprints() -> list[tuple[str, str, str]]:
    """Of each scenario the journal and the decisions, many steps at once and one by one."""
    found: list[tuple[str, str, str]] = []
    no_constants = providers.Constants()
    providers._get_local_constants = lambda: no_constants  # those of sources, which compiled modules do not show

    @seed(21)
    @settings(
        max_examples=NUM_EXAMPLES,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(any_scenarios())
    def look(scenario):
        many, single = run(scenario).journal, run(scenario, single_steps=True).journal
        decided = [sha256(repr(decisions(journal)).encode()).hexdigest() for journal in (many, single)]
        found.append((digest(many), *decided))

    look()
    return found


CODE = """
import json, pdsim
from tests.test_compiled_runs import fingerprints
print(json.dumps([pdsim.is_compiled(), *fingerprints()]))
"""


@pytest.mark.skipif(not pdsim.is_compiled(), reason="nothing here is compiled: make test-compiled")
def test_compiled_runs_are_the_interpreted_ones_and_those_step_by_step():
    folders = (f"{Path(pdsim.__file__).parent.parent}{os.pathsep}{ROOT}", str(ROOT))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CODE],
            env={**os.environ, "PYTHONPATH": folder, "PYTHONSAFEPATH": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for folder in folders
    ]
    (is_compiled, *compiled), (is_compiled_too, *interpreted) = (json.loads(p.communicate()[0]) for p in processes)
    assert (is_compiled, is_compiled_too) == (True, False)
    assert compiled == interpreted
    assert len(set(map(tuple, compiled))) >= NUM_SCENARIOS
    assert all(many == single for _, many, single in compiled)
