"""Engines are chosen by name, say what they lack, and can be measured."""

from socket import SO_BINDTODEVICE, SOL_SOCKET, create_connection, create_server
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="real mode needs torch")

from pdreal.measure.transfers import measure_engine, push_rows, transfer_rows
from pdreal.transports.cuda_ipc import COPIES_PER_CALL, CudaError, CudaRuntime, _Mapping, _OpenAllocations
from pdreal.transports.mooncake import BATCH_DESCRIPTORS
from pdreal.transports.opening import NAMES, open_transport
from pdreal.transports.protocol import DEBIAN_PACKAGES, TransferError, UnavailableError, load_engine

from pdsim.system.catalog import names

CPU = torch.device("cpu")


def test_every_engine_is_a_transport_of_the_catalog():
    """The catalog has more: those that no engine here can run are simulated only."""
    assert {*NAMES} <= {*names("transports")}


def test_an_unknown_transport_is_answered_with_the_nearest():
    with pytest.raises(
        UnavailableError, match=r"no engine for transport 'mooncake-tpc'; there are .*; did you mean 'mooncake-tcp'\?"
    ):
        open_transport("mooncake-tpc", CPU)


@pytest.mark.parametrize("library", DEBIAN_PACKAGES)
def test_a_missing_library_is_named_with_its_package(library, tmp_path, monkeypatch):
    problem = f"{library}: cannot open shared object file: No such file or directory"
    (tmp_path / "engine_without_library.py").write_text(f"raise ImportError({problem!r})\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnavailableError, match=f"apt-get install {DEBIAN_PACKAGES[library]}$"):
        load_engine(("engine_without_library",), "engine")


def test_a_missing_engine_is_named_with_its_wheel():
    with pytest.raises(UnavailableError, match="no_such_engine is not installed: pip install some-wheel"):
        load_engine(("no_such_engine",), "some-wheel")


def test_a_broken_engine_does_not_hide_one_that_works(tmp_path, monkeypatch):
    for name, text in (("broken_engine", "raise ImportError('libcudart.so.13: not found')\n"), ("sound_engine", "")):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_engine(("broken_engine", "sound_engine"), "engine").__name__ == "sound_engine"
    with pytest.raises(UnavailableError, match=r"^broken_engine: libcudart\.so\.13: not found$"):
        load_engine(("broken_engine", "no_such_engine"), "engine")


def test_memory_of_a_peer_that_cannot_be_mapped_whole_is_not_mapped():
    """Memory of a dead process is not freed while it is mapped."""
    mapped = []

    def map_next(handle):
        if handle == "c":
            raise CudaError("no")
        mapped.append(handle)
        return handle

    opened = _OpenAllocations(SimpleNamespace(open=map_next, close=mapped.remove))
    for _ in range(2):
        with pytest.raises(TransferError, match="CUDA IPC: no"):
            _Mapping(opened, [(0, 8, 0, handle) for handle in "abc"])
        assert mapped == []


class CallsOfCopies(CudaRuntime):
    """Notes the ranges of each call, and when the stream is waited for."""

    def __init__(self):
        self.noted = []

    def copy_batch(self, *ranges_and_stream):
        self.noted.append(np.stack(ranges_and_stream[:3]))

    def synchronize(self):
        self.noted.append("wait")


@pytest.mark.parametrize("num_copies", [0, 1, COPIES_PER_CALL, 2 * COPIES_PER_CALL + 1])
def test_many_copies_are_calls_of_bounded_size_between_which_others_launch(num_copies):
    ranges = np.arange(3 * num_copies).reshape(3, num_copies)
    calls = CallsOfCopies()
    calls.copy(*ranges, calls)
    copied = calls.noted[::2]
    assert calls.noted[1::2] == ["wait"] * len(copied)
    assert all(part.shape[1] <= COPIES_PER_CALL for part in copied)
    assert np.concatenate([np.empty((3, 0)), *copied], axis=1).tolist() == ranges.tolist()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_engines_of_gpus_say_that_there_is_none():
    for name in ("cuda-ipc", "mooncake-nvlink", "mooncake-mnnvl"):
        with pytest.raises(UnavailableError):
            open_transport(name, CPU)


def test_mooncake_is_reached_from_this_machine_only(monkeypatch):
    """The engine listens on all interfaces, whatever it is told."""
    with create_server(("0.0.0.0", 0)) as everywhere, create_server(("127.0.0.1", 0)) as loopback:
        engine = SimpleNamespace(initialize=lambda *_: 0, get_rpc_port=lambda: everywhere.getsockname()[1])
        monkeypatch.setattr(
            "pdreal.transports.mooncake.load_engine", lambda *_: SimpleNamespace(TransferEngine=lambda: engine)
        )
        address = open_transport("mooncake-tcp", CPU).address
        device = everywhere.getsockopt(SOL_SOCKET, SO_BINDTODEVICE, 16).rstrip(b"\0")
        assert device == b"lo"
        assert loopback.getsockopt(SOL_SOCKET, SO_BINDTODEVICE, 16) == b""
        create_connection(address.split(":")).close()


def test_a_write_behind_a_cut_link_is_given_up(monkeypatch):
    """The engine itself waits as long as TCP does."""
    stuck = {"transfer_submit_write": lambda *_: 1, "transfer_check_status": lambda _: 0}
    engine = SimpleNamespace(initialize=lambda *_: 0, get_rpc_port=lambda: 1, **stuck)
    monkeypatch.setattr(
        "pdreal.transports.mooncake.load_engine", lambda *_: SimpleNamespace(TransferEngine=lambda: engine)
    )
    monkeypatch.setattr("pdreal.transports.mooncake.TIMEOUT_S", 0.05)
    transport = open_transport("mooncake-tcp", CPU, "10.0.0.1")
    with pytest.raises(TransferError, match="could not write 128 bytes"):
        transport.write("10.0.0.2:1", *(np.full(2, 64) for _ in range(3)))


@pytest.fixture
def mooncake():
    return pytest.importorskip("mooncake.engine", exc_type=ImportError).TransferEngine


def test_mooncake_gets_many_descriptors_in_batches(mooncake, monkeypatch):
    """The benchmark checks the bytes itself."""
    submit, check = mooncake.transfer_submit_write, mooncake.transfer_check_status
    under_way, sizes = set(), []

    def submitted(self, *write):
        under_way.add(number := submit(self, *write))
        sizes.append(len(under_way))
        return number

    def checked(self, number):
        if status := check(self, number):
            under_way.remove(number)
        return status

    monkeypatch.setattr(mooncake, "transfer_submit_write", submitted)
    monkeypatch.setattr(mooncake, "transfer_check_status", checked)
    num_descriptors = 2 * BATCH_DESCRIPTORS + 1
    list(measure_engine("mooncake-tcp", [(1024 * num_descriptors, num_descriptors)], (CPU, CPU), 0))
    assert max(sizes) == BATCH_DESCRIPTORS


def test_on_a_cpu_mooncake_never_polls_on_the_core_that_computes(mooncake, monkeypatch):
    monkeypatch.delattr(mooncake, "batch_transfer_sync_write")
    (row,) = measure_engine("mooncake-tcp", [(65536, 4)], (CPU, CPU), 0)
    assert row.num_descriptors == 4


def test_a_push_is_measured_by_pages():
    """The benchmark checks the bytes itself: the halves of all tokens, from pages of 1 MiB."""
    rows = list(push_rows([65536, 3 << 20, 1 << 20], (CPU, CPU), 0))
    assert [(row.payload_bytes, row.num_descriptors, row.repeats) for row in rows] == [(3 << 20, 1, 3), (1 << 20, 1, 3)]


@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")
def test_gpu_memory_crosses():
    """The benchmark checks the bytes itself."""
    missing = []
    rows = list(transfer_rows(torch.device("cuda", 0), [65536], [1, 16], 0, missing.append))
    assert [row.transport for row in rows][:2] == 2 * ["cuda-ipc"]
    assert not [line for line in missing if line.startswith(("cuda-ipc", "push"))]
    assert len(list(push_rows([4 << 20], (torch.device("cuda", 0),) * 2, 0))) == 1
