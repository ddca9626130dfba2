"""pdsim plan as a user calls it."""

import json
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from statistics import median
from subprocess import DEVNULL

import pytest
from markupsafe import escape

from pdsim import ConfigError, load_scenario, simulate
from pdsim.cli import main
from pdsim.metrics.summary import e2e_ms, ttft_ms
from pdsim.policy.prefill import LongestPrefixFirst
from pdsim.scenario.building.sizing import resolve
from pdsim.show.html.page import render
from pdsim.show.html.plan import plan_page
from pdsim.sim.uncertainty.noise import JITTERS
from pdsim.sim.uncertainty.sensitivity import Limit
from pdsim.study.base import AskOptions, base_of
from pdsim.study.planning.planning import plan
from pdsim.study.planning.screen import Screen
from pdsim.study.points.engine import InProcessEngine
from pdsim.study.points.worker import compute
from pdsim.study.space import Space, with_other_settings, with_setting_of
from pdsim.study.trials import Trials
from pdsim.study.verdict.slo import Slo
from pdsim.workload.trace_file import InputWarning
from tests.cli.test_commands import output

ROOT = Path(__file__).parents[2]
SCENARIO = """\
model: qwen3-8b
prefill: {gpu: h100}
decode: {gpu: h100}
cost: roofline
workload: {use: random_lengths, num_requests: 40, input_tokens: 1500, output_tokens: 40}
client: {use: open_loop, arrivals: {use: poisson, rate: 20 /s}}
"""
RARE = ["client.arrivals.rate=5 /s"]
SLO = "ttft p90 < 200 ms, tpot p90 < 12 ms"


@pytest.fixture(scope="module", autouse=True)
def run_once():
    """Plans of this module share runs and what limits them: a task's key names all that its result depends on."""
    rows, limits = {}, {}
    limit = Trials.limit

    def run(_, tasks):
        for task in tasks:
            rows[task.key] = rows.get(task.key) or compute(task)
            yield rows[task.key]

    def limit_once(self, changes, term):
        key = self.scenario(changes).model_dump_json(), str(term)
        limits[key] = limits.get(key) or limit(self, changes, term)
        return limits[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InProcessEngine, "run", run)
        patch.setattr(Trials, "limit", limit_once)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of `made`; nobody changes it."""
    return tmp_path_factory.mktemp("planned") / "plan"


@pytest.fixture(scope="module")
def made(folder):
    """What most tests look at; nobody changes it."""
    path = folder.with_name("scenario.yaml")
    path.write_text(SCENARIO)
    return plan(path, slo=SLO, max_gpus=4, seeds=1, engine="here", out=folder)


@pytest.fixture
def no_limits(monkeypatch):
    """Plans that do not say what limits the clusters that miss the SLO: a quarter of their runs."""
    monkeypatch.setattr(Trials, "limit", lambda *_: Limit("", "", 0.0, ""))


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    return path


def test_the_plan_meets_the_slo_and_what_is_cheaper_does_not(made):
    assert made.chosen is not None
    assert made.chosen.outcome.meets
    for row in made.nearest:
        assert not row.outcome.meets
        assert row.candidate.price_per_h <= made.chosen.candidate.price_per_h
    assert made.load_factor is not None
    assert made.load_factor >= 1


@pytest.mark.usefixtures("no_limits")
def test_the_cluster_that_a_scenario_has_is_told_beside(scenario):
    made = plan(scenario, slo=SLO, max_gpus=4, seeds=1, engine="here", changes=["decode.instances=3"])
    assert made.own is not None
    assert made.chosen is not None
    assert made.own.candidate.label == "1P3D of TP1"
    assert made.own.candidate.price_per_h == 4
    assert made.own.outcome.ratios
    saved = 100 * (1 - made.chosen.candidate.price_per_h / 4)
    assert Screen(made).saving.startswith(f"{saved:.0f} % less than your 1P3D of TP1 (4 x H100), which ")


def test_a_cluster_that_meets_the_slo_for_less_is_not_said_to_cost_more(made):
    """The search may leave out the user's own cluster."""
    cheaper = made.chosen._replace(candidate=replace(made.chosen.candidate, label="mine", price_per_h=0.5))
    assert Screen(replace(made, own=cheaper)).why_not(cheaper) == "yours: costs less; the search did not try it"


@pytest.mark.usefixtures("no_limits")
def test_an_aggregated_cluster_is_compared_with_prefill_and_decode_instances(scenario, tmp_path):
    servers = {"gpu": "h100", "instances": 2, "policy": "lpm", "max_running_requests": 24, "radix_cache": False}
    changes = ["prefill=null", "decode=null", f"aggregated={json.dumps(servers)}"]
    base = base_of(scenario, AskOptions(), changes, folder=tmp_path, starter={}, takes_aggregated=True)
    space = Space({"h100": 1.0}, 2, {})
    own = space.own(base)
    assert (own.label, own.counts, own.price_per_h) == ("2 aggregated of TP1", (2,), 2)
    assert base.changed(own.changes) == load_scenario(scenario, changes)
    by_label = {one.label: base.changed(one.changes) for one in space.candidates(base)}
    pair = by_label["1P1D of TP1"].pair
    assert (pair.prefill.policy, pair.prefill.radix_cache, pair.decode.max_running_requests) == (
        LongestPrefixFirst(),
        False,
        24,
    )
    assert base.names("aggregated.max_running_requests")
    with pytest.raises(ConfigError, match="`pdsim plan` compares it"):
        base_of(scenario, AskOptions(), changes, folder=tmp_path, starter={})
    with pytest.warns(InputWarning, match=r"aggregated\.mixed_chunk: prefill and decode servers have no such setting"):
        base_of(
            scenario,
            AskOptions(),
            [*changes, "aggregated.mixed_chunk=true"],
            folder=tmp_path,
            starter={},
            takes_aggregated=True,
        )


def test_prices_decide(scenario):
    dear = plan(scenario, slo=SLO, prices={"h100": 9.0, "h200": 1.0}, max_gpus=2, seeds=1, engine="here")
    assert dear.chosen is not None
    assert "h100" not in json.dumps(dear.chosen.candidate.changes)


def test_the_planned_cluster_can_be_launched(made, folder, capsys):
    printed = output(capsys, "launch", folder / "scenario.yaml")
    assert printed.count("sglang.launch_server") == sum(made.chosen.candidate.counts)


@pytest.mark.usefixtures("no_limits")
def test_a_plan_keeps_the_engine(scenario, tmp_path, capsys):
    arguments = [
        "plan",
        scenario,
        "--slo",
        SLO,
        "--max-gpus",
        3,
        "--seeds",
        1,
        "--engine",
        "here",
        "--set",
        "engine=vllm",
    ]
    printed = output(capsys, *arguments, "--out", tmp_path / "plan")
    (line,) = [line for line in printed.splitlines() if line.startswith("Start it:")]
    assert "vllm serve" in output(capsys, *shlex.split(line.partition(":")[2])[1:])


def test_the_planned_scenario_does_not_replace_the_one_asked_about(scenario, tmp_path):
    with pytest.raises(ConfigError, match=r"another folder"):
        plan(scenario, slo=SLO, out=tmp_path)


def test_runs_that_are_there_are_not_computed_again(scenario, made, folder, tmp_path):
    copy = copytree(folder, tmp_path / "plan")
    shards(copy)[0].unlink()
    computed = []
    arguments = {"slo": SLO, "max_gpus": 4, "seeds": 1, "engine": "here", "out": copy}
    again = plan(scenario, **arguments, progress=lambda done, _total: computed.append(done))
    assert Screen(again).to_json() == Screen(made).to_json()
    assert computed == [1]
    assert shards(copy) == [copy / path.relative_to(folder) for path in shards(folder)]
    assert json.loads((copy / "plan.json").read_text()) == json.loads(json.dumps(Screen(made).to_json()))


def test_a_plan_that_was_killed_goes_on_without_computing_anything_again(scenario, made, folder, tmp_path):
    whole, folder = folder, tmp_path / "killed"
    words = ["--slo", SLO, "--max-gpus", "4", "--seeds", "1", "--jobs", "2", "--out", folder]
    with subprocess.Popen(
        [sys.executable, "-m", "pdsim", "plan", scenario, *words], stdout=DEVNULL, stderr=DEVNULL
    ) as run:
        while len(shards(folder)) < 5:
            assert run.poll() is None, "it ended before it could be killed"
            time.sleep(0.01)
        run.kill()
    kept = {path: path.stat().st_mtime_ns for path in shards(folder)}
    assert not (folder / "plan.json").exists()
    computed = []
    arguments = {"slo": SLO, "max_gpus": 4, "seeds": 1, "engine": "here", "out": folder}
    again = plan(scenario, **arguments, progress=lambda done, _total: computed.append(done))
    assert Screen(again).to_json() == Screen(made).to_json()
    assert {path.name for path in shards(folder)} == {path.name for path in shards(whole)}
    assert len(computed) == len(shards(folder)) - len(kept)
    assert kept == {path: path.stat().st_mtime_ns for path in kept}


def shards(folder):
    return sorted((folder / "points").glob("*.json"))


def test_a_page_shows_what_a_plan_says(made, folder, tmp_path):
    page = plan_page(copytree(folder, tmp_path / "plan"))
    assert page.answer == Screen(made).headline
    shown = [[cell.text for cell in row] for row in page.tables[1].rows]
    assert [row[0] for row in shown] == [row.candidate.label for row in made.rows]
    assert [row[-1] for row in shown] == ["the plan", *(Screen(made).why_not(row) for row in made.alternatives)]
    html = render(page)
    for sentence in (*Screen(made).failing, *Screen(made).details):
        assert str(escape(sentence)) in html
    (tmp_path / "plan" / "plan.json").write_text('{"slo": 1}')
    with pytest.raises(ConfigError, match="no plan of this version"):
        plan_page(tmp_path / "plan")


@pytest.mark.usefixtures("no_limits")
def test_the_safe_choice_is_the_cheapest_on_the_slowest_server(scenario):
    arguments = {"slo": "ttft p90 < 400 ms, tpot p90 < 12 ms", "seeds": 1, "engine": "here"}
    made = plan(scenario, **arguments, max_gpus=4, changes=["cost=kernels"])
    slow = plan(scenario, **arguments, max_gpus=4, changes=["cost=kernels", "corner=slowest"])
    assert made.chosen is not None
    assert made.safe is not None
    assert slow.chosen is not None
    assert made.chosen.candidate.price_per_h < made.safe.candidate.price_per_h == slow.chosen.candidate.price_per_h
    assert made.safe.candidate.label in {row.candidate.label for row in (slow.chosen, *slow.others)}
    assert Screen(made).confidence.word == "low"
    told = f"{made.safe.candidate.label} ({made.safe.candidate.num_gpus} x H100) meets the SLO there, too."
    assert Screen(made).confidence.reason.endswith(told)
    assert Screen(made).why_not(made.safe) == "costs more; meets the SLO on slow servers"
    few = plan(scenario, **arguments, max_gpus=made.chosen.candidate.num_gpus, changes=["cost=kernels"])
    assert "No cluster of up to" in Screen(few).confidence.reason
    easy = plan(scenario, slo="ttft p90 < 60 s", max_gpus=2, seeds=1, engine="here", changes=["cost=kernels", *RARE])
    assert Screen(easy).confidence.word == "medium"
    assert easy.safe is None
    assert Screen(slow).confidence.word == "low", "a roofline was measured on no server"


def test_a_verdict_that_chance_changes_is_called_so(scenario, made):
    """No verdict within its band stands without the band."""
    assert made.chosen is not None
    assert len(made.chosen.repeated) == len(JITTERS)
    assert all(len(row.repeated) == (len(JITTERS) if row.outcome.is_near else 0) for row in made.nearest)
    for outcome, jitter in zip(made.chosen.repeated, JITTERS, strict=True):
        changes = [f"network.message_latency={round(50 * (1 + jitter), 3)} us", "seed=1"]
        changes += [f"{name}={json.dumps(value)}" for name, value in made.chosen.candidate.changes.items()]
        done = simulate(load_scenario(scenario, changes)).records.requests
        assert outcome.judgement.readings == Slo.parse(SLO).judge_requests(done).readings
    assert any(one.startswith("With messages up to 10% ") for one in Screen(made).details)
    missed = replace(made.chosen.outcome, meets=False, reason="ttft")
    flipped = replace(made, chosen=made.chosen._replace(repeated=[missed, *made.chosen.repeated[1:]]))
    assert Screen(flipped).confidence.word == "low"
    assert "4 of 5 runs meet the SLO" in Screen(flipped).confidence.reason
    near = made.nearest[0]._replace(repeated=[made.chosen.outcome])
    assert Screen(made).why_not(near).startswith("unstable: 1 of 2 runs meet the SLO, one misses: ")
    of_a_seed = near._replace(outcome=replace(made.chosen.outcome, meets=False, reason="not all seeds"), repeated=())
    assert Screen(made).why_not(of_a_seed) == "not all seeds"
    assert ("by chance" in Screen(made).limits.columns) == made.chosen.outcome.is_near
    equal = made.chosen._replace(candidate=replace(made.chosen.candidate, label="another"), repeated=())
    assert Screen(made).why_not(equal) == "same price, equal headroom within chance"


def test_headroom_on_slow_servers_is_said_of_clusters_that_were_simulated_there_only(made):
    """The user's own cluster may be none of those that were searched."""
    reached = made.chosen.outcome.judgement
    far = {term: ratio / 9 for term, ratio in reached.ratios.items()}
    outcome = replace(made.chosen.outcome, judgement=replace(reached, ratios=far))
    other = made.chosen._replace(candidate=replace(made.chosen.candidate, label="another"), outcome=outcome)
    compared = replace(made, others=(other,))
    assert Screen(compared).why_not(other) == "same price, less headroom on slow servers"
    own = replace(made, own=other, others=())
    assert Screen(own).why_not(other) == "yours: same price, more headroom with typical step times"


def test_nothing_meets_it(scenario, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(scenario), "--slo", "ttft p99 < 1 ms", "--max-gpus", "2", "--engine", "here"])
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert "No cluster of up to 2 GPUs meets your SLO for qwen3-8b: requests miss it even one" in printed


@pytest.mark.usefixtures("no_limits")
def test_a_request_that_misses_it_alone_is_named(scenario):
    made = plan(scenario, slo="ttft p50 < 20 ms", max_gpus=2, seeds=1, engine="here")
    assert made.chosen is None
    assert made.lone is not None
    assert "requests miss it even one at a time" in Screen(made).headline
    changes = ["client={use: closed_loop, concurrency: 1}", "seed=1"]
    done = simulate(load_scenario(scenario, [*changes, *CLUSTERS[made.lone.cluster]])).records.requests
    (request,) = [one for one in done if one.request_id == made.lone.request.request_id]
    assert ttft_ms(request) == pytest.approx(20 * made.lone.ratio)
    assert request.num_prompt_tokens == made.lone.request.num_prompt_tokens
    assert Screen(made).details[1] == f"{made.lone}."


CLUSTERS = {
    "1P1D of TP1": (),
    "1 aggregated of TP1": ("prefill=null", "decode=null", "aggregated={gpu: h100}"),
    "1 aggregated of TP2": ("prefill=null", "decode=null", "aggregated={gpu: h100, tp: 2}"),
}


@pytest.mark.usefixtures("no_limits")
def test_a_load_that_is_too_large_is_no_request_that_misses_it_alone(scenario):
    made = plan(scenario, slo=SLO, max_gpus=1, seeds=1, engine="here", changes=["client.arrivals.rate=200 /s"])
    assert made.chosen is None
    assert made.lone is None
    assert Screen(made).headline == "No cluster of up to 1 GPUs meets your SLO for qwen3-8b"


def test_unequal_tensor_parallelism_is_staged_unless_somebody_chose(scenario, tmp_path):
    def staged(*changes, tried=None):
        base = base_of(scenario, AskOptions(), changes, folder=tmp_path, starter={})
        found = Space({"h100": 1.0}, 3, tried or {}).candidates(base)
        return {one.label for one in found if base.changed(one.changes).network.staging is not None}

    assert staged() == {"1P of TP1, 1D of TP2, staged", "1P of TP2, 1D of TP1, staged"}
    assert not staged("network.staging=null")
    assert not staged("engine=vllm")
    assert not any(label.endswith("staged") for label in staged(tried={"network.staging": [None, {"ring": "1 GiB"}]}))


WRONG = [
    (["--slo", "ttf p99 < 2 s"], "no latency 'ttf' (did you mean 'ttft'?); there are ttft, tpot, e2e"),
    (["--slo", "itl_p99<50ms"], "say for how many requests, as 'itl_p99 p95 < 50ms'"),
    (["--slo", "ttft < 2 s"], "'ttft < 2 s' has no percentile: write"),
    (["--slo", "ttft < 2 s and ttft < 3 s for 9 %"], "limits one metric twice"),
    (
        ["--slo", "ttft < 2 s and tpot for 9 %"],
        "is no limit: write 'ttft p99 < 2 s', or 'ttft < 2 s and tpot < 50 ms for 95 %'",
    ),
    (["--check", "nowhere.csv"], "--check: no trace file nowhere.csv"),
    (["--slo", "ttft p99 < 2"], "bare number 2: write a duration with its unit"),
    (["--slo", "ttft p101 < 2 s"], "p101 is no percentile"),
    (["--slo", "ttft p9 < 2 s, ttft p9 < 1 s"], "TTFT p9 is given twice"),
    (["--slo", "a: ttft p9 < 2 s; a: ttft p9 < 1 s"], "a TTFT p9 is given twice"),
    (["--slo", ": ttft p9 < 2 s"], "has no class before its colon"),
    (["--gpu", "h10"], "no gpu 'h10' in the catalog"),
    (["--gpu", "h100", "--gpu", "h200=3"], "--gpu h100: several GPUs need a price each"),
    (["--gpu", "h100=cheap"], "--gpu h100=cheap: expected NAME=PRICE"),
    (["--gpu", "h100=1e308"], "a price is above 0 and at most 1e+09"),
    (["--try", "workload.num_requests=[5]"], "this field changes the load"),
    (["--try", "page_size"], "--try page_size: expected FIELD=[VALUE, ...]"),
    (["--try", "page_sizes=[1]"], "unknown field 'page_sizes' (did you mean 'page_size'?)"),
    (["--try", "prefill.gpu=[h100]"], "--try prefill.gpu=[h100]: GPUs have prices"),
    (["--try", "encode=[null]"], "--try encode=[null]: name a field of encode, such as encode.instances=[1, 2]"),
    (["--try", "encode.instances=[1]"], "has no encode instances: add the section encode"),
    (["--try", "decode.tp=[two]"], "--try decode.tp=[two]: expected whole numbers above 0"),
    (["--speedup", "0"], "--speedup 0: expected numbers above 0"),
    (["--max-gpus", "0"], 'Invalid value "0" for --max-gpus'),
    (["--set", "model=llama-3.1-405b", "--max-gpus", "4"], "no cluster of up to 4 GPUs is possible"),
    (["--try", "prefill.pp=[1,64]"], "--try prefill.pp: no cluster can have 64; "),
    (["--try", "aggregated.tp=[512]"], "--try aggregated.tp: no cluster can have 512; "),
]


@pytest.mark.parametrize(
    ("arguments", "message"), WRONG, ids=lambda value: value[-1] if isinstance(value, list) else ""
)
def test_what_is_wrong_is_said(arguments, message, scenario, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(scenario), *arguments])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.usefixtures("no_limits")
def test_a_plan_is_judged_on_a_trace_that_it_was_not_made_from(scenario, tmp_path):
    rows = [f"{0.2 * i},{400 + 37 * i % 900},{20 + i % 30}" for i in range(60)]
    for name, half in (("first", rows[:30]), ("second", rows[30:])):
        (tmp_path / f"{name}.csv").write_text("\n".join(["arrival_s,in_tokens,out_tokens", *half]))
    made = plan(
        scenario,
        trace=tmp_path / "first.csv",
        check=tmp_path / "second.csv",
        slo="ttft < 2 s and tpot < 50 ms for 90 %",
        max_gpus=4,
        engine="here",
    )
    assert made.checked is not None
    assert made.chosen is not None
    again = plan(scenario, trace=tmp_path / "second.csv", slo=str(made.slo), max_gpus=4, engine="here")
    same = [row.outcome for row in again.rows if row.candidate == made.chosen.candidate]
    assert all(outcome.judgement == made.checked.judgement for outcome in same)
    assert "On the other trace (--check): within TTFT and TPOT" in " ".join(Screen(made).asked)


@pytest.mark.usefixtures("no_limits")
def test_what_is_faster_is_dearer(scenario):
    made = plan(scenario, slo=SLO, max_gpus=8, seeds=1, engine="here")
    assert made.chosen is not None
    assert made.faster
    rows = [made.chosen, *made.faster]
    assert [row.candidate.price_per_h for row in rows] == sorted({row.candidate.price_per_h for row in rows})
    ratios = [row.outcome.ratio for row in rows]
    assert ratios == sorted(set(ratios), reverse=True)


@pytest.mark.usefixtures("no_limits")
def test_a_load_may_be_more_or_less(scenario, capsys):
    """The cheapest for so many times the load is what a plan of that load takes."""
    made = plan(scenario, slo=SLO, max_gpus=4, seeds=1, engine="here", speedup="0.5,2")
    for factor, row in made.loads.items():
        assert row is not None
        changes = [f"client.arrivals.rate={20 * factor} /s"]
        same = plan(scenario, slo=SLO, max_gpus=4, seeds=1, engine="here", changes=changes)
        assert same.chosen is not None
        assert row.candidate.price_per_h == same.chosen.candidate.price_per_h
        assert f"At {factor:g} times this load: {row.candidate.label}, " in " ".join(Screen(made).asked)
    assert made.loads[0.5].candidate.price_per_h < made.loads[2].candidate.price_per_h


@pytest.mark.usefixtures("no_limits")
def test_joint_attainment_is_that_of_the_run(scenario):
    run = simulate(load_scenario(scenario, RARE).model_copy(update={"seed": 1}))
    done = run.records.requests
    limits_ms = [round(median(map(latency, done)), 3) for latency in (ttft_ms, e2e_ms)]
    slo = "ttft p30 < {} ms, e2e p30 < {} ms".format(*limits_ms)
    made = plan(scenario, slo=slo, max_gpus=2, seeds=1, engine="here", changes=RARE)
    outcome = next(row.outcome for row in made.rows if row.candidate.label == "1P1D of TP1")
    kept = sum(ttft_ms(one) <= limits_ms[0] and e2e_ms(one) <= limits_ms[1] for one in done)
    assert 0 < kept < len(done)
    assert outcome.attained.share == kept / len(done)
    assert outcome.attained.goodput_per_s == pytest.approx(kept / run.summary()["duration"])
    assert f"{made.chosen.outcome.attained.share:.2%} of the requests are within all limits" in Screen(made).details[1]


def test_how_far_a_cluster_misses_is_said(scenario):
    made = plan(scenario, slo="ttft p90 < 100 ms, tpot p90 < 1 ms", max_gpus=1, seeds=1, engine="here", changes=RARE)
    (row, *_) = made.nearest
    (first,) = [note for note in Screen(made).details if note.startswith(row.candidate.label)]
    for term in made.slo.terms:
        reading = row.outcome.judgement.readings[term]
        assert (f"{term} is {reading.value_text} (limit" in first) == (not reading.is_met)
    assert made.chosen is None


TRIED = {
    "page_size": [1, 64],
    "decode.radix_cache": [True, False],
    "decode.max_running_requests": [8, 256],
    "prefill.chunked_prefill_tokens": [2048, 8192],
    "aggregated.chunked_prefill_tokens": [1024, 8192],
    "network.transport": ["mooncake-tcp", "mooncake-rdma"],
    "router.prefill": ["round_robin", {"use": "cache_aware", "match_threshold": 0.3}],
}


@pytest.mark.parametrize("path", TRIED)
def test_any_field_may_be_tried(scenario, tmp_path, path):
    """Those of a role by clusters that have it, each value once."""
    base = base_of(scenario, AskOptions(), [], folder=tmp_path, starter={})
    candidates = Space({"h100": 1.0}, 3, {path: TRIED[path]}).candidates(base)
    absent = {"prefill": 1, "decode": 1, "network": 1, "aggregated": 2}.get(path.partition(".")[0])
    for one in candidates:
        resolve(base.changed(one.changes))
        assert (path in one.changes) == (len(one.roles) != absent)
        if path in one.changes:
            alike = [other for other in candidates if without(other, path) == without(one, path)]
            assert sorted(str(other.changes[path]) for other in alike) == sorted(map(str, TRIED[path]))


def test_sizes_and_numbers_of_a_role_may_be_named(scenario, tmp_path):
    base = base_of(scenario, AskOptions(), [], folder=tmp_path, starter={})
    tried = {"decode.tp": [2, 8], "prefill.instances": [1, 3], "decode.dp": [1, 2]}
    pairs = [one for one in Space({"h100": 1.0}, 16, tried).candidates(base) if not one.is_aggregated]
    found = {(one.counts[0], one.changes["decode.tp"], one.changes["decode.dp"]) for one in pairs}
    assert found == {(count, tp, dp) for count in (1, 3) for tp in (2, 8) for dp in (1, 2)}
    for one in pairs:
        assert one.num_gpus == base.changed(one.changes).num_gpus


@pytest.mark.parametrize(
    ("changes", "tried", "expected"),
    [
        ([], {}, {(1, 1), (2, 1), (2, 2), (4, 1), (4, 4)}),
        (["model=qwen3-8b"], {}, {(1, 1), (2, 1), (4, 1)}),
        (["decode.dp=1"], {}, {(1, 1), (2, 1), (4, 1)}),
        ([], {"decode.dp": [1, 4], "decode.tp": [2, 4]}, {(2, 1), (4, 1), (4, 4)}),
    ],
)
def test_all_gpus_attend_for_themselves_where_they_would_hold_the_same_latents(
    scenario, tmp_path, changes, tried, expected
):
    base = base_of(scenario, AskOptions(), ["model=tiny-deepseek-v3", *changes], folder=tmp_path, starter={})
    pairs = [one for one in Space({"h100": 1.0}, 5, tried).candidates(base) if not one.is_aggregated]
    made = [base.changed(one.changes) for one in pairs]
    assert {(one.decode.tp, one.decode.dp) for one in made} == expected
    for one, scenario_of_one in zip(pairs, made, strict=True):
        resolve(scenario_of_one)
        assert one.num_gpus == scenario_of_one.num_gpus
        is_routed = max(*one.counts, scenario_of_one.prefill.dp, scenario_of_one.decode.dp) > 1
        assert ("router" in one.changes) == is_routed


@pytest.mark.parametrize(
    ("changes", "tried"), [([], {"prefill.pp": [1, 2, 4], "prefill.cp": [1, 2]}), (["prefill.pp=2"], {})]
)
def test_prefill_has_the_stages_and_groups_that_are_tried_else_its_own(scenario, tmp_path, changes, tried):
    base = base_of(scenario, AskOptions(), changes, folder=tmp_path, starter={})
    space = Space({"h100": 1.0}, 9, tried)
    pairs = [one for one in space.candidates(base) if not one.is_aggregated]
    splits = {base.changed(one.changes).prefill.split[1:3] for one in pairs}
    assert splits == ({(1, 1), (2, 1), (4, 1), (1, 2)} if tried else {(2, 1)})
    for one in pairs:
        made = base.changed(one.changes)
        assert (one.num_gpus, one.servers[0].split) == (made.num_gpus, made.prefill.split)
        assert f"PP{made.prefill.pp}" in one.label or made.prefill.pp == 1
    assert space.own(base).num_gpus == base.scenario.num_gpus
    assert all(one.price_per_h == one.num_gpus for one in pairs)


def test_aggregated_servers_share_prompts_as_tried(scenario, tmp_path):
    base = base_of(scenario, AskOptions(), [], folder=tmp_path, starter={})
    found = [one for one in Space({"h100": 1.0}, 4, {"aggregated.cp": [1, 2]}).candidates(base) if one.is_aggregated]
    assert {(one.servers[0].split.tp, one.servers[0].split.cp) for one in found} >= {(2, 2), (4, 2), (4, 1)}
    assert all(("CP2" in one.label) == (one.servers[0].split.cp == 2) for one in found)


def test_decode_divides_kv_as_tried(scenario, tmp_path):
    base = base_of(scenario, AskOptions(), ["model=moonlight-16b-a3b"], folder=tmp_path, starter={})
    tried = {"decode.dcp": [1, 2], "aggregated.dcp": [4]}
    found = Space({"h100": 1.0}, 8, {**tried, "prefill.tp": [1], "decode.tp": [1, 2, 4]}).candidates(base)
    splits = {one.servers[-1].split for one in found if not one.is_aggregated}
    assert {(split.tp, split.dcp) for split in splits} == {(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)}
    assert {one.servers[-1].split.dcp for one in found if one.is_aggregated} == {4}
    for one in found:
        made = base.changed(one.changes).servers[1]
        assert made.split == one.servers[-1].split
        assert f"DCP{made.dcp}" in one.label or made.dcp == 1


def without(one, path):
    return {field: value for field, value in one.changes.items() if field != path}


def test_other_settings_are_tried_where_nobody_chose_them(scenario, tmp_path):
    base = base_of(scenario, AskOptions(), ["decode.radix_cache=false"], folder=tmp_path, starter={})
    space = Space({"h100": 1.0}, 2, {"page_size": [16]})
    for one in space.candidates(base):
        others = list(with_other_settings(base, one))
        paths = {path for other in others for path in other.changes.keys() - one.changes.keys()}
        roles = {"aggregated": "aggregated", "prefill": "decode"}[one.roles[0]]
        assert paths == {f"{one.roles[0]}.chunked_prefill_tokens", f"{roles}.max_running_requests"}
        assert len({other.label for other in others}) == len(others)
        own = resolve(base.changed(one.changes))
        for other in others:
            ((path, value),) = ((path, other.changes[path]) for path in other.changes.keys() - one.changes.keys())
            role, _, field = path.partition(".")
            assert value != getattr(getattr(own, role), field)
        for other in others:
            assert base.changed(other.changes) != base.changed(one.changes)


@pytest.mark.usefixtures("no_limits")
def test_a_setting_may_make_a_cheaper_cluster_do(tmp_path):
    """One GPU with fewer requests at a time keeps the TPOT, and their queue is short enough."""
    path = tmp_path / "scenario.yaml"
    load = "{use: random_lengths, num_requests: 150, input_tokens: 60, output_tokens: 200}"
    path.write_text(re.sub("(?<=workload: ).*", load, SCENARIO))
    slo = "tpot p99 < 11 ms, e2e p99 < 20 s"
    made = plan(path, slo=slo, max_gpus=2, seeds=1, engine="here", speedup="1.2")
    assert made.chosen is not None
    assert made.chosen.candidate.label == "1 aggregated of TP1, aggregated.max_running_requests=32"
    assert {row.candidate.family for row in made.nearest} == {" aggregated of TP1"}
    assert made.loads[1.2].candidate == made.chosen.candidate, "the setting is tried at another load, too"


def test_a_changed_setting_is_given_to_other_clusters_that_have_it(scenario, tmp_path):
    """A larger cluster belongs to the family of a changed one if it has the same setting."""
    base = base_of(scenario, AskOptions(), ["router=random"], folder=tmp_path, starter={})
    candidates = Space({"h100": 1.0}, 3, {}).candidates(base)
    pair = next(one for one in candidates if one.label == "1P1D of TP1")
    assert not list(with_setting_of(pair, candidates))
    changed = next(one for one in with_other_settings(base, pair) if "decode.max_running_requests" in one.changes)
    others = list(with_setting_of(changed, candidates))
    assert {one.counts for one in others} == {one.counts for one in candidates if not one.is_aggregated}
    for one in others:
        value = one.changes["decode.max_running_requests"]
        assert base.changed(one.changes).decode.max_running_requests == value
        assert value == changed.changes["decode.max_running_requests"]
    larger = [one.counts for one in others if changed.is_part_of(one)]
    assert changed.counts in larger
    assert len(larger) > 1
    assert not any(changed.is_part_of(one) for one in candidates)


@pytest.mark.usefixtures("no_limits")
def test_clusters_that_are_too_dear_for_the_report_are_not_simulated(scenario, monkeypatch):
    """Two servers instead of one cost twice as much."""
    counts = []
    simulated = Trials.outcomes

    def outcomes(self, changes):
        counts.extend(one["aggregated"]["instances"] for one in changes if "aggregated" in one)
        return simulated(self, changes)

    monkeypatch.setattr(Trials, "outcomes", outcomes)
    tried = {"router": ["random"]}
    made = plan(scenario, slo="ttft p50 < 9 s", max_gpus=2, seeds=1, engine="here", changes=RARE, tried=tried)
    assert made.chosen.candidate.label == "1 aggregated of TP1, random"
    assert set(counts) == {1}


@pytest.mark.parametrize(("tp", "word"), [(1, "medium"), (2, "high")])
@pytest.mark.usefixtures("no_limits")
def test_the_confidence_is_in_the_plans_own_servers(tp, word):
    """The profile was measured with TP2, which the scenario has."""
    made = plan(
        ROOT / "experiments" / "decode-radix-b200" / "scenario.yaml",
        slo="ttft p50 < 100 s",
        max_gpus=4,
        seeds=1,
        engine="here",
        tried={f"{role}.tp": [tp] for role in ("aggregated", "prefill", "decode")},
        changes=[
            "workload={use: random_lengths, num_requests: 4, input_tokens: 300, output_tokens: 5}",
            "client={use: closed_loop, concurrency: 1}",
        ],
    )
    assert Screen(made).confidence.word == word
    assert made.foreign_setup == (() if tp == 2 else ("TP1",))


@pytest.mark.parametrize(
    ("changes", "tried", "routers"),
    [
        ([], {}, {"cache_aware", "least_loaded"}),
        (["router=random"], {}, {None}),
        (["router.shedding={use: queue_limit, max_queued_requests: 9}"], {}, {None}),
        (["router=random"], {"router": ["random", "round_robin"]}, {"random", "round_robin"}),
    ],
)
def test_other_routers_are_tried_where_nobody_named_one(scenario, tmp_path, changes, tried, routers):
    base = base_of(scenario, AskOptions(), changes, folder=tmp_path, starter={})
    several = [one for one in Space({"h100": 1.0}, 4, tried).candidates(base) if max(one.counts) > 1]
    assert {one.changes.get("router") for one in several} == routers
    shedding = base.scenario.router.shedding
    assert all(base.changed(one.changes).router.shedding == shedding for one in several)


@pytest.mark.parametrize(("changes", "tried"), [(["decode.dp=2"], {}), ([], {"decode.dp": [2], "prefill.dp": [1, 2]})])
def test_encode_instances_go_with_ranks_of_decode_but_not_of_prefill(scenario, tmp_path, changes, tried):
    encode = ["model=qwen3-vl-8b", "encode={gpu: h100}", "prefill.tp=2", "decode.tp=2"]
    base = base_of(scenario, AskOptions(), [*encode, *changes], folder=tmp_path, starter={})
    found = [one for one in Space({"h100": 1.0}, 6, tried).candidates(base) if not one.is_aggregated]
    ranks = {one.encoders.number > 0: set() for one in found}
    for one in found:
        made = base.changed(one.changes)
        ranks[made.encode is not None].add((made.prefill.dp, made.decode.dp))
    assert ranks[True] == {(1, 2)}
    assert ranks[False] == ({(1, 2), (2, 2)} if tried else {(1, 2)})


@pytest.mark.usefixtures("no_limits")
def test_classes_have_limits_of_their_own(scenario, tmp_path):
    """What a class misses makes the plan larger; the limits of one that no request has are an error."""
    rows = [f"{0.05 * i},{1500 if i % 2 else 400},40,{'batch' if i % 2 else 'chat'}" for i in range(40)]
    trace = tmp_path / "classes.csv"
    trace.write_text("\n".join(["arrival_s,in_tokens,out_tokens,class", *rows]))

    def planned(slo, out=None):
        made = plan(scenario, trace=trace, slo=slo, max_gpus=4, engine="here", out=out)
        assert made.chosen is not None
        return made

    loose = planned("chat: ttft p90 < 200 ms; batch: ttft p90 < 30 s", tmp_path / "loose")
    strict = planned("ttft p90 < 40 ms")
    assert Screen(loose).clusters.columns[2:4] == ["chat TTFT p90", "batch TTFT p90"]
    assert loose.chosen.candidate.price_per_h < strict.chosen.candidate.price_per_h
    assert planned("ttft p90 < 40 ms; chat: ttft p90 < 9 s").chosen.candidate == strict.chosen.candidate
    classes = loose.chosen.outcome.classes
    assert {name: one.num_requests for name, one in classes.items()} == {"batch": 20, "chat": 20}
    assert sum(one.goodput_per_s for one in classes.values()) == pytest.approx(
        loose.chosen.outcome.attained.goodput_per_s
    )
    (table,) = [table for table in plan_page(tmp_path / "loose").tables if table.title == "Classes of requests"]
    assert [[cell.text for cell in row[:3]] for row in table.rows] == [
        [name, "20", f"{classes[name].share:.2%}"] for name in ("batch", "chat")
    ]
    with pytest.raises(
        ConfigError, match="no request of class 'chats' \\(did you mean 'chat'\\?\\); there are chat, batch"
    ):
        planned("chats: ttft p90 < 1 s")
    with pytest.raises(ConfigError, match="no request of class 'chat'; they have no classes"):
        plan(scenario, slo="chat: ttft p90 < 1 s")


SLOS = [
    "TTFT p99 < 2 s, tpot p99.9 <= 50 ms",
    "e2e <= 9 s and TTFT < 2 s for 95%",
    "chat: ttft p99 < 1 s, tpot p99 < 40 ms; e2e p99 < 9 s; batch: e2e p95 < 60 s",
    "a b: ttft p9 < 1 s; c: ttft < 2 s and tpot < 50 ms for 99 %; a b: ttft p99 < 2 s",
]


@pytest.mark.parametrize("text", SLOS)
def test_an_slo_is_read_as_it_is_printed(text):
    slo = Slo.parse(text)
    assert Slo.parse(str(slo)) == slo
    classes = dict.fromkeys(term.request_class for term in slo.terms if term.request_class)
    assert list(classes) == [name for name in ("chat", "batch", "a b", "c") if f"{name}:" in text]


def test_an_slo_is_printed_as_it_is_read():
    slo = Slo.parse("TTFT p99 < 2 s, tpot p99.9 <= 50 ms")
    assert str(slo) == "TTFT p99 < 2 s, TPOT p99.9 < 50 ms"
    assert Slo.parse(str(slo)) == slo
    with pytest.raises(ConfigError):
        Slo.parse("")
