"""Who is told what, and after which heartbeat."""

import pytest

from pdsim.core.health import HealthMonitor
from pdsim.core.messages import Heartbeat, PeerDown, PeerUp, Send, Woken


def told(monitor, *lives):
    """What prefill-0's heartbeats make the monitor say to decode-0, one after another."""
    said = [monitor.on_message(Heartbeat("prefill-0", life), 0) for life in lives]
    assert all(command.to in {"decode-0", "router"} for commands in said for command in commands)
    return [[c.message for c in commands if c.to == "decode-0"] for commands in said]


@pytest.fixture
def monitor():
    return HealthMonitor({"prefill-0": ["decode-0", "router"], "decode-0": ["prefill-0", "router"]}, max_failures=2)


def test_one_missed_heartbeat_is_none(monitor):
    assert told(monitor, None, 0, None, 0) == [[], [], [], []]


def test_an_instance_is_down_once_and_up_once(monitor):
    down, up = PeerDown("prefill-0"), PeerUp("prefill-0")
    assert told(monitor, None, None, None, 1, 1) == [[], [down], [], [up], []]


def test_a_restart_between_two_heartbeats_is_noticed(monitor):
    assert told(monitor, 0, 1, 1) == [[], [PeerDown("prefill-0", has_restarted=True)], []]
    assert told(monitor, None, 2) == [[], [PeerDown("prefill-0", has_restarted=True)]]


def test_a_restart_behind_a_missed_heartbeat_was_last_alive_before_that():
    monitor = HealthMonitor({"prefill-0": ["decode-0"]}, max_failures=2, interval_ns=5)
    for now_ns, life in ((10, 0), (15, None)):
        assert monitor.on_message(Heartbeat("prefill-0", life), now_ns) == []
    (restarted,) = monitor.on_message(Heartbeat("prefill-0", 1), 20)
    assert restarted.message == PeerDown("prefill-0", has_restarted=True, seen_ns=10)


def test_everybody_concerned_is_told(monitor):
    monitor.on_message(Heartbeat("decode-0", None), 0)
    down = PeerDown("decode-0")
    assert monitor.on_message(Heartbeat("decode-0", None), 0) == [Send("prefill-0", down), Send("router", down)]


def test_it_takes_nothing_else(monitor):
    with pytest.raises(TypeError, match="does not take"):
        monitor.on_message(Woken(), 0)
