"""KV crosses between processes, over every engine that this machine has."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Listener
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="real mode needs torch")

from pdreal.memory.geometry import heads_of_rank, slots_of
from pdreal.memory.mover import PeerMemory, exchange_of, prefill_mover
from pdreal.transports.opening import open_transport
from pdreal.transports.protocol import TransferError, UnavailableError

from pdsim.core.messages import Scatter, TransferUnit
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.loading import parse_scenario
from tests.real.decode_side import CPU, FILLED_WITH

SCRIPT = Path(__file__).with_name("decode_side.py")
SOURCE = (3, 4, 5, 9, 1, 2, 15)
TARGET = (7, 8, 9, 10, 0, 1, 14)
PAGE = 4
ENGINES = ["mooncake-tcp", "nixl-cma", "shared-memory", "push"]
STAGING_ENGINES = ENGINES[:-1]


def settings_of(engine, prefill_tp=1, decode_tp=1, **network):
    return {
        "model": "qwen3-0.6b",
        "page_size": PAGE,
        "prefill": {"gpu": "gb200", "pool_tokens": 64, "tp": prefill_tp, "chunked_prefill_tokens": 4 * PAGE},
        "decode": {"gpu": "gb200", "pool_tokens": 64, "tp": decode_tp},
        "network": {"transport": engine, **network},
        "workload": {"use": "random_lengths", "num_requests": 1, "input_tokens": 8, "output_tokens": 1},
        "client": {"use": "closed_loop", "concurrency": 1},
    }


class DecodeProcess:
    """Started once, for it takes seconds."""

    def __init__(self, folder):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with Listener(str(folder / "control"), "AF_UNIX") as listener:
            self._process = subprocess.Popen([sys.executable, SCRIPT, listener.address], env=environment)
            self._connection = listener.accept()

    def call(self, *call):
        self._connection.send(call)
        return self._connection.recv()

    def kill(self):
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._connection.close()


class Pair:
    """Prefill ranks here, decode ranks there."""

    def __init__(self, settings, decode):
        self._decode = decode
        scenario = resolve(parse_scenario(settings, base=Path()))
        self.exchange = exchange_of(scenario)
        side, model_heads = self.exchange.prefill, self.exchange.num_kv_heads
        shape = side.num_planes, side.num_pages * PAGE, model_heads, side.head_bytes
        self.whole = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
        self.movers = []
        for rank in range(self.exchange.prefill_tp):
            heads = heads_of_rank(model_heads, self.exchange.prefill_tp, rank)
            held = np.ascontiguousarray(self.whole[:, :, heads.start : heads.stop])
            planes = torch.from_numpy(held).view(torch.bfloat16).unbind()
            self.movers.append(prefill_mover(scenario, rank, planes, opened(scenario.network.transport)))
        peers = [PeerMemory(**described) for described in self.there("open", settings)]
        for mover in self.movers:
            for rank, peer in enumerate(peers):
                mover.connect("d", rank, peer)

    def there(self, *call):
        return self._decode.call(id(self), *call)

    def close(self):
        for mover in self.movers:
            mover.close()

    def unit(self, source, target, *, cell=None, **changes):
        load = self.exchange.wire.size(source, target)
        descriptors = load.num_descriptors if cell is None else 1
        unit = TransferUnit(0, "p", "d", source, target, load.num_bytes, descriptors, 0, is_last=False, cell=cell)
        return replace(unit, **changes)

    def send(self, unit, offset=None):
        for mover in self.movers:
            mover.send(unit, offset)

    def expect(self, source, target):
        """On each decode rank its heads of these pages, and what was there before in all others."""
        model_heads, tp = self.exchange.num_kv_heads, self.exchange.decode_tp
        expected = np.full_like(self.whole, FILLED_WITH)
        expected[:, slots_of(target, PAGE)] = self.whole[:, slots_of(source, PAGE)]
        for rank, got in enumerate(self.there("read")):
            heads = heads_of_rank(model_heads, tp, rank)
            assert np.array_equal(got, expected[:, :, heads.start : heads.stop])


def opened(engine):
    try:
        return open_transport(engine, CPU)
    except UnavailableError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def decode(tmp_path_factory):
    process = DecodeProcess(tmp_path_factory.mktemp("decode"))
    yield process
    process.kill()


@pytest.fixture
def pair(decode):
    """Makes a pair, and closes it when the test is done."""
    made = []

    def make(settings):
        made.append(Pair(settings, decode))
        return made[-1]

    yield make
    for each in made:
        each.there("close")
        each.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_equal_ranks_exchange_runs_of_pages(engine, pair):
    sides = pair(settings_of(engine, 2, 2))
    sides.send(sides.unit(SOURCE, TARGET))
    sides.expect(SOURCE, TARGET)
    sides.send(sides.unit((), (), is_last=True))
    sides.expect(SOURCE, TARGET)


@pytest.mark.parametrize("engine", ["shared-memory", "push"])
def test_groups_of_layers_arrive_one_by_one(engine, pair):
    """Three groups of the 28 layers."""
    settings = settings_of(engine)
    settings["prefill"]["layer_groups"] = 3
    sides = pair(settings)
    for group in (2, 0):
        sides.send(sides.unit(SOURCE, TARGET, after_layers=(1, group)))
    assert (sides.there("read")[0][2 * 9 : 2 * 18] == FILLED_WITH).all()
    sides.send(sides.unit(SOURCE, TARGET, after_layers=(1, 1)))
    sides.expect(SOURCE, TARGET)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (4, 2)])
def test_ranks_of_other_sizes_exchange_slices(engine, ranks, pair):
    sides = pair(settings_of(engine, *ranks))
    sides.send(sides.unit(SOURCE, TARGET))
    sides.expect(SOURCE, TARGET)


@pytest.mark.parametrize("engine", STAGING_ENGINES)
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_cells_pass_the_ring(engine, ranks, pair):
    stage_and_scatter(pair(settings_of(engine, *ranks, staging={"ring": "16 MiB"})))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)])
def test_what_is_done_before_the_first_transfer_touches_scratch_pages_only(engine, ranks, pair):
    """The ring too takes its greeting where no cell lies."""
    staging = {} if engine == "push" else {"staging": {"ring": "16 MiB"}}
    sides = pair(settings_of(engine, *ranks, **staging))
    sides.there("warm_up")
    before = sides.there("read")
    with ThreadPoolExecutor(2) as pool:
        for mover in sides.movers:
            mover.warm_up()
            list(pool.map(mover.greet, ["d"] * 50))
    for rank_before, rank_after in zip(before, sides.there("read"), strict=True):
        assert (rank_after[:, :PAGE] != rank_before[:, :PAGE]).any(axis=(1, 2, 3)).all()
        assert (rank_after[:, PAGE:] == FILLED_WITH).all()
    if ranks != (1, 1) and staging:
        stage_and_scatter(sides)


def test_ranks_with_copies_of_heads_pass_the_ring(pair):
    """16 prefill ranks hold each of 8 heads twice."""
    staging = {"ring": "16 MiB"}
    stage_and_scatter(pair(settings_of("shared-memory", 16, 4, staging=staging)))


def stage_and_scatter(sides):
    """Two cells, of four pages and of three, the second anywhere in the ring."""
    for cell, pages, offset in ((0, slice(0, 4), 0), (1, slice(4, 7), 4 << 20)):
        unit = sides.unit(SOURCE[pages], TARGET[pages], cell=cell)
        sides.send(unit, offset)
        sides.there("scatter", Scatter("d", 0, cell, unit.num_bytes, offset), TARGET[pages])
    sides.expect(SOURCE, TARGET)


@pytest.mark.parametrize("engine", STAGING_ENGINES)
def test_threads_send_at_a_time(engine, pair):
    """Two queues, a cell each."""
    sides = pair(settings_of(engine, 2, 1, staging={"ring": "16 MiB"}))
    units = [sides.unit((page,), (page + 8,), cell=page) for page in range(8)]
    offsets = [cell << 20 for cell in range(8)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(sides.send, units, offsets))
    for unit, offset in zip(units, offsets, strict=True):
        sides.there("scatter", Scatter("d", 0, unit.cell, unit.num_bytes, offset), unit.target_pages)
    sides.expect(range(8), range(8, 16))


def test_digests_agree_whatever_the_ranks(pair):
    tokens = range(2, 4 * PAGE - 1)
    sides = pair(settings_of("shared-memory", 2, 4))
    sides.send(sides.unit(SOURCE, TARGET))
    here = {head: value for mover in sides.movers for head, value in mover.digest(SOURCE, tokens).items()}
    assert len(here) == 8
    assert sides.there("digest", TARGET, tokens) == here
    assert sides.there("digest", TARGET, range(2, 4 * PAGE)) != here
    wrong = (TARGET[1], TARGET[0], *TARGET[2:])
    assert sides.there("digest", wrong, tokens) != here


def test_a_killed_peer_fails_transfers(tmp_path):
    """At once: none of the engines waits for its timeout."""
    decode = DecodeProcess(tmp_path)
    pairs = [Pair(settings_of(engine), decode) for engine in ENGINES if is_here(engine)]
    for sides in pairs:
        sides.send(sides.unit(SOURCE, TARGET))
    decode.kill()
    for sides in pairs:
        begin_s = time.monotonic()
        for _ in range(2):
            with pytest.raises(TransferError):
                sides.send(sides.unit(SOURCE, TARGET))
        with pytest.raises(TransferError):
            sides.movers[0].greet("d")
        assert time.monotonic() - begin_s < 5
        sides.movers[0].disconnect("d", 0)
        with pytest.raises(TransferError, match="d is not connected"):
            sides.send(sides.unit(SOURCE, TARGET))
        sides.close()


def is_here(engine):
    try:
        open_transport(engine, CPU).close()
    except UnavailableError:
        return False
    return True


def test_memory_that_is_not_shared_is_not_written_to(pair):
    """Nor is the wrong page: an address behind the ring's end."""
    for engine in filter(is_here, STAGING_ENGINES):
        sides = pair(settings_of(engine, 2, 1, staging={"ring": "16 MiB"}))
        with pytest.raises(TransferError):
            sides.send(sides.unit(SOURCE[:4], TARGET[:4], cell=0), 1 << 50)
    with pytest.raises(TransferError, match="not within registered memory"):
        pair(settings_of("push", 2, 1)).send(sides.unit(SOURCE[:1], (1 << 20,)))


def test_planes_of_another_type_are_refused():
    scenario = resolve(parse_scenario(settings_of("shared-memory"), base=Path()))
    planes = [torch.zeros(64, 8, 128)] * 56
    with pytest.raises(ValueError, match="tokens of 4096 bytes, the scenario 16 with 2048"):
        prefill_mover(scenario, 0, planes, open_transport("shared-memory", CPU))
