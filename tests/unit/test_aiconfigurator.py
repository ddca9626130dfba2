"""The tables of aiconfigurator, where it is installed, against forward times that an SGLang server reported."""

import importlib

import pytest

from pdsim.cost.aiconfigurator import _compiled
from pdsim.cost.settings import AiConfigurator
from pdsim.scenario.building.cluster import build
from pdsim.scenario.yaml_file import ConfigError
from pdsim.sim.simulation import simulate
from pdsim.system.catalog import load_gpu, load_model
from pdsim.system.memory import Layout
from tests.support import request, small
from tests.unit.test_cost import decode_ms, prefill


@pytest.fixture
def tables():
    pytest.importorskip("aiconfigurator_core", reason="aiconfigurator is not installed")
    layout = Layout(model=load_model("qwen3-8b"), gpu=load_gpu("h200"), tp=1, kv_dtype="bf16")
    return AiConfigurator(step_overhead_ns=0, prompt_overhead_ns=0).model(layout)


@pytest.mark.parametrize(
    ("chunk", "gpu_ms"), [((0, 1024), 22.2), ((0, 4096), 92.5), ((0, 8192), 208.6), ((8192, 8192), 269.0)]
)
def test_prefill_of_qwen3_8b_on_h200(tables, chunk, gpu_ms):
    assert tables.prefill_ns(prefill(chunk), 0) / 1e6 == pytest.approx(gpu_ms, rel=0.1)


@pytest.mark.parametrize(
    ("n", "context", "gpu_ms"), [(1, 1646, 5.08), (8, 8600, 5.66), (32, 33_290, 6.52), (64, 71_542, 8.12)]
)
def test_decode_of_qwen3_8b_on_h200(tables, n, context, gpu_ms):
    assert decode_ms(tables, n, context) == pytest.approx(gpu_ms, rel=0.1)


def test_a_scenario_runs_on_it(tables):
    assert simulate(small(request(0, 60, 5), cost="aiconfigurator")).summary()["completed"] == 1


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("model", ["qwen3-32b", "deepseek-r1", "minimax-m2.5", "qwen3.5-397b-a17b"])
def test_large_models_have_tables(tables, model, kv_dtype):
    layout = Layout(model=load_model(model), gpu=load_gpu("b200"), tp=4, kv_dtype=kv_dtype)
    assert AiConfigurator().model(layout).prefill_ns(prefill((0, 1024)), 0) > 0


def test_what_the_tables_lack_is_told_before_the_run(tables):
    model = "minimax-m2.5"  # 1,536 / 8 is no whole number of fp8 blocks
    with pytest.raises(ConfigError, match=r"no tables for MiniMaxAI/MiniMax-M2.5 on h200_sxm"):
        build(small(request(0, 60, 5), cost="aiconfigurator", model=model, prefill={"gpu": "h200", "tp": 8}))


def test_a_gpu_without_tables_is_named():
    with pytest.raises(ConfigError, match="cost: aiconfigurator: it has no GPU h20; it has h100, h200"):
        build(small(request(0, 60, 5), cost="aiconfigurator", prefill={"gpu": "h20"}))


def test_weights_without_tables_are_named():
    with pytest.raises(ConfigError, match="cost: aiconfigurator: it has no weights in int4; it has bf16, fp8, fp4"):
        build(small(request(0, 60, 5), cost="aiconfigurator", weight_dtype="int4"))


def test_without_it_the_message_says_how_to_get_it(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    scenario = small(request(0, 60, 5), cost="aiconfigurator")
    monkeypatch.setattr(importlib, "import_module", missing)
    _compiled.cache_clear()
    with pytest.raises(ConfigError, match="cost: aiconfigurator: it is not installed: pip install aiconfigurator"):
        build(scenario)
