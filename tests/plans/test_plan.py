"""pdsim plan as a user calls it."""

import json

import pytest

from pdsim import ConfigError
from pdsim.cli import main
from pdsim.study.planning.planning import plan
from pdsim.study.planning.slo import Slo
from tests.cli.test_commands import output

SCENARIO = """\
model: qwen3-8b
prefill: {gpu: h100}
decode: {gpu: h100}
cost: roofline
workload: {use: random_lengths, num_requests: 40, input_tokens: 1500, output_tokens: 40}
client: {use: open_loop, arrivals: {use: poisson, rate: 20 /s}}
"""
SLO = "ttft p90 < 200 ms, tpot p90 < 12 ms"


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    return path


def test_the_plan_meets_the_slo_and_what_is_cheaper_does_not(scenario):
    made = plan(scenario, slo=SLO, max_gpus=4, seeds=1, engine="here")
    assert made.chosen is not None
    assert made.chosen.outcome.meets
    for row in made.nearest:
        assert not row.outcome.meets
        assert row.candidate.price_per_h <= made.chosen.candidate.price_per_h
    assert made.load_factor is not None
    assert made.load_factor >= 1


def test_prices_decide(scenario):
    dear = plan(scenario, slo=SLO, prices={"h100": 9.0, "h200": 1.0}, max_gpus=2, seeds=1, engine="here")
    assert dear.chosen is not None
    assert "h100" not in json.dumps(dear.chosen.candidate.changes)


def test_the_planned_cluster_can_be_launched(scenario, tmp_path, capsys):
    made = plan(scenario, slo=SLO, max_gpus=4, seeds=1, engine="here", out=tmp_path / "plan")
    printed = output(capsys, "launch", tmp_path / "plan" / "scenario.yaml")
    assert printed.count("sglang.launch_server") == sum(made.chosen.candidate.counts)


def test_the_planned_scenario_does_not_replace_the_one_asked_about(scenario, tmp_path):
    with pytest.raises(ConfigError, match=r"another folder"):
        plan(scenario, slo=SLO, out=tmp_path)


def test_runs_that_are_there_are_not_computed_again(scenario, tmp_path):
    computed = []

    def again():
        computed.clear()
        arguments = {"slo": SLO, "max_gpus": 4, "seeds": 1, "engine": "here", "out": tmp_path / "plan"}
        return plan(scenario, **arguments, progress=lambda done, _total: computed.append(done))

    first = again()
    assert computed
    shards = sorted((tmp_path / "plan" / "points").glob("*.parquet"))
    shards[0].unlink()
    assert again().to_json() == first.to_json()
    assert len(computed) == 1
    assert json.loads((tmp_path / "plan" / "plan.json").read_text()) == first.to_json()


def test_nothing_meets_it(scenario, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(scenario), "--slo", "ttft p99 < 1 ms", "--max-gpus", "2", "--engine", "here"])
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert "Nothing of up to 2 GPUs meets it. The nearest is" in printed


WRONG = [
    (["--slo", "ttf p99 < 2 s"], "no latency 'ttf' (did you mean 'ttft'?); there are ttft, tpot, e2e"),
    (["--slo", "ttft < 2 s"], "'ttft < 2 s' is no METRIC pNN < DURATION"),
    (["--slo", "ttft p99 < 2"], "bare number 2: write a duration with its unit"),
    (["--slo", "ttft p101 < 2 s"], "p101 is no percentile"),
    (["--slo", "ttft p9 < 2 s, ttft p9 < 1 s"], "TTFT p9 stands there twice"),
    (["--gpu", "h10"], "no gpu 'h10' in the catalog"),
    (["--gpu", "h100", "--gpu", "h200=3"], "--gpu h100: several GPUs need a price each"),
    (["--gpu", "h100=cheap"], "--gpu h100=cheap: expected NAME=PRICE"),
    (["--try", "page_size"], "--try page_size: expected FIELD=[VALUE, ...]"),
    (["--try", "page_sizes=[1]"], "unknown field 'page_sizes' (did you mean 'page_size'?)"),
    (["--max-gpus", "0"], "--max-gpus 0: at least 1"),
    (["--set", "model=llama-3.1-405b", "--max-gpus", "4"], "no cluster of up to 4 GPUs is possible"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), WRONG, ids=lambda value: value[-1] if isinstance(value, list) else ""
)
def test_what_is_wrong_is_said(arguments, message, scenario, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(scenario), *arguments])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_an_slo_is_printed_as_it_is_read():
    slo = Slo.parse("TTFT p99 < 2 s, tpot p99.9 <= 50 ms")
    assert str(slo) == "TTFT p99 < 2000 ms, TPOT p99.9 < 50 ms"
    assert Slo.parse(str(slo)) == slo
    with pytest.raises(ConfigError):
        Slo.parse("")
