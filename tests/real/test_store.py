"""Storage behind host memory: Mooncake's store has the KV that its names say, and tokens stay those of one process."""

import asyncio
import hashlib
import logging
import sys
from collections import Counter, deque
from functools import partial
from socket import create_connection
from subprocess import PIPE, Popen
from time import monotonic, sleep
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="real mode needs torch")

from hypothesis import given
from hypothesis import strategies as st
from pdreal.clients import Clients
from pdreal.control.logbook import read_journal, read_records
from pdreal.control.tasks import LookUpPages, ReadPages, StorePages
from pdreal.launcher import Launcher
from pdreal.memory.paged_kv import HostKv, PagedKv
from pdreal.memory.storage_threads import StorageThreads
from pdreal.memory.stored_kv import Moved, StoredKv, page_hashes
from pdreal.rank.storage import Storage
from pdreal.run import RealRun
from pdreal.settings.host import LOOPBACK, LaunchError
from pdreal.settings.options import Options
from pdreal.settings.scenario import real_scenario, served_scenario

from pdsim.core.journal.calls import KILLED
from pdsim.core.journal.replay import replay
from pdsim.core.messages import PrefetchKv, StopPrefetch, StoreKv
from pdsim.core.sequence import TokenIds, UnseenOutput
from pdsim.scenario.building.machines import restarted, state_machines
from pdsim.scenario.yaml_file import ConfigError
from tests.real import clusters
from tests.support import examples

STORAGE = {"shared": True, "size": "64 MB", "prefetch": "wait_complete", "prefetch_threshold": 16}
TIGHT = {
    "workload__num_requests": 40,
    "workload__num_prefixes": 8,
    "workload__input_tokens": {"use": "uniform", "low": 3, "high": 30},
    "prefill__pool_tokens": 240,
    "prefill__host_cache": "1 MB",
    "storage": STORAGE,
}
"""Prompts continue what prefill has evicted, also from host memory."""


@given(st.lists(st.integers(0, 2**31), max_size=30), st.integers(1, 4), st.integers(0, 3))
@examples(50)
def test_a_page_is_named_by_all_tokens_up_to_its_end(tokens, page_size, num_skipped):
    num_pages = len(tokens) // page_size
    skipped = min(num_skipped, num_pages)
    name, names = b"", []
    for page in range(num_pages):
        of_page = tokens[page * page_size : (page + 1) * page_size]
        name = hashlib.sha256(name + b"".join(token.to_bytes(4, "little") for token in of_page)).digest()
        names.append(name.hex())
    sequence = TokenIds(tokens)
    assert page_hashes(sequence, page_size, skipped * page_size, num_pages - skipped) == names[skipped:]
    unseen = UnseenOutput(sequence, 7, 3 * page_size)
    assert page_hashes(unseen, page_size, skipped * page_size, num_pages - skipped + 2) == names[skipped:]


class Dict:
    """A store in this process. Objects with names in `broken` can be neither written nor read."""

    def __init__(self):
        self.objects, self.broken, self.num_writes = {}, set(), 0

    def register(self, memory):
        self.bytes = memory.view(torch.uint8).view(-1)
        self.begin = memory.data_ptr()

    def num_there(self, names):
        return next((i for i, name in enumerate(names) if name not in self.objects), len(names))

    def missing(self, names):
        return [i for i, name in enumerate(names) if name not in self.objects]

    def read(self, names, begins, num_bytes):
        for i, (name, begin) in enumerate(zip(names, begins, strict=True)):
            if name not in self.objects or name in self.broken:
                return i
            self._at(begin, num_bytes).copy_(self.objects[name])
        return len(names)

    def write(self, names, begins, num_bytes):
        self.num_writes += len(names)
        good = {name: begin for name, begin in zip(names, begins, strict=True) if name not in self.broken}
        self.objects |= {name: self._at(begin, num_bytes).clone() for name, begin in good.items()}
        return len(good) == len(names)

    def _at(self, begin, num_bytes):
        return self.bytes[begin - self.begin : begin - self.begin + num_bytes]


def ranks(num_ranks=1, *, is_same=False, num_host_pages=400):
    """A store, and what each rank of an instance keeps there of its random KV."""
    shape = {"num_pages": 4, "page_size": 2, "num_layers": 1, "num_kv_heads": 1, "head_dim": 4}
    store, stored, hosts = Dict(), [], []
    for rank in range(num_ranks):
        host = HostKv(PagedKv(**shape, dtype=torch.float32, device=torch.device("cpu")), num_host_pages)
        host.memory.random_()
        hosts.append(host.memory)
        stored.append(StoredKv(host, store, rank, is_same=is_same))
        store.register(host.memory)
    return store, stored, hosts


def test_pages_are_read_as_they_were_written_and_missing_ones_alone_are_written():
    store, (stored,), (memory,) = ranks()
    names = [str(i) for i in range(300)]
    before = memory.clone()
    assert stored.write(names[:100], range(1, 101)).num_pages == 100
    assert stored.write(names, range(1, 301)).num_pages == 200
    assert store.num_writes == 300
    memory.zero_()
    store.objects.pop("270_0")
    assert stored.num_there(names) == 270
    store.broken.add("90_0")
    assert stored.read(names[:128], range(101, 229)).num_pages == 90
    assert torch.equal(memory[101:191], before[1:91])
    assert not memory[191:].any()


def test_a_batch_that_is_not_written_ends_the_write():
    store, (stored,), _ = ranks()
    names = [str(i) for i in range(300)]
    store.broken.add("130_0")
    assert stored.write(names, range(1, 301)).num_pages == 128
    assert "299_0" not in store.objects


@pytest.mark.parametrize(("is_same", "names"), [(False, {"a_0", "a_1"}), (True, {"a"})])
def test_each_rank_writes_its_own_kv_and_one_rank_what_all_hold(is_same, names):
    store, stored, _ = ranks(2, is_same=is_same)
    for rank in stored:
        rank.write(["a"], [1])
    assert set(store.objects) == names
    assert stored[1].write(["b"], [1]).num_pages == (0 if is_same else 1)


def test_a_write_is_awaited_by_whoever_overwrites_its_pages():
    _, (stored,), _ = ranks()
    threads = StorageThreads(stored)
    writing = threads.submit(StorePages(["a", "b"], [1, 2]))
    assert threads.user_of([3]) is None
    assert threads.user_of([2, 3]) is writing
    writing.result(10)
    assert threads.submit(ReadPages(["b"], [2])).result(10).num_pages == 1
    assert threads.submit(LookUpPages(["a", "x"])).result(10) == 1


class Play:
    """Copies, prefetches and writes of one instance whose threads work in any order. Pages have one token each."""

    def __init__(self, num_ranks=1):
        scenario = real_scenario(clusters.scenario(**TIGHT, page_size=1), Options())[0]
        spec = SimpleNamespace(instance_id="prefill-0", role="prefill", scenario=scenario)
        self.notes = []
        log = SimpleNamespace(note=lambda _, copy: self.notes.append(copy))
        group = SimpleNamespace(begin=self.begin)
        self.storage = Storage(spec, group, SimpleNamespace(epoch_ns=0), log, self.tell)
        self.num_ranks = num_ranks
        self.threads = {LookUpPages: deque(), ReadPages: deque(), StorePages: deque()}
        self.copies, self.memory, self.store = deque(), {}, {}
        self.reserved, self.told, self.num_tokens = {}, [], 0

    def begin(self, task, on_done):
        self.threads[type(task)].append((task, self.user_of(task), on_done))
        if isinstance(task, StorePages):
            self.check(task)

    def user_of(self, task):
        """The write that ranks let end before they overwrite its pages."""
        writing = [each[0] for each in self.threads[StorePages]]
        pages = () if isinstance(task, LookUpPages | StorePages) else task.host_pages
        return next((write for write in writing if not set(pages).isdisjoint(write.host_pages)), None)

    def tell(self, message):
        self.told.append(message)
        if message.is_over:
            page, token = self.reserved.pop(message.request_id)
            if message.num_read:
                assert self.memory[page] == token

    def check(self, task):
        for page_hash, page in zip(task.hashes, task.host_pages, strict=True):
            assert page_hash == name_of(self.memory[page])

    def copy(self, page):
        """KV of a new token goes to a host page, and from there to storage."""
        self.num_tokens += 1
        pages = SimpleNamespace(host_pages=(page,))
        self.storage.on_copy((page,))
        self.copies.append((page, self.num_tokens, self.user_of(pages)))
        self.storage.begin(StoreKv(TokenIds([self.num_tokens]), 0, (page,)))

    def prefetch(self, page, token):
        request_id = len(self.told) + 100 * self.num_tokens + 10_000 * page
        self.reserved[request_id] = page, token
        self.storage.begin(PrefetchKv(request_id, TokenIds([token]), 0, (page,), 1, 1))

    def end_copy(self):
        page, token, user = self.copies[0]
        if user is None or all(each[0] is not user for each in self.threads[StorePages]):
            self.copies.popleft()
            self.memory[page] = token
            self.storage.on_copied()

    def end(self, kind):
        task, user, on_done = self.threads[kind][0]
        if user is not None and any(each[0] is user for each in self.threads[StorePages]):
            return
        self.threads[kind].popleft()
        if kind is LookUpPages:
            on_done([int(task.hashes[0] in self.store)] * self.num_ranks, None)
            return
        if kind is ReadPages:
            self.memory[task.host_pages[0]] = self.store[task.hashes[0]]
        else:
            self.check(task)
            self.store[task.hashes[0]] = self.memory[task.host_pages[0]]
        on_done([Moved(1, 0, 1)] * self.num_ranks, None)


def name_of(token):
    return page_hashes(TokenIds([token]), 1, 0, 1)[0]


@given(st.data())
@examples(60)
def test_every_object_is_the_kv_of_its_tokens_in_whatever_order_threads_work(data):
    play = Play()
    for _ in range(data.draw(st.integers(5, 60), "steps")):
        held = {page for page, _ in play.reserved.values()}
        free = [page for page in range(1, 5) if page not in held]
        busy = [kind for kind, tasks in play.threads.items() if tasks]
        can = ["copy", "prefetch"] if free else []
        can += ["end copy"] if play.copies else []
        can += ["stop"] if play.reserved else []
        match data.draw(st.sampled_from([*can, *busy, *busy]), "what"):
            case "copy":
                play.copy(data.draw(st.sampled_from(free), "page"))
            case "prefetch":
                token = data.draw(st.integers(1, max(1, play.num_tokens)), "token")
                play.prefetch(data.draw(st.sampled_from(free), "page"), token)
            case "end copy":
                play.end_copy()
            case "stop":
                play.storage.begin(StopPrefetch(next(iter(play.reserved))))
            case kind:
                play.end(kind)
    while play.copies or any(play.threads.values()):
        for kind in [kind for kind, tasks in play.threads.items() if tasks]:
            play.end(kind)
        if play.copies:
            play.end_copy()
    assert all(page_hash == name_of(token) for page_hash, token in play.store.items())
    assert not play.reserved


def test_an_instance_gets_what_all_its_ranks_have(caplog):
    play = Play()
    play.storage.begin(PrefetchKv(1, TokenIds(range(9)), 0, (1, 2, 3), 1, 3))
    play.reserved[1] = 1, None
    play.threads[LookUpPages].popleft()[2]([3, 2], None)
    task, _, on_read = play.threads[ReadPages].popleft()
    assert task.host_pages == (1, 2)
    play.memory[1] = None
    on_read([Moved(2, 5, 9), [1, 3, 8]], None)
    assert [(one.num_found, one.num_read, one.is_over) for one in play.told] == [(2, 0, False), (1, 1, True)]
    (note,) = play.notes
    assert (note.kind, note.num_pages, note.start_ns, note.end_ns) == ("read", 1, 3, 9)
    play.storage.begin(PrefetchKv(2, TokenIds(range(9)), 0, (1, 2, 3), 1, 3))
    play.reserved[2] = 1, None
    with caplog.at_level(logging.WARNING):
        play.threads[LookUpPages].popleft()[2]([], "RuntimeError: no")
    assert play.told[-1].num_found == 0
    assert "a lookup in storage failed: RuntimeError: no; its pages count as missing" in caplog.text


def test_real_mode_refuses_stores_of_single_servers():
    with pytest.raises(ConfigError, match=r"storage.shared: real mode has Mooncake's store"):
        real_scenario(clusters.scenario(**{**TIGHT, "storage": {**STORAGE, "shared": False}}), Options())


def test_a_server_refuses_roles_that_cannot_read_each_others_pages():
    roles = {"decode__tp": 2, "decode__radix_cache": True, "decode__host_cache": "1 MB"}
    with pytest.raises(ConfigError, match=r"storage.shared: prefill has tp 1 and decode tp 2"):
        served_scenario(clusters.scenario(**TIGHT, **roles), Options())


# With Mooncake.


@pytest.fixture
def mooncake():
    pytest.importorskip("mooncake.store", reason="needs Mooncake's wheel and libibverbs1", exc_type=ImportError)


def check(real, resolved, logs):
    """Tokens are right, nothing is left and the journal replays: pages copied, by instance and kind."""
    assert real.failure is None
    assert not real.leaks
    assert len(real.outputs) == TIGHT["workload__num_requests"]
    assert not clusters.wrong_outputs(resolved, real.outputs)
    assert replay(read_journal(logs), state_machines(resolved), partial(restarted, resolved)) > len(real.outputs)
    pages = Counter()
    for copy in read_records(logs).host_copies:
        pages[copy.instance_id, copy.kind] += copy.num_pages
    return pages


LATENTS = {"model": "tiny-deepseek-v3", "prefill__tp": 2}


@pytest.mark.parametrize("changes", [{}, LATENTS], ids=["KV", "latents, TP2"])
def test_an_instance_reads_what_another_one_wrote(mooncake, changes, tmp_path):
    scenario = clusters.scenario(**TIGHT, **changes, prefill__instances=2, router="round_robin", client__concurrency=1)
    pages = check(*clusters.run(scenario, logs=tmp_path), tmp_path)
    assert all(pages[f"prefill-{i}", kind] for i in range(2) for kind in ("store", "read"))


def run_with_event(scenario, num_first, event, logs):
    """To the end; the event happens when the first requests have ended, and others are sent behind it."""
    resolved, requests = real_scenario(scenario, Options())
    parts = requests[:num_first], requests[num_first:]
    clients = [Clients(resolved, part, Options(), progress=lambda _: None) for part in parts]

    def on_end(request):
        clients[request.request_id >= num_first].on_end(request)

    async def play():
        launcher = Launcher(resolved, Options(), folder=logs, on_end=on_end)
        await launcher.start()
        await clients[0].serve(launcher)
        await event(launcher)
        await clients[1].serve(launcher)
        leaks = await launcher.stop()
        return RealRun(clients[0].outputs | clients[1].outputs, leaks, launcher.failure)

    return asyncio.run(play()), resolved


def test_an_instance_reads_what_its_life_before_wrote(mooncake, tmp_path):
    async def restart(launcher):
        launcher.kill("prefill-0", restart_after_s=0.0)
        for answers in (False, True):
            await clusters._until("prefill-0", answers, launcher)

    scenario = clusters.scenario(**TIGHT, client__concurrency=1, health={"heartbeat_interval": "50 ms"})
    check(*run_with_event(scenario, 30, restart, tmp_path), tmp_path)
    (killed,) = (entry for entry in read_journal(tmp_path) if entry[:2] == ("prefill-0", KILLED))
    copies = [copy for copy in read_records(tmp_path).host_copies if copy.start_ns > killed.args[0]]
    assert copies[0].kind == "read"


@pytest.mark.parametrize("lost", ["master", "drive 0"])
def test_pages_of_a_lost_store_are_computed_again(mooncake, lost, tmp_path, caplog):
    async def lose(launcher):
        launcher._instances.fleet.store.kill(lost)

    scenario = clusters.scenario(**{**TIGHT, "storage": {**STORAGE, "prefetch": "best_effort"}})
    with caplog.at_level(logging.ERROR):
        pages = check(*run_with_event(scenario, 38, lose, tmp_path), tmp_path)
    assert pages["prefill-0", "store"] > 0
    assert f"the store's {lost} ended (exit code -9); pages there count as missing" in caplog.text


def test_a_store_ends_with_a_launcher_that_is_killed(mooncake):
    script = """
from time import sleep
from pdreal.measure.storage import running_store
with running_store(1 << 24) as master:
    print(master, flush=True)
    sleep(60)
"""
    with Popen([sys.executable, "-c", script], stdout=PIPE, text=True) as process:
        port = int(process.stdout.readline().rpartition(":")[2])
        assert listens(port)
        process.kill()
    until_s = monotonic() + 20
    while listens(port):
        assert monotonic() < until_s
        sleep(0.05)


def listens(port):
    try:
        create_connection((LOOPBACK, port)).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_store_needs_memory_of_the_host(mooncake):
    scenario, _ = real_scenario(clusters.scenario(**{**TIGHT, "storage": {"shared": True}}), Options())
    with pytest.raises(LaunchError, match=r"storage: 1 drives of 3840 GB are memory of this host"):
        asyncio.run(Launcher(scenario, Options()).start())
