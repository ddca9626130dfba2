"""The search finds what trying every cluster finds, and a run that ends early is judged as the whole one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import pytest

from pdsim.scenario.yaml_file import write_yaml
from pdsim.study.base import AskOptions, Base, base_of
from pdsim.study.examination import lone_request, requests_alone
from pdsim.study.planning.search import Tries, cheapest, search
from pdsim.study.points.engine import InProcessEngine, Work
from pdsim.study.points.store import Store
from pdsim.study.space import CandidateCluster, Space
from pdsim.study.trials import Trials
from pdsim.study.verdict.outcome import Outcome, outcome_of
from pdsim.study.verdict.readings import Times
from pdsim.study.verdict.slo import Slo, Term

LENGTHS = {"use": "uniform", "low": 20, "high": 300}
LOADS = [
    {"use": "random_lengths", "input_tokens": 2000, "output_tokens": 60},
    {"use": "random_lengths", "input_tokens": 300, "output_tokens": LENGTHS},
    {"use": "prefix_pool", "num_prefixes": 4, "prefix_tokens": 1500, "input_tokens": 300, "output_tokens": 40},
]
CLASSES = ("chat", "batch", "")
"""Of the requests of the last load, a trace; an SLO has limits for two of them."""
LOADS.append({"use": "request_table", "path": "classes.csv"})
LOOSE = Slo.parse("ttft p50 < 1e6 s")
SPACE = Space({"h100": 1.0}, 12, {})


def base_for(folder: Path, load: int) -> Base:
    rows = [f"0,{Random(i).randint(300, 3000)},{1 + i % 60},{CLASSES[i % 3]}" for i in range(40)]
    (folder / "classes.csv").write_text("\n".join(["arrival_s,in_tokens,out_tokens,class", *rows]))
    scenario = {
        "model": "llama-3.1-70b",
        "prefill": {"gpu": "h100"},
        "decode": {"gpu": "h100"},
        "workload": {**LOADS[load], "num_requests": 25},
        "client": {"use": "open_loop", "arrivals": {"use": "gamma", "rate": "6 /s", "burstiness": 0.3}},
    }
    path = folder / "scenario.yaml"
    write_yaml(scenario, path)
    return base_of(path, AskOptions(), (), folder=folder, starter={})


def trials_of(base: Base, slo: Slo, folder: Path) -> Trials:
    return Trials(base, slo, 1, Work(Store(folder), InProcessEngine()))


TRIED = [
    {},
    {"router": ["cache_aware"]},
    {"router": ["round_robin", "least_loaded"]},
    {"prefill.instances": [1, 3], "decode.tp": [2, 4]},
    {"network.staging": [None, {"ring": "1 GiB"}]},
    {"aggregated.chunked_prefill_tokens": [1024, 8192], "decode.tp": [4]},
]
STAGES = {
    "prefill.pp": [1, 2, 4],
    "prefill.cp": [1, 2],
    "prefill.tp": [2, 4, 8],
    "decode.tp": [4],
    "aggregated.instances": [],
}


@cache
def trials_for(load: int) -> Trials:
    """Trials whose runs stay for the session."""
    folder = Path(mkdtemp())
    return trials_of(base_for(folder, load), LOOSE, folder)


def every_run(load: int, space: Space) -> dict[CandidateCluster, list[dict[str, Any]]]:
    """Runs of every cluster, whole."""
    trials = trials_for(load)
    candidates = space.candidates(trials.base)
    runs = dict(zip(candidates, trials.whole_runs([one.changes for one in candidates]), strict=True))
    assert len(runs) == len(candidates), "each has a name of its own"
    return runs


def test_routers_that_are_tried_are_the_engines(tmp_path: Path):
    """vLLM's router has no least_loaded: a plan of it starts as it was simulated."""
    base = base_for(tmp_path, 0)
    for engine, routers in (("sglang", {"cache_aware", "least_loaded"}), ("vllm", {"cache_aware", "power_of_two"})):
        candidates = SPACE.candidates(replace(base, scenario=base.scenario.model_copy(update={"engine": engine})))
        assert {one.changes["router"] for one in candidates if "router" in one.changes} == routers


def space_of(seed: int) -> Space:
    random = Random(seed)
    gpus = random.choice((["h100"], ["h200"], ["h100", "h200"]))
    prices = {gpu: round(random.uniform(1, 3), 1) for gpu in gpus}
    return Space(prices, random.choice((8, 10, 12)) if len(gpus) == 1 else 6, random.choice(TRIED))


def slo_of(seed: int, *, has_classes: bool) -> Slo:
    random = Random(seed)
    if has_classes:
        limits = [f"{name}: {slo_of(100 * seed + i, has_classes=False)}" for i, name in enumerate(CLASSES[:2])]
        return Slo.parse("; ".join([*limits, "e2e p100 < 60 s"]))
    ttft, tpot = ("ttft", random.uniform(100, 2500)), ("tpot", random.uniform(15, 60))
    if random.random() < 0.3:
        return Slo((Term((ttft, tpot), random.choice((50, 90, 99)), is_share=True),))
    return Slo(tuple(Term((limit,), random.choice((50, 90, 99))) for limit in (ttft, tpot)))


def strict(slo: Slo, factor: float) -> Slo:
    """Limits so many times smaller."""
    limits = [tuple((name, ms / factor) for name, ms in term.limits_ms) for term in slo.terms]
    return Slo(tuple(replace(term, limits_ms=of_term) for term, of_term in zip(slo.terms, limits, strict=True)))


def tries_of(outcome: Callable[[CandidateCluster], Outcome]) -> Tries:
    def evaluate(batch: Sequence[CandidateCluster]) -> list[Outcome]:
        return [outcome(one) for one in batch]

    return Tries(evaluate, evaluate)


@pytest.mark.parametrize("seed", range(30))
def test_search_finds_the_price_that_trying_all_finds(seed):
    load = seed % len(LOADS)
    slo = slo_of(seed, has_classes=load == len(LOADS) - 1)
    runs = every_run(load, space_of(seed))
    outcomes = {one: outcome_of(paths, slo) for one, paths in runs.items()}
    asked: list[CandidateCluster] = []
    hopeful = Random(seed).sample(list(runs), len(runs) // 8)

    def first(batch):
        """As one seed judges: some clusters meet the SLO that miss it with all seeds."""
        asked.extend(batch)
        return [replace(outcomes[one], meets=True) if one in hopeful else outcomes[one] for one in batch]

    tried = search(list(runs), Tries(first, lambda batch: [outcomes[one] for one in batch]))
    found, best = cheapest(tried), cheapest(outcomes)
    assert [one.price_per_h for one in found[:1]] == [one.price_per_h for one in best[:1]]
    assert len(asked) == len(set(asked))
    assert not best or len(runs) < 30 or len(asked) < len(runs)


@pytest.mark.parametrize(("ttft_ms", "wins"), [(180, "TP4 PP2"), (400, "TP4"), (6000, "TP4")])
def test_search_finds_what_trying_all_finds_of_stages_and_groups(ttft_ms, wins):
    """Of disaggregated clusters alone; groups need TP8, for each has the whole model."""
    runs = every_run(0, Space({"h100": 1.0}, 20, {**STAGES, "prefill.chunked_prefill_tokens": [512]}))
    assert {one.servers[0].split[1:3] for one in runs} >= {(2, 1), (4, 1), (1, 2)}
    slo = Slo.parse(f"ttft p50 < {ttft_ms} ms, tpot p99 < 60 ms")
    outcomes = {one: outcome_of(paths, slo) for one, paths in runs.items()}
    found = cheapest(search(list(runs), tries_of(lambda one: outcomes[one])))
    assert found == cheapest(outcomes)
    assert found[0].servers[0].split.words == wins


@pytest.mark.parametrize("load", range(len(LOADS)))
def test_a_run_that_ends_early_is_judged_as_the_whole(load, tmp_path):
    base, runs = trials_for(load).base, every_run(load, SPACE)
    slo = strict(slo_of(load, has_classes=load == len(LOADS) - 1), 3)
    some = list(runs)[:: max(1, len(runs) // 12)]
    early = trials_of(base, slo, tmp_path).outcomes([one.changes for one in some])
    whole = [outcome_of(runs[one], slo) for one in some]
    assert [outcome.meets for outcome in early] == [outcome.meets for outcome in whole]
    assert [outcome.judgement for outcome in early if outcome.meets] == [o.judgement for o in whole if o.meets]
    assert any(not outcome.meets for outcome in early)


def test_a_seed_that_misses_is_the_last_and_whole_runs_serve_again(tmp_path: Path):
    """What the first seed calls missing misses for certain, and what meets the SLO is judged as by whole runs."""
    base = base_for(tmp_path, 0)
    slo = Slo.parse("ttft p90 < 2500 ms, tpot p99 < 90 ms")
    lazy, fresh = (Work(Store(tmp_path / name), InProcessEngine()) for name in ("lazy", "fresh"))
    trials = Trials(base, slo, 3, lazy)
    some = [one.changes for one in SPACE.candidates(base)[::3]]
    first, found = trials.first_outcomes(some), trials.outcomes(some)
    num_early = lazy.num_computed
    whole = Trials(base, slo, 3, fresh).whole_runs(some)
    for of_first, outcome, rows in zip(first, found, whole, strict=True):
        assert of_first.meets or not outcome.meets
        seeds = [outcome_of([row], slo).meets for row in rows]
        assert outcome.meets or not all(seeds)
        assert not outcome.meets or outcome == outcome_of(rows, slo)
    assert {one.meets for one in found} == {True, False}
    assert num_early < 3 * len(some)
    assert [one.judgement for one in trials.whole(some)] == [outcome_of(rows, slo).judgement for rows in whole]
    assert lazy.num_computed - num_early < fresh.num_computed


@pytest.mark.parametrize("seed", range(10))
def test_a_class_is_judged_as_if_its_requests_were_all(seed):
    """Those that did not finish, too, stand behind those that did."""
    random = Random(seed)
    slo = slo_of(seed, has_classes=False)
    done, lost = ([random.choice(CLASSES) for _ in range(count)] for count in (60, random.randint(0, 3)))
    times_ns = [(random.randint(10**7, 3 * 10**9), random.randint(0, 10**9), random.randint(1, 30)) for _ in done]

    def row(name: str | None) -> dict[str, object]:
        chosen = [times for times, one in zip(times_ns, done, strict=True) if name in (None, one)]
        return {
            "ttft_ns": [ttft_ns for ttft_ns, _, _ in chosen],
            "e2e_ns": [ttft_ns + more_ns for ttft_ns, more_ns, _ in chosen],
            "output_tokens": [tokens for _, _, tokens in chosen],
            "failed": len(lost) if name is None else lost.count(name),
            "unfinished": 0,
            "classes": None,
            "duration": 1.0,
        }

    for name in CLASSES[:2]:
        of_class = [replace(term, request_class=name) for term in slo.terms]
        found = [term.reading(Times.of_row({**row(None), "classes": done + lost})).value for term in of_class]
        assert found == [term.reading(Times.of_row(row(name))).value for term in slo.terms]


@pytest.mark.parametrize("load", range(len(LOADS)))
def test_a_lone_request_is_the_one_that_the_run_is_judged_by(load, tmp_path):
    base = base_for(tmp_path, load)
    slo = strict(slo_of(load, has_classes=load == len(LOADS) - 1), 50)
    trials = trials_of(base, slo, tmp_path)
    alone = base.one_at_a_time({"prefill.tp": 4, "decode.tp": 4})
    (outcome,) = trials.whole([alone])
    requests = requests_alone(trials, {"prefill.tp": 4, "decode.tp": 4})
    found = lone_request("1P1D", slo, requests)
    assert found is not None
    assert (found.term, found.ratio) == (outcome.judgement.worst, pytest.approx(outcome.ratio))


def test_what_limits_a_cluster_is_the_same_with_runs_that_are_there(tmp_path: Path):
    base, changes = base_for(tmp_path, 0), {"prefill.tp": 4, "decode.tp": 4}
    slo = Slo.parse("ttft p90 < 500 ms")
    first, second = (Trials(base, slo, 2, Work(Store(tmp_path / n), InProcessEngine())) for n in ("first", "second"))
    second.whole([changes])
    second.repeated([changes])
    assert second.limit(changes, slo.terms[0]) == first.limit(changes, slo.terms[0])


@pytest.mark.parametrize(
    ("change", "left_out"),
    [
        ("client={use: closed_loop, concurrency: 5}", "warm_up_requests"),
        ("router={shedding: {use: queue_limit, max_queued_requests: 3}}", "failed"),
    ],
)
def test_requests_that_ended_are_counted_alike_whether_a_run_ends_early_or_not(tmp_path: Path, change, left_out):
    """Both count failed requests and those that warm up."""
    path = base_for(tmp_path, 0).path
    base = base_of(path, AskOptions(), (change,), folder=tmp_path, starter={})
    trials, sizes = trials_of(base, Slo.parse("tpot p50 < 1 us"), tmp_path), {"prefill.tp": 4, "decode.tp": 4}
    early = trials.outcomes([sizes])[0].num_ended
    ((run,),) = trials.whole_runs([sizes])
    assert run[left_out] > 0
    assert early < trials.whole([sizes])[0].num_ended == 25


def test_a_search_without_any_that_meets_it_ends():
    runs = every_run(0, SPACE)
    missed = Outcome(meets=False, reason="too slow", num_ended=0)
    assert cheapest(search(list(runs), tries_of(lambda _: missed))) == []


ENCODED = """
name: encoded
model: qwen3-vl-8b
page_size: 16
prefill: {gpu: h100}
decode: {gpu: h100}
encode: {gpu: h100, instances: 2, transport: mooncake-rdma}
cost: roofline
workload: {use: random_lengths, num_requests: 20, input_tokens: 200, output_tokens: 4, images: 4, image_tokens: 500}
client: {use: open_loop, arrivals: {use: poisson, rate: 5/s}}
"""


def test_clusters_have_as_many_encode_instances_as_is_said(tmp_path: Path):
    """Each cluster is a scenario of as many GPUs, and its price counts all of them."""
    path = tmp_path / "scenario.yaml"
    path.write_text(ENCODED)
    base = base_of(path, AskOptions(), (), folder=tmp_path, starter={})
    space = Space({"h100": 2.0}, 4, {"prefill.tp": [1], "decode.tp": [1], "aggregated.tp": [1, 2]}, encoder_price=0.5)
    found = space.candidates(base)
    for one in found:
        scenario = base.changed(one.changes)
        number = 0 if scenario.encode is None else scenario.encode.instances
        assert (one.num_gpus, one.encoders.number) == (scenario.num_gpus, number)
        assert one.price_per_h == 2 * scenario.num_role_gpus + 0.5 * number
    assert {one.encoders.number for one in found} == {0, 1, 2}
    assert space.own(base).encoders.number == 2
    three = replace(space, tried={"encode.instances": [3]}).candidates(base)
    assert {one.encoders.number for one in three} == {3}
    batches = replace(space, tried={**space.tried, "encode.max_batch_size": [1, 8]}).candidates(base)
    assert len(batches) == sum(2 if one.encoders.number else 1 for one in found)
    assert all(base.changed(one.changes) for one in batches)
    fewer = next(one for one in found if one.numbers == {"prefill": 1, "decode": 1, "encode": 1})
    more = next(one for one in found if one.numbers == {"prefill": 1, "decode": 1, "encode": 2})
    alone = next(one for one in found if one.numbers == {"prefill": 1, "decode": 1})
    assert fewer.is_part_of(more)
    assert not more.is_part_of(fewer)
    assert not alone.is_part_of(more)


def test_encode_instances_are_planned_where_they_are_cheap(tmp_path: Path):
    """Images of 15 requests/s keep one prefill server too busy. An encode instance is cheaper than a second one."""
    path = tmp_path / "scenario.yaml"
    path.write_text(ENCODED)
    sizes = {f"{role}.tp": [1] for role in ("prefill", "decode", "aggregated")}
    tried = {**sizes, "router": ["round_robin"], "decode.instances": [1], "aggregated.instances": [9]}
    base = base_of(path, AskOptions(), ("client.arrivals.rate=15/s",), folder=tmp_path, starter={})
    space = Space({"h100": 4.0}, 4, tried, encoder_price=0.5)
    trials, candidates = trials_of(base, Slo.parse("ttft p90 < 400 ms"), tmp_path), space.candidates(base)
    outcomes = dict(zip(candidates, trials.outcomes([one.changes for one in candidates]), strict=True))
    found = cheapest(search(candidates, tries_of(outcomes.__getitem__)))
    assert [one.label for one in found] == ["1P1D of TP1, 1 encoder on h100, round_robin"]
    assert found == cheapest(outcomes)
