"""Host memory behind the pages of a rank: copies keep every byte, and others wait for them where they must."""

import pytest

torch = pytest.importorskip("torch", reason="real mode needs torch")

from random import Random
from types import SimpleNamespace

from pdreal.memory import paged_kv
from pdreal.memory.paged_kv import HostKv, PagedKv
from pdreal.rank.group import ComputedTokens
from pdreal.rank.host_copies import HostCopies
from pdreal.settings.scenario import for_real

from pdsim.core.messages import KvGranted, LoadBack, LoadedBack, Send, TransferUnit, WriteBackup
from pdsim.scenario.building.sizing import resolve
from tests.real import clusters
from tests.real.models import GPU_OR_CPU


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("part_bytes", [1, 10_000, 1 << 30])
def test_pages_come_back_into_other_pages_as_they_were(dtype, part_bytes, monkeypatch):
    monkeypatch.setattr(paged_kv, "_PART_BYTES", part_bytes)
    shape = {"num_pages": 40, "page_size": 4, "num_layers": 3, "num_kv_heads": 2, "head_dim": 16}
    kv = PagedKv(**shape, dtype=getattr(torch, dtype), device=GPU_OR_CPU)
    page_of = kv.memory.view(torch.uint8).view(len(kv.planes), 41, -1)
    page_of.random_(0, 255)
    before = page_of.clone()
    rng = Random(0)
    pages, others, host_pages = (rng.sample(range(1, n + 1), 20) for n in (40, 40, 60))
    host_pages[5:12] = range(61, 68)  # a run
    host = HostKv(kv, 67)
    host.copy(WriteBackup(tuple(pages), tuple(host_pages), blocks=False))
    page_of.zero_()
    host.copy(LoadBack(0, tuple(host_pages), tuple(others)))
    assert torch.equal(page_of[:, others], before[:, pages])
    untouched = [page for page in range(41) if page not in others]
    assert not page_of[:, untouched].any()


def copies(role):
    """Those of an instance whose copies end when they are told to, and what it carries out and is told."""
    scenario = resolve(for_real(clusters.scenario(), clusters.Options()))
    begun, done = [], []
    group = SimpleNamespace(
        begin_or_fail=lambda task, what, then: begun.append(lambda: then([ComputedTokens([], 0, 1)]))
    )
    log = SimpleNamespace(note=lambda *_: None)
    spec = SimpleNamespace(instance_id=f"{role}-0", role=role, scenario=scenario, store=None)
    timeline = SimpleNamespace(epoch_ns=0)
    return HostCopies(spec, group, None, timeline, log, done.extend, done.append), begun, done


GRANT = Send("prefill-0", KvGranted(7, 0, (3,)))
UNIT = TransferUnit(7, "prefill-0", "decode-0", (3,), (3,), 1, 1, 0, is_last=False)
WRITE, LOAD = WriteBackup((3,), (9,), blocks=False), LoadBack(7, (9,), (3,))


def test_decode_grants_no_pages_that_are_being_copied():
    host, begun, done = copies("decode")
    host.write_back(WRITE)
    host.write_back(WRITE)
    assert host.hold_back(GRANT)
    begun[0]()
    assert done == []
    begun[1]()
    assert done == [GRANT]
    assert not host.hold_back(GRANT)


def test_prefill_sends_no_pages_that_are_being_loaded():
    host, begun, done = copies("prefill")
    host.write_back(WRITE)
    assert not host.hold_back(UNIT)
    host.load_back(LOAD)
    assert host.hold_back(UNIT)
    assert not host.hold_back(Send("decode-0", LoadedBack(1)))
    begun[1]()
    assert done == [UNIT]


def test_decode_hears_when_its_pages_are_loaded():
    host, begun, done = copies("decode")
    host.load_back(LOAD)
    assert not host.hold_back(GRANT)
    begun[0]()
    assert done == [LoadedBack(7)]
