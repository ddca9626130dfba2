"""Manifests are what Kubernetes takes, for every scenario: checked against its own schemas."""

import json
import shlex
from pathlib import Path

import pytest

from pdsim.launch import ENGINES, manifests
from pdsim.scenario.loading import load_scenario
from pdsim.scenario.yaml_file import parse_yaml
from tests.cli.test_commands import output_json
from tests.launch.sample import ALONE, PAIR, WITHOUT, scenario
from tests.launch.test_engine_flags import PARSERS
from tests.launch.test_launch import RACK

ROOT = Path(__file__).parents[2]
VERSION = "1.37"
OF_OPERATORS = ("LeaderWorkerSet", "DynamoGraphDeployment")
SCENARIOS = ["experiments/demo/scenario.yaml", "real/clients/scenario.yaml"]
LENGTHS = "input_tokens: 99, output_tokens: {use: normal, mean: 9, stddev: 2}"
ODD = [
    ("workload", f"{{use: random_lengths, num_requests: 9, {LENGTHS}}}"),
    ("client", "{use: closed_loop, concurrency: 3}"),
]


def read(text):
    return [parse_yaml(one, "manifest") for one in text.split("\n---\n")]


def check(manifest):
    """Raises ValidationError. What only operators know is checked down to its pods."""
    validation = pytest.importorskip("kubernetes_validate")
    if manifest["kind"] not in OF_OPERATORS:
        validation.validate(manifest, VERSION, strict=True)
        return
    for spec in pods(manifest["spec"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
        validation.validate(pod, VERSION, strict=True)


def pods(spec):
    if "services" not in spec:
        group = spec["leaderWorkerTemplate"]
        return [group["leaderTemplate"]["spec"], group["workerTemplate"]["spec"]]
    found = []
    for service in spec["services"].values():
        others = dict(service["extraPodSpec"])
        container = {"name": "main", **others.pop("mainContainer"), "env": service.get("envs", [])}
        found.append({"containers": [container], **others})
    return found


def all_manifests(made):
    return [one for text in made.manifests.values() for one in read(text)]


@pytest.mark.parametrize("engine", ["kubernetes", "dynamo", "dynamo-vllm"])
@pytest.mark.parametrize("changes", [(), RACK, ALONE, ODD], ids=["pair", "rack", "aggregated", "odd load"])
def test_manifests_are_what_kubernetes_takes(engine, changes):
    if changes is RACK and engine != "kubernetes":
        pytest.skip("refused")
    without = [(section, None) for section in WITHOUT[engine]] if changes is not ALONE else []
    made = ENGINES[engine](scenario(*without, *changes), ["s.yaml"], "m")
    assert made.manifests
    for manifest in all_manifests(made):
        check(manifest)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("path", SCENARIOS)
def test_scenarios_of_this_project_launch_with_every_engine(engine, path):
    if engine in ("vllm", "dynamo-vllm") and "health" in (ROOT / path).read_text():
        pytest.skip("vLLM has no health monitor")
    made = ENGINES[engine](load_scenario(ROOT / path, ["network.transport=nixl-rdma"]), ["s.yaml"], "m")
    assert any("load" in name for name in (*made.commands, *made.manifests))
    for manifest in all_manifests(made):
        check(manifest)


def launched(capsys, tmp_path, *changes):
    (tmp_path / "pair.yaml").write_text(PAIR)
    flags = [word for path, value in changes for word in ("--set", f"{path}={value}")]
    return output_json(capsys, "launch", tmp_path / "pair.yaml", "--engine", "kubernetes", *flags)


def test_a_job_replays_the_exported_trace(capsys, tmp_path):
    made = launched(capsys, tmp_path, *ODD)
    assert made["commands"] == {}
    kept, job = read(made["manifests"]["load.yaml"])
    check(kept)
    check(job)
    rows = [json.loads(line) for line in kept["data"]["load.jsonl"].splitlines()]
    assert len(rows) == 9
    assert {row["input_length"] for row in rows} == {99}
    (container,) = job["spec"]["template"]["spec"]["containers"]
    *install, program, profile = container["command"][:6]
    assert install[:2] == ["sh", "-c"]
    assert (program, profile) == ("aiperf", "profile")
    PARSERS["aiperf profile"].parse_args(container["command"][6:])
    assert container["command"][container["command"].index("--input-file") + 1] == "/load/load.jsonl"


def test_a_trace_that_no_config_map_holds_is_left_out_with_a_note(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(manifests, "MOST_TRACE_BYTES", 100)
    made = launched(capsys, tmp_path, *ODD)
    assert list(made["manifests"]) == ["cluster.yaml"]
    assert list(made["commands"]) == ["trace", "load"]
    assert any("more than a ConfigMap holds" in note for note in made["notes"])


@pytest.mark.parametrize("engine", ["dynamo", "dynamo-vllm"])
def test_a_graph_deployment_has_the_workers_of_the_commands(engine):
    """The same flags, but for addresses and ports, which pods have of their own."""
    without = [(section, None) for section in WITHOUT[engine]]
    made = ENGINES[engine](scenario(*without, ("prefill.instances", "3"), ("decode.tp", "4")), ["s.yaml"], "m")
    (graph,) = read(made.manifests["graph.yaml"])
    services = graph["spec"]["services"]
    assert {name: (one["replicas"], one.get("subComponentType")) for name, one in services.items()} == {
        "Frontend": (1, None), "prefill": (3, "prefill"), "decode": (1, "decode"),
    }  # fmt: skip
    assert [services[role]["resources"]["limits"]["gpu"] for role in ("prefill", "decode")] == ["2", "4"]
    program = f"python -m dynamo.{'sglang' if engine == 'dynamo' else 'vllm'}"
    for role in ("prefill", "decode"):
        container = services[role]["extraPodSpec"]["mainContainer"]
        assert shlex.join(container["command"]) == program
        mine = PARSERS[program].parse_args(container["args"])
        theirs = PARSERS[program].parse_args(shlex.split(made.commands[f"{role}-0"].partition(f"{program} ")[2]))
        others = {name: value for name, value in vars(mine).items() if value != vars(theirs)[name]}
        assert {*others} <= {"--host", "--kv-events-config", "--disaggregation-bootstrap-port"}
