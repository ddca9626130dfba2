"""Compiled, interpreted and step by step, 200 random scenarios of every kind run the same."""

import json
import os
import subprocess
import sys
from hashlib import sha256

import pytest
from hypothesis import Phase, given, seed, settings

import pdsim
from compiled import ROOT
from pdsim.core.journal import digest
from tests.strategies import any_scenarios
from tests.support import decisions, run

NUM_EXAMPLES, NUM_SCENARIOS = 260, 200


def fingerprints() -> list[tuple[str, str, str]]:
    """Of each scenario the journal and the decisions, many steps at once and one by one."""
    found: list[tuple[str, str, str]] = []

    @seed(21)
    @settings(max_examples=NUM_EXAMPLES, database=None, phases=[Phase.generate])
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
assert not pdsim.is_compiled(), "make plain: this tree is compiled in place"
print(json.dumps(fingerprints()))
"""


@pytest.mark.skipif(not pdsim.is_compiled(), reason="nothing here is compiled: make test-compiled")
def test_compiled_runs_are_the_interpreted_ones_and_those_step_by_step():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    interpreted = subprocess.Popen(
        [sys.executable, "-c", CODE], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    compiled = fingerprints()
    printed, _ = interpreted.communicate()
    assert [list(one) for one in compiled] == json.loads(printed)
    assert len(set(compiled)) >= NUM_SCENARIOS
    assert all(many == single for _, many, single in compiled)
