"""Signals that end a program, while files are written."""

import signal

import pytest

from pdsim.signals import signals_deferred


@pytest.fixture
def _hang_ups_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGHUP, before)
    signal.signal(signal.SIGINT, interrupt)


@pytest.mark.usefixtures("_hang_ups_ignored")
def test_an_ignored_signal_hides_no_other():
    """As under nohup."""
    written = []

    def write():
        with signals_deferred():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGINT)
            written.append("whole")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert written == ["whole"]
