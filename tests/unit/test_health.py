"""Who is told what, and after which heartbeat."""

import pytest

from pdsim.core.deadlines import Deadlines
from pdsim.core.health import HealthMonitor
from pdsim.core.messages import Heartbeat, PeerDown, PeerUp, Send, WakeAt, Woken


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


def test_everybody_concerned_is_told(monitor):
    monitor.on_message(Heartbeat("decode-0", None), 0)
    down = PeerDown("decode-0")
    assert monitor.on_message(Heartbeat("decode-0", None), 0) == [Send("prefill-0", down), Send("router", down)]


def test_it_takes_nothing_else(monitor):
    with pytest.raises(TypeError, match="does not take"):
        monitor.on_message(Woken(), 0)


def test_deadlines_ask_to_be_woken_for_the_first_alone():
    d = Deadlines("me", 100)
    assert d.add(1, 0) == [WakeAt("me", 100)]
    assert d.add(2, 30) == []
    commands = []
    assert d.expired(99, commands, lambda _: True) == []
    assert d.expired(100, commands, lambda _: True) == [1]
    assert commands == [WakeAt("me", 130)]


def test_what_is_done_is_not_due():
    d = Deadlines("me", 100)
    for request_id in range(3):
        d.add(request_id, request_id)
    commands = []
    assert d.expired(100, commands, {2}.__contains__) == []
    assert commands == [WakeAt("me", 102)]


def test_without_a_timeout_nothing_is_due():
    d = Deadlines("me", None)
    assert d.add(1, 0) == []
    assert d.expired(1 << 60, [], lambda _: True) == []
