"""Instances on several hosts: where they are placed, who is heard, one clock, and what a lost host leaves."""

import asyncio
import os
import sys
from dataclasses import replace
from io import StringIO

import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install 'pdsim[real]'")
pytest.importorskip("torch", reason="needs torch: pip install 'pdsim[real]'")

import zmq
from pdreal.cli import main
from pdreal.clients import Clients
from pdreal.control.channel import Channel, Network, encode
from pdreal.control.logbook import read_journal, read_records
from pdreal.control.notices import AskTime, Ended, KillRanks, Settle, SpawnRanks
from pdreal.hosts import remote_host
from pdreal.launcher import Launcher
from pdreal.settings.host import Hosts
from pdreal.settings.options import Options
from pdreal.settings.rank import RankSpec
from pdreal.settings.scenario import real_scenario
from ruamel.yaml import YAML

from pdsim.core.journal.replay import replay
from pdsim.scenario.building.machines import state_machines
from tests.real import clusters, namespaces, two_hosts

AGENT = f"{sys.executable} -m pdreal host"
HERE = {"address": "127.0.0.1", "instances": ["prefill-*"]}
BESIDE = {"address": "127.0.0.1", "instances": ["decode-*"], "start": AGENT}


def refused(tmp_path, capsys, hosts, *changes):
    """What is said of a hosts file, beside exit code 2."""
    for name, data in {"hosts": {"hosts": hosts}, "pair": clusters.DEFAULT}.items():
        YAML(typ="safe").dump(data, tmp_path / f"{name}.yaml")
    with pytest.raises(SystemExit) as stop:
        main(["run", str(tmp_path / "pair.yaml"), "--hosts", str(tmp_path / "hosts.yaml"), *changes])
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        ({"a": HERE, "b": {**BESIDE, "adress": "::1"}}, "unknown field 'hosts.b.adress'"),
        (
            {"a": {**HERE, "address": "node1"}, "b": BESIDE},
            "line 3: hosts.a.address: Input is not a valid IPv4 address",
        ),
        (
            {"a": HERE, "b": HERE},
            "hosts.yaml: exactly one host, the one where pdreal is called, has no start; found a, b",
        ),
        ({"a": HERE, "b": {**BESIDE, "instances": ["decod-0"]}}, "no instance 'decod-0' (did you mean 'decode-0'?)"),
        ({"a": HERE, "b": {**BESIDE, "instances": ["*"]}}, "hosts: prefill-0 must be on one host, found on a and b"),
        ({"a": HERE, "b": {**BESIDE, "start": ""}}, "hosts.b.start: expected a command that runs `pdreal host` there"),
        ({"a": HERE, "b": {**BESIDE, "start": "ssh 'b"}}, "hosts.b.start: No closing quotation"),
        ({"a": HERE}, "hosts: decode-0 must be on one host, found on none of a"),
        (
            {"a": HERE, "b": {**BESIDE, "address": "127.0.0.2"}},
            "shared-memory works within one host only",
        ),
        ({"a": HERE, "b": {**BESIDE, "start": "false"}}, "host b was lost: false ended with exit code 1"),
        ({"a": HERE, "b": {**BESIDE, "start": "no-such-command"}}, "host b: no-such-command: No such file"),
    ],
)
def test_hosts_that_are_refused(tmp_path, capsys, hosts, says):
    assert says in refused(tmp_path, capsys, hosts)


def test_an_agent_without_a_launcher_says_so(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", StringIO())
    with pytest.raises(SystemExit) as stop:
        main(["host"])
    assert stop.value.code == 2
    assert "expected a launcher's ticket on standard input" in capsys.readouterr().err


def test_who_does_not_hold_the_keys_is_not_heard(tmp_path):
    network = Network.dealt("127.0.0.1")
    strangers = [None, Network.dealt("127.0.0.1"), Network.dealt("127.0.0.1")._replace(public_key=network.public_key)]
    context = zmq.Context()

    def stranger(keys):
        """Knows whom to ask, but has keys of its own or none."""
        socket = context.socket(zmq.PUSH)
        if keys is not None:
            keys.protect(socket)
            socket.curve_serverkey = network.public_key.encode()
        socket.connect(here.endpoint)
        socket.send(encode(("decode-0", Settle(666), None)))
        return socket

    async def play():
        loop, heard, done = asyncio.get_running_loop(), [], asyncio.Event()
        here.listen(loop, lambda envelope, _: (heard.append(envelope.message.timeout_ns), done.set()))
        sockets = [stranger(keys) for keys in strangers]
        await asyncio.sleep(0.3)
        friend.send("decode-0", Settle(1))
        async with asyncio.timeout(5):
            await done.wait()
        loop.remove_reader(here.descriptor)
        for socket in sockets:
            socket.close(linger=0)
        return heard

    here, friend = Channel(tmp_path, "decode-0", network=network), Channel(tmp_path, "launcher", network=network)
    friend.connect("decode-0", here.endpoint)
    assert here.endpoint.startswith("tcp://127.0.0.1:")
    assert asyncio.run(play()) == [1]
    here.close()
    friend.close()
    context.term()


def play(scenario, hosts, logs, *, at_s=None, act=None):
    """To the end; act is called with the launcher after a while."""
    options = Options(check_kv=True, hosts=Hosts.model_validate({"hosts": hosts}))
    resolved, requests = real_scenario(scenario, options)

    async def serve():
        clients = Clients(resolved, requests, options, progress=lambda _: None)
        launcher = Launcher(resolved, options, folder=logs, on_end=clients.on_end)
        await launcher.start()
        if at_s is not None:
            launcher.timeline.after(round(at_s * 1e9), lambda _: act(launcher))
        await clients.serve(launcher)
        return launcher, clients.outputs, await launcher.stop()

    return *asyncio.run(serve()), resolved


SPEC = RankSpec(
    store=None,
    scenario=None,
    options=Options(),
    instance_id="decode-0",
    role="decode",
    rank=0,
    life=0,
    slot=0,
    num_slots=1,
    launcher="",
    network=None,
    sockets=None,
    logs=None,
)


class SlowProcesses:
    """Stands in for ranks: what they are forked from was killed, and starts when it may."""

    def __init__(self, loop, on_exit):
        self.may_start, self.did = asyncio.Event(), []

    async def prepare(self):
        await self.may_start.wait()

    def spawn(self, ranks):
        self.did.append(("spawn", ranks[0].instance_id))

    def kill(self, instance_id, rank=None):
        self.did.append(("kill", instance_id))

    def end(self):
        self.did.append("end")


def test_an_agent_answers_while_what_ranks_are_forked_from_starts_again(tmp_path, monkeypatch):
    """And an instance that is killed meanwhile is not started."""
    monkeypatch.setattr(remote_host, "Processes", SlowProcesses)
    network, (read_end, write_end) = Network.dealt("127.0.0.1"), os.pipe()
    launcher = Channel(tmp_path, "launcher", network=network)
    (tmp_path / "agent").mkdir()

    async def main():
        heard = asyncio.Queue()
        launcher.listen(asyncio.get_running_loop(), lambda envelope, _: heard.put_nowait(envelope.message))
        agent = remote_host.Agent("b", launcher.endpoint, network, tmp_path / "agent")
        living = asyncio.create_task(agent.live())
        async with asyncio.timeout(20):
            launcher.connect("host:b", (await heard.get()).endpoint)
            for name in ("decode-0", "decode-1"):
                launcher.send("host:b", SpawnRanks(), payload=[replace(SPEC, instance_id=name)])
            launcher.send("host:b", KillRanks("decode-1", None))
            launcher.send("host:b", AskTime(5))
            told = [await heard.get(), await heard.get()]
            assert agent._processes.did == []
            agent._processes.may_start.set()
            while not agent._processes.did:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            os.close(write_end)
            await living
        return told, agent._processes.did

    with os.fdopen(read_end) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        told, did = asyncio.run(main())
    launcher.close()
    assert told[0] == Ended("b", "decode-1", -9)
    assert told[1][:2] == ("b", 5)
    assert did == [("spawn", "decode-0"), "end"]


def test_two_hosts_serve_as_one(tmp_path):
    """On one machine, so any engine will do: an agent has the decode instance, and hands its logbooks over."""
    launcher, outputs, leaks, resolved = play(
        clusters.scenario(decode__tp=2, workload__num_requests=12), {"a": HERE, "b": BESIDE}, tmp_path
    )
    assert launcher.failure is None
    assert not leaks
    assert not clusters.wrong_outputs(resolved, outputs)
    assert {path.name.partition(".")[0] for path in tmp_path.iterdir()} == {"launcher", "prefill-0", "decode-0"}
    assert replay(read_journal(tmp_path), state_machines(resolved)) > 40
    requests = read_records(tmp_path).requests
    assert all(0 < r.admitted_ns < r.prefill_end_ns < r.transfer_end_ns <= r.streamed_ns for r in requests)
    assert abs(launcher.hosts["b"]["clock_offset_ms"]) <= launcher.hosts["b"]["clock_error_ms"], "it is one clock"


def test_a_lost_host_ends_its_requests_with_a_reason(tmp_path):
    """Its ranks end with their agent, others go on, and what it kept is said to be missing."""

    def lose(launcher):
        launcher._instances.fleet.remote["b"]._process.kill()

    scenario = clusters.scenario(
        decode__instances=2, workload__num_requests=30, workload__output_tokens=20, router="round_robin"
    )
    hosts = {"a": {**HERE, "instances": ["prefill-*", "decode-0"]}, "b": {**BESIDE, "instances": ["decode-1"]}}
    launcher, outputs, leaks, resolved = play(scenario, hosts, tmp_path, at_s=0.5, act=lose)
    assert launcher.failure is None
    assert [leak for leak in leaks if "logs of its instances were not received" in leak] == leaks
    assert len(outputs) == 30
    requests = read_records(tmp_path).requests
    finished = [request.request_id for request in requests if request.outcome == "finished"]
    assert len(finished) > 15
    assert all(request.reason for request in requests if request.outcome != "finished")
    assert not clusters.wrong_outputs(resolved, {request_id: outputs[request_id] for request_id in finished})


@pytest.mark.parametrize("seed", [1, pytest.param(two_hosts.MIDDLE, marks=pytest.mark.nightly)])
def test_two_namespaces(seed):
    """A link that is cut, a process that is killed, a clock that is hours ahead; or cuts in the middle of transfers."""
    if why := namespaces.missing():
        pytest.skip(why)
    clusters.skip_without("mooncake-tcp")
    row = two_hosts.outcome(seed)
    assert not row["problems"]
    assert row["cuts_s"]
    if seed == two_hosts.MIDDLE:
        assert row["transfers_lost"]
        assert row["finished"] == row["requests"], "they are tried again"
