"""The target of a write does the copying, and says how it went."""

from queue import SimpleQueue

import numpy as np
import pytest

pytest.importorskip("torch", reason="real mode needs torch")

from contextlib import closing

from pdreal.transports.protocol import Regions, TransferError
from pdreal.transports.pull import PullClient, PullServer


def integers(*values):
    return np.array(values, np.int64)


class FakeSender:
    """Two memories as text; the address is the index."""

    def __init__(self, source, target, ended):
        self.source, self.target, self.ended = source, target, ended

    def copy(self, sources, targets, lengths):
        for source, target, length in zip(sources, targets, lengths, strict=True):
            if source + length > len(self.source):
                raise TransferError("a range is not within registered memory")
            self.target[target : target + length] = self.source[source : source + length]

    def close(self):
        self.ended.put(self.source)


def test_ranges_are_copied_when_write_returns():
    target, ended = bytearray(b"........"), SimpleQueue()
    server = PullServer(lambda described: FakeSender(described.encode(), target, ended))
    with closing(server), closing(PullClient(server.name, "abcdefgh")) as client:
        client.write(integers(6, 0), integers(0, 3), integers(2, 3))
        assert target == b"gh.abc.."
        with pytest.raises(TransferError, match="not within registered memory"):
            client.write(integers(7), integers(0), integers(2))
        client.write(integers(3), integers(7), integers(1))
        assert target == b"gh.abc.d"
        assert ended.empty()
    assert ended.get(timeout=5) == b"abcdefgh"


def test_a_sender_that_cannot_be_opened_hears_of_it():
    def refuse(described):
        raise TransferError(f"no memory {described}")

    server = PullServer(refuse)
    with closing(server), closing(PullClient(server.name, 7)) as client:
        for _ in range(2):
            with pytest.raises(TransferError, match="no memory 7"):
                client.write(integers(0), integers(0), integers(1))


def test_a_target_that_is_gone_fails_the_write():
    server = PullServer(lambda described: FakeSender(b"", bytearray(), SimpleQueue()))
    server.close()
    with pytest.raises(TransferError, match="no answer from the peer"):
        PullClient(server.name, "").write(integers(0), integers(0), integers(1))


def test_connections_that_failed_are_dropped(monkeypatch):
    """Also those for which the process has no descriptor left."""
    server = PullServer(lambda described: FakeSender(b"ab", bytearray(2), SimpleQueue()))
    client, whole = PullClient(server.name, ""), (integers(0), integers(0), integers(1))

    def refuse(family):
        raise OSError("too many open files")

    with closing(server), closing(client):
        with monkeypatch.context() as patched:
            patched.setattr("pdreal.transports.pull.socket.socket", refuse)
            with pytest.raises(TransferError, match="no answer from the peer: too many open files"):
                client.write(*whole)
        client.write(*whole)
        assert len(client._connections) == 1
    for _ in range(2):
        with pytest.raises(TransferError, match="no answer from the peer"):
            client.write(*whole)
        assert not client._connections


def test_addresses_are_translated_within_regions_only():
    regions = Regions([(100, 10, 1000), (0, 10, 500)])
    assert regions.translate(integers(100, 3, 109), integers(10, 7, 1)).tolist() == [1000, 503, 1009]
    for address, length in ((-1, 1), (9, 2), (10, 1), (105, 6), (200, 1)):
        with pytest.raises(TransferError):
            regions.translate(integers(address), integers(length))
