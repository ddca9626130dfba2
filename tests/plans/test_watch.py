"""A search says what it has found: from time to time, and when it is interrupted."""

import os
import signal

import pytest

from pdsim.cli.studies import _interruptible
from pdsim.signals import ended_like_ctrl_c
from pdsim.study.planning import watch
from pdsim.study.planning.watch import Watch


def test_a_search_reports_from_time_to_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(watch, "monotonic", lambda: now[0])
    told = []
    watched = Watch(told.append)
    progress = watched.over(None)
    for done in range(1, 100):
        now[0] += 1
        progress(done, 8)
    assert told == [f"{done} runs done; no cluster meets the SLO yet" for done in (30, 60, 90)]
    watched.best, watched.undecided = "3P2D: 5 x H100", "$10.00"
    assert watched.state == "99 runs done; best so far: 3P2D: 5 x H100; all clusters below $10.00 miss the SLO"


def interrupt(kind):
    """SIGINT is ignored where a shell started the tests in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), kind)
    signal.pause()


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_search_says_what_is_provisional(kind, capsys):
    told = []
    watched = Watch(told.append)
    watched.best = "3P2D: 5 x H100"
    ends = pytest.raises(SystemExit)
    with ends as ended, ended_like_ctrl_c(), _interruptible("plan", is_kept=True), watched.provisional():
        interrupt(kind)
    assert ended.value.code == 130
    assert told == ["provisional: 0 runs done; best so far: 3P2D: 5 x H100"]
    assert "the same command goes on with what is missing" in capsys.readouterr().err
