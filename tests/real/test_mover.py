"""KV crosses between processes, over every engine that this machine has."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from multiprocessing.connection import Listener
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="real mode needs torch")

from pdreal.digest import digest
from pdreal.endpoints import exchange_of, prefill_mover
from pdreal.geometry import heads_of_rank
from pdreal.moves import slots_of
from pdreal.mover import PeerMemory
from pdreal.transports.choice import open_transport
from pdreal.transports.protocol import TransferError, UnavailableError
from pdsim.core.messages import Scatter
from pdsim.core.transfer_plan import TransferUnit
from pdsim.scenario.build import resolve
from pdsim.scenario.loading import parse_scenario
from pdsim.scenario.yaml_file import ConfigError
from tests.real.decode_side import CPU, FILLED_WITH

SCRIPT = Path(__file__).with_name("decode_side.py")
SOURCE = (3, 4, 5, 9, 1, 2, 15)
TARGET = (7, 8, 9, 10, 0, 1, 14)
PAGE = 4
ENGINES = ["mooncake-tcp", "nixl-cma", "shared-memory"]


def settings_of(engine, prefill_tp=1, decode_tp=1, **network):
    return {
        "model": "qwen3-0.6b",
        "page_size": PAGE,
        "prefill": {"gpu": "h100", "pool_tokens": 64, "tp": prefill_tp, "chunked_prefill_tokens": 4 * PAGE},
        "decode": {"gpu": "h100", "pool_tokens": 64, "tp": decode_tp},
        "network": {"transport": engine, **network},
        "workload": {"use": "random_lengths", "num_requests": 1, "input_tokens": 8, "output_tokens": 1},
        "client": {"use": "closed_loop", "concurrency": 1},
    }


class Pair:
    """Prefill ranks here, decode ranks there."""

    def __init__(self, settings, process, connection):
        self.process = process
        self._connection = connection
        scenario = resolve(parse_scenario(settings, base=Path()))
        self.exchange = exchange_of(scenario)
        side, model_heads = self.exchange.prefill, self.exchange.num_kv_heads
        shape = side.num_planes, side.num_pages * PAGE, model_heads, side.head_bytes
        self.whole = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
        self.movers = []
        self.planes = []
        for rank in range(self.exchange.prefill_tp):
            heads = heads_of_rank(model_heads, self.exchange.prefill_tp, rank)
            held = np.ascontiguousarray(self.whole[:, :, heads.start : heads.stop])
            self.planes.append(torch.from_numpy(held).view(torch.bfloat16).unbind())
            transport = open_transport(scenario.network.transport, CPU)
            self.movers.append(prefill_mover(scenario, rank, self.planes[-1], transport))
        connection.send(settings)
        peers = [PeerMemory(**described) for described in connection.recv()]
        for mover in self.movers:
            for rank, peer in enumerate(peers):
                mover.connect("d", rank, peer)

    def there(self, *call):
        self._connection.send(call)
        return self._connection.recv()

    def unit(self, source, target, *, cell=None, **changes):
        load = self.exchange.wire.load(source, target, with_state=False)
        descriptors = load.num_descriptors if cell is None else 1
        unit = TransferUnit(0, "p", "d", source, target, load.num_bytes, descriptors, 0, is_last=False, cell=cell)
        return unit._replace(**changes)

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


@contextmanager
def pair(tmp_path, settings):
    engine = settings["network"]["transport"]
    try:
        open_transport(engine, CPU).close()
    except UnavailableError as missing:
        pytest.skip(str(missing))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with Listener(str(tmp_path / "control"), "AF_UNIX") as listener:
        process = subprocess.Popen([sys.executable, SCRIPT, listener.address], env=environment)
        made = None
        try:
            with listener.accept() as connection:
                made = Pair(settings, process, connection)
                yield made
        finally:
            process.kill()
            process.wait()
            for mover in made.movers if made else ():
                mover.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_equal_ranks_exchange_runs_of_pages(engine, tmp_path):
    with pair(tmp_path, settings_of(engine, 2, 2)) as sides:
        sides.send(sides.unit(SOURCE, TARGET))
        sides.expect(SOURCE, TARGET)
        sides.send(sides.unit((), (), is_last=True))
        sides.expect(SOURCE, TARGET)


@pytest.mark.parametrize("engine", ENGINES)
def test_groups_of_layers_arrive_one_by_one(engine, tmp_path):
    settings = settings_of(engine)
    settings["prefill"]["layer_groups"] = 3
    with pair(tmp_path, settings) as sides:
        for group in (2, 0):
            sides.send(sides.unit(SOURCE, TARGET, after_layers=(1, group)))
        sides.whole[18:36] = 0  # layers 9 to 18 of 28
        planes = sides.there("read")[0]
        assert (planes[18:36] == FILLED_WITH).all()
        sides.movers[0].send(sides.unit(SOURCE, TARGET, after_layers=(1, 1)))
        assert not (sides.there("read")[0][18:36, slots_of(TARGET, PAGE)] == FILLED_WITH).all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_unequal_ranks_exchange_slices(engine, ranks, tmp_path):
    with pair(tmp_path, settings_of(engine, *ranks)) as sides:
        sides.send(sides.unit(SOURCE, TARGET))
        sides.expect(SOURCE, TARGET)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_cells_pass_the_ring(engine, ranks, tmp_path):
    stage_and_scatter(tmp_path, settings_of(engine, *ranks, staging={"ring": "16 MiB"}))


@pytest.mark.parametrize("deduplicate", [False, True])
def test_ranks_with_copies_of_heads_pass_the_ring(deduplicate, tmp_path):
    """16 prefill ranks hold each of 8 heads twice."""
    staging = {"ring": "16 MiB"}
    settings = settings_of("shared-memory", 16, 4, staging=staging, deduplicate_kv_heads=deduplicate)
    stage_and_scatter(tmp_path, settings)


def stage_and_scatter(tmp_path, settings):
    """Two cells, of four pages and of three, the second anywhere in the ring."""
    with pair(tmp_path, settings) as sides:
        for cell, pages, offset in ((0, slice(0, 4), 0), (1, slice(4, 7), 4 << 20)):
            unit = sides.unit(SOURCE[pages], TARGET[pages], cell=cell)
            sides.send(unit, offset)
            sides.there("scatter", Scatter("d", 0, cell, unit.num_bytes, offset), TARGET[pages])
        sides.expect(SOURCE, TARGET)


def test_digests_agree_whatever_the_ranks(tmp_path):
    tokens = range(2, 4 * PAGE - 1)
    with pair(tmp_path, settings_of("shared-memory", 2, 4)) as sides:
        sides.send(sides.unit(SOURCE, TARGET))
        here = {head: value for mover in sides.movers for head, value in mover.digest(SOURCE, tokens).items()}
        assert len(here) == 8
        assert sides.there("digest", TARGET, tokens) == here
        assert sides.there("digest", TARGET, range(2, 4 * PAGE)) != here
        wrong = (TARGET[1], TARGET[0], *TARGET[2:])
        assert sides.there("digest", wrong, tokens) != here


@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_peer_fails_the_transfer(engine, tmp_path):
    with pair(tmp_path, settings_of(engine)) as sides:
        unit = sides.unit(SOURCE, TARGET)
        sides.send(unit)
        sides.process.send_signal(signal.SIGKILL)
        sides.process.wait()
        begin_s = time.monotonic()
        for _ in range(2):
            with pytest.raises(TransferError):
                sides.send(unit)
        assert time.monotonic() - begin_s < 15
        sides.movers[0].disconnect("d", 0)
        with pytest.raises(TransferError, match="d is not connected"):
            sides.send(unit)
