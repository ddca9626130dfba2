"""Sweeps as a whole: what is computed, once; what is kept; what survives."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdsim
from pdsim.scenario.building.cluster import build
from pdsim.scenario.loading import parse_scenario
from pdsim.study.points.store import Store
from pdsim.study.points.tasks import Planner, Task
from pdsim.study.points.worker import compute
from pdsim.study.sweeping.sweep import read_sweep
from pdsim.study.sweeping.sweep_file import designed_points, load_sweep
from tests.support import examples
from tests.sweep_files import SCENARIO, SWEEP, shards, write_sweep

POLICY = '''\
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from pdsim.policy.prefill import FirstComeFirstServed


@dataclass
class Deadly:
    """Kills its process, the first so many times."""

    times: int
    memory: str

    def select(self, view):
        deaths = Path(self.memory)
        if len(deaths.read_text() if deaths.exists() else "") < self.times:
            with deaths.open("a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)
        return FirstComeFirstServed().select(view)
'''


MOONCAKE = Path(__file__).parent.parent.parent / "experiments" / "sweep-mooncake" / "sweep.yaml"


def plan(path):
    file = load_sweep(path)
    return Planner(path, path.parent / file.scenario, changes=(), seeds=file.seeds).plan(designed_points(file))


def keys(points):
    return [task.key for point in points for task in point.tasks.values()]


# Once, and the same.


@pytest.mark.parametrize(
    "changes", [{}, {"decode.instances": 2}, {"model": "llama-3.1-70b", "prefill.pool_tokens": None}], ids=str
)
def test_the_tasks_of_several_seeds_are_those_of_each_seed_alone(tmp_path, changes):
    """They are checked together. The last changes make a cluster that cannot run."""
    path = write_sweep(tmp_path).parent / "base.yaml"

    def planned(seeds):
        point, _ = Planner("here", path, changes=(), seeds=seeds).plan([changes, {}])
        return point.tasks

    assert planned([3, 1, 2]) == {seed: planned([seed])[seed] for seed in (3, 1, 2)}


@pytest.mark.parametrize(
    "again", [lambda path, out: pdsim.sweep(path, out=out, jobs=1), lambda _path, out: read_sweep(out)]
)
def test_a_run_that_is_kept_is_read_once(tmp_path, monkeypatch, again):
    path, read = write_sweep(tmp_path), []
    first = pdsim.sweep(path, out=tmp_path / "out", jobs=1)
    plain = Store.read
    monkeypatch.setattr(Store, "read", lambda store, key: (read.append(key), plain(store, key))[1])
    points = again(path, tmp_path / "out").points
    assert [point.to_json() for point in points] == [point.to_json() for point in first.points]
    assert sorted(read) == sorted(path.stem for path in (tmp_path / "out" / "points").glob("*.json"))


def test_points_are_computed_once_and_read_together(tmp_path):
    path = write_sweep(tmp_path)
    first = pdsim.sweep(path, out=tmp_path / "out", jobs=2)
    assert (first.num_computed, first.num_kept) == (8, 0)
    again = pdsim.sweep(path, out=tmp_path / "out", jobs=1)
    assert (again.num_computed, again.num_kept) == (0, 8)
    assert json.dumps(again.to_json()["points"]) == json.dumps(first.to_json()["points"])
    assert again.points == first.points
    rows = list(map(json.loads, shards(tmp_path / "out").values()))
    assert [row["completed"] for row in rows] == [20] * 8
    planned = list(map(json.loads, (tmp_path / "out" / "plan.jsonl").read_text().splitlines()))
    assert sorted(row["key"] for row in planned) == sorted(row["key"] for row in rows)
    assert [row["page_size"] for row in planned] == [4] * 4 + [8] * 4


def test_neither_jobs_nor_the_order_of_points_change_a_shard(tmp_path):
    path = write_sweep(tmp_path)
    pdsim.sweep(path, out=tmp_path / "one", jobs=1)
    turned = SWEEP.replace("[4, 8]", "[8, 4]").replace("[1, 2]", "[2, 1]")
    pdsim.sweep(write_sweep(tmp_path, turned), out=tmp_path / "three", jobs=3)
    assert shards(tmp_path / "one") == shards(tmp_path / "three")
    (task, *_) = plan(path)[0].tasks.values()
    assert compute(task).row == json.loads(shards(tmp_path / "one")[f"{task.key}.json"])


def test_a_process_reads_a_trace_once(tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": i, "input_length": 10, "output_length": 3, "hash_ids": [i]} for i in range(3)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    scenario = SCENARIO[: SCENARIO.index("workload")] + f"workload: {{use: mooncake_trace, path: {trace}}}\n"
    first, second = plan(write_sweep(tmp_path, "scenario: base.yaml\ngrid: {page_size: [4, 8]}\n", scenario))
    compute(first.tasks[0])
    trace.unlink()
    assert compute(second.tasks[0]).row["completed"] == 3


def test_a_wider_sweep_computes_what_is_new(tmp_path):
    pdsim.sweep(write_sweep(tmp_path), out=tmp_path / "out", jobs=2)
    wider = pdsim.sweep(write_sweep(tmp_path, SWEEP.replace("[1, 2]", "[1, 2, 3]")), out=tmp_path / "out", jobs=2)
    assert (wider.num_computed, wider.num_kept) == (4, 8)


def test_other_slos_need_no_new_run(tmp_path):
    pdsim.sweep(write_sweep(tmp_path), out=tmp_path / "out", jobs=2)
    strict = pdsim.sweep(write_sweep(tmp_path, SWEEP.replace("ttft < 1 s", "ttft < 1 ns")), out=tmp_path / "out")
    assert strict.num_computed == 0
    assert not any(point.meets("chat") for point in strict.points)


# What a key is a digest of.


def test_equal_points_have_one_key(tmp_path):
    """However they are written: in two designs, by a default, under another name."""
    written = (
        SWEEP + "points: [{page_size: 4, decode.radix_cache: false}, {page_size: 4}, {name: other, page_size: 4}]\n"
    )
    points = plan(write_sweep(tmp_path, written))
    assert len({point.number for point in points}) == len(points) - 1
    assert len(set(keys(points))) == 8
    assert pdsim.sweep(tmp_path / "sweep.yaml", out=tmp_path / "out", jobs=2).num_computed == 8


CHANGED = [
    ("page_size: 4", "page_size: 2"),
    ("input_tokens: 60", "input_tokens: 61"),
    ("rate: 20/s", "rate: 21/s"),
    ("gpu: h100", "gpu: h200"),
    ("qwen3-0.6b", "qwen3-8b"),
]


@pytest.mark.parametrize(("before", "after"), CHANGED)
def test_whatever_changes_a_result_changes_the_key(tmp_path, before, after):
    sweep = "scenario: base.yaml\npoints: [{}]\nseeds: [1, 2]\n"
    key = keys(plan(write_sweep(tmp_path, sweep)))
    other = keys(plan(write_sweep(tmp_path, sweep, SCENARIO.replace(before, after))))
    assert len({*key, *other}) == 4


def test_a_policy_of_ones_own_is_part_of_the_key(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = "from pdsim.policy.prefill import FirstComeFirstServed\nclass Mine(FirstComeFirstServed): ...\n"
    (tmp_path / "mine_before.py").write_text(source)
    (tmp_path / "mine_after.py").write_text(source + "# changed\n")
    sweep = "scenario: base.yaml\npoints: [{prefill.policy: 'mine_before:Mine'}]\n"
    (before,) = plan(write_sweep(tmp_path, sweep))
    (after,) = plan(write_sweep(tmp_path, sweep.replace("before", "after")))
    modules = [json.loads(point.tasks[0].identity)["modules"] for point in (before, after)]
    assert modules[0]["mine_before"] != modules[1]["mine_after"]


def test_the_trace_is_part_of_the_key_and_its_place_is_not(tmp_path):
    lines = [{"timestamp": i, "input_length": 10, "output_length": 3, "hash_ids": [i]} for i in range(3)]
    workload = "workload: {use: mooncake_trace, path: %s}\nclient: open_loop\n"
    found = []
    for name, trace in (("a", lines), ("b", lines), ("c", lines[:2])):
        (tmp_path / name).write_text("\n".join(map(json.dumps, trace)))
        scenario = SCENARIO[: SCENARIO.index("workload")] + workload % name
        found += keys(plan(write_sweep(tmp_path, "scenario: base.yaml\npoints: [{}]\n", scenario)))
    assert found[0] == found[1] != found[2]


@examples(20)
@given(
    seed=st.integers(0, 1000), sizes=st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=2, max_size=4, unique=True)
)
def test_all_points_see_the_same_requests_at_the_same_times(tmp_path_factory, seed, sizes):
    """Common random numbers: a difference between points is none of the load."""
    folder = tmp_path_factory.mktemp("sweep")
    points = plan(write_sweep(folder, f"scenario: base.yaml\nseeds: [{seed}]\ngrid: {{page_size: {sizes}}}\n"))
    assert len({json.loads(task.identity)["workload"] for point in points for task in point.tasks.values()}) == 1
    scenarios = [parse_scenario(task.data, base=folder) for point in points for task in point.tasks.values()]
    arrivals = [
        [r.arrival_ns for r in pdsim.simulate(scenario).records.requests] for scenario in (scenarios[0], scenarios[-1])
    ]
    assert arrivals[0] == arrivals[1]
    assert len(build(scenarios[0]).requests) == 20


# What fails.


def test_an_impossible_point_is_a_row(tmp_path):
    sweep = "scenario: base.yaml\npoints: [{}, {prefill.tp: 5}, {decode.pool_tokens: 12}]\n"
    result = pdsim.sweep(write_sweep(tmp_path, sweep), out=tmp_path / "out", jobs=2)
    good, layout, pool = result.points
    assert not good.error
    assert layout.error == "prefill: tp 5 does not divide the 16 query heads of qwen3-0.6b"
    assert "with decode.pool_tokens 12 an instance has room for 12" in pool.error
    assert pdsim.sweep(tmp_path / "sweep.yaml", out=tmp_path / "out").num_computed == 0


def deadly(tmp_path, times):
    (tmp_path / "deadly.py").write_text(POLICY)
    policy = f"{{use: 'deadly:Deadly', times: {times}, memory: {tmp_path / 'deaths'}}}"
    return write_sweep(
        tmp_path, f"scenario: base.yaml\npoints: [{{}}, {{prefill.policy: {policy}}}, {{page_size: 8}}]\n"
    )


def test_a_killed_worker_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    result = pdsim.sweep(deadly(tmp_path, 1), out=tmp_path / "out", jobs=2)
    assert not any(point.error for point in result.points)
    assert (tmp_path / "deaths").read_text() == "x"


def test_a_point_that_kills_twice_is_a_row_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    path = deadly(tmp_path, 2)
    result = pdsim.sweep(path, out=tmp_path / "out", jobs=1)
    assert [point.error for point in result.points] == ["", "its worker died 2 times, the last time of SIGKILL", ""]
    again = pdsim.sweep(path, out=tmp_path / "out", jobs=1)  # a death may have had other reasons than the point
    assert again.num_computed == 1
    assert not any(point.error for point in again.points)


MANY = f"scenario: base.yaml\nseeds: {list(range(8))}\npoints: [{{}}, {{page_size: 8}}]\n"


def test_a_worker_whose_answer_nobody_reads_ends_in_silence(tmp_path):
    command = [sys.executable, "-m", "pdsim.study.points.worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as worker:
        worker.stdout.close()
        pickle.dump(Task("key", "{}", {}, tmp_path), worker.stdin)
        worker.stdin.flush()
        assert worker.wait(60) == 0
        assert not worker.stderr.read()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_what_was_computed_before_a_sudden_end_is_kept(tmp_path, how):
    path = write_sweep(tmp_path, MANY, SCENARIO.replace("num_requests: 20", "num_requests: 300"))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "pdsim", "sweep", str(path), "--out", str(out), "--jobs", "2", "--json"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    moment = Random().uniform(0, 0.5)
    while not (out / "log.jsonl").exists() and running.poll() is None:
        time.sleep(0.01)
    time.sleep(moment)
    running.send_signal(how)
    _, error = running.communicate()
    if how == signal.SIGINT and running.returncode:
        assert running.returncode == 130
        assert error.endswith("interrupted; the same command goes on with what is missing\n")
        assert "Traceback" not in error
    kept = {path: path.stat().st_mtime_ns for path in (out / "points").glob("*.json")}
    result = pdsim.sweep(path, out=out, jobs=2)
    assert (result.num_kept, result.num_computed) == (len(kept), 16 - len(kept)), f"after {moment} s"
    assert kept == {path: path.stat().st_mtime_ns for path in kept}
    logged = [json.loads(line)["key"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert len(logged) == len(set(logged)) >= 15  # the last line of one that is killed may be missing
    assert len(kept) >= 1


# Designs and the search.


def test_fields_of_one_key_change_together(tmp_path):
    sweep = "scenario: base.yaml\ngrid: {'prefill.instances, decode.instances': [[1, 2], [2, 1]], page_size: [4, 8]}\n"
    points = plan(write_sweep(tmp_path, sweep))
    assert [tuple(point.changes.values()) for point in points] == [(1, 2, 4), (1, 2, 8), (2, 1, 4), (2, 1, 8)]


FIELDS = "{page_size: [1, 2, 4, 8], client.arrivals.rate: {from: 1/s, to: 100/s, scale: log}}"


@pytest.mark.parametrize("design", ["random", "sobol"])
def test_a_sample_is_that_of_its_seed(tmp_path, design):
    pytest.importorskip("scipy")
    written = f"scenario: base.yaml\n{design}: {{count: 16, seed: 3, fields: {FIELDS}}}\n"
    first, again = (designed_points(load_sweep(write_sweep(tmp_path, written))) for _ in range(2))
    other = designed_points(load_sweep(write_sweep(tmp_path, written.replace("seed: 3", "seed: 4"))))
    assert first == again != other
    assert len(first) == 16
    if design == "sobol":
        sizes = [point["page_size"] for point in first]
        assert [sizes.count(size) for size in (1, 2, 4, 8)] == [4] * 4


SEARCH = f"""\
scenario: base.yaml
slos: {{chat: ttft < 80 ms for 90 %}}
search: {{trials: 24, maximise: rate, fields: {FIELDS}}}
"""


def test_a_search_finds_the_rate_and_goes_on_where_it_was(tmp_path):
    pytest.importorskip("optuna")
    path = write_sweep(tmp_path, SEARCH)
    result = pdsim.sweep(path, out=tmp_path / "out", jobs=2)
    assert pdsim.sweep(path, out=tmp_path / "out", jobs=1).num_computed == 0
    best = result.best("chat")[0]
    assert best.meets("chat")
    assert best.metric("request_throughput").mean > 10


def test_a_search_without_optuna_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(pdsim.ConfigError, match=r"search needs Optuna.*pip install 'pdsim\[sweep\]'"):
        pdsim.sweep(write_sweep(tmp_path, SEARCH), out=tmp_path / "out")


def test_a_sobol_design_without_scipy_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(pdsim.ConfigError, match=r"sobol needs SciPy.*pip install 'pdsim\[sweep\]'"):
        pdsim.sweep(write_sweep(tmp_path, f"scenario: base.yaml\nsobol: {{count: 4, fields: {FIELDS}}}\n"))


# Ray.


def test_ray_without_ray_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(pdsim.ConfigError, match=r"engine ray needs Ray.*pip install 'pdsim\[ray\]'"):
        pdsim.sweep(write_sweep(tmp_path), out=tmp_path / "out", engine="ray")


@pytest.mark.parametrize(
    ("address", "message"),
    [("nowhere", "expected HOST:PORT or ray://HOST:PORT"), ("127.0.0.1:1", "cannot be reached: .*Connection refused")],
)
def test_a_cluster_that_is_not_there_is_named(tmp_path, monkeypatch, address, message):
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    with pytest.raises(pdsim.ConfigError, match=f"--engine ray:{address}: {message}"):
        pdsim.sweep(write_sweep(tmp_path), out=tmp_path / "out", engine=f"ray:{address}")


@pytest.fixture
def two_nodes():
    """The address of a Ray cluster on this machine."""
    pytest.importorskip("ray", reason="Ray is an extra")
    from ray.cluster_utils import Cluster  # noqa: PLC0415

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_cluster_of_two_nodes_gives_the_same_shards(tmp_path, two_nodes):
    path = write_sweep(tmp_path)
    pdsim.sweep(path, out=tmp_path / "pool", jobs=2)
    pdsim.sweep(path, out=tmp_path / "ray", engine=f"ray:{two_nodes}")
    assert shards(tmp_path / "pool") == shards(tmp_path / "ray")


@pytest.mark.nightly
@pytest.mark.filterwarnings("default")
def test_the_96_points_of_the_trace_are_the_same_on_two_nodes(tmp_path, two_nodes):
    """Of its first requests; experiments/sweep-mooncake says how to compare all of it."""
    changes = ["workload.num_requests=50"]
    for out, engine in (("pool", "pool"), ("ray", f"ray:{two_nodes}")):
        result = pdsim.sweep(MOONCAKE, out=tmp_path / out, changes=changes, jobs=2, engine=engine)
        assert result.num_computed == 96
        assert not any(point.error for point in result.points)
    assert shards(tmp_path / "pool") == shards(tmp_path / "ray")


@pytest.mark.slow
def test_workers_of_ray_that_die_are_tried_again_and_leave_the_output_alone(tmp_path):
    pytest.importorskip("ray", reason="Ray is an extra")
    (tmp_path / "deadly.py").write_text(POLICY)
    policy = f"{{use: 'deadly:Deadly', times: 2, memory: {tmp_path / 'deaths'}}}"
    path = write_sweep(tmp_path, scenario=f"{SCENARIO}\n".replace("prefill: {", f"prefill: {{policy: {policy}, "))
    command = [sys.executable, "-m", "pdsim", "sweep", path, "--trust", "--engine", "ray", "--json", "--out", "out"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert (tmp_path / "deaths").read_text() == "xx"
    assert json.loads(done.stdout)["computed"] == 8
