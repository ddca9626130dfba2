"""Whether pdsim's policies of sessions make the choices of SGLang's own gateway and vLLM's own router
(experiments/conformance/gateway).
"""

from importlib import import_module
from pathlib import Path

import pytest

STUDY = Path("experiments/conformance/gateway")


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDY))
    return import_module("compare_gateway")


def test_choices_are_the_gateways(study):
    found = {name: study.compare(name) for name in study.LOADS}
    assert {name: one.num_differing for name, one in found.items()} == dict.fromkeys(found, 0)
    assert sum(one.num_choices for one in found.values()) == 1500
    assert sum(one.num_open for one in found.values()) < 270
