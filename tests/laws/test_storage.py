"""Laws of storage behind host caches: what is found there, what reading it takes, and when a prompt waits for it."""

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from pdsim.core.journal.lines import from_lines, to_line
from pdsim.core.journal.replay import replay
from pdsim.core.memory.host_cache import Prefetcher, PrefetchLimits
from pdsim.core.memory.kv_cache import KvCache
from pdsim.core.memory.page_store import PageStore
from pdsim.core.memory.prefetch_queue import BATCH_PAGES
from pdsim.core.messages import Prefetched, PrefetchKv, StopPrefetch, StoreKv, Tell
from pdsim.core.sequence import Spans, TokenIds
from pdsim.cost.copies import StorageCosts
from pdsim.policy.pages import FirstInFirstOut, LeastRecentlyUsed
from pdsim.scenario.building.machines import restarted, state_machines
from pdsim.scenario.building.sizing import host_caches, resolve
from pdsim.scenario.building.wiring import storage_costs
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.servers import StorageSettings
from pdsim.scenario.yaml_file import ConfigError
from pdsim.sim.bus import Timeline
from pdsim.sim.links.cache_copies import Storage, StorageClient
from tests.laws.test_host_cache import NUM_PAGES, TOKEN_BYTES, WRITES, Tiers, tiered, tiers
from tests.laws.test_radix_cache import tokens
from tests.strategies import aggregated_scenarios, fault_schedules, optimistic_scenarios, scenarios
from tests.support import examples, request, run, run_both_ways, small, small_aggregated

POLICIES = ["best_effort", "wait_complete", "timeout"]
FOREVER_NS = 1 << 60
LEAST_TOKENS = 2


class Read:
    """A prefetch as storage sees it."""

    def __init__(self, command: PrefetchKv) -> None:
        self.command, self.num_found, self.num_read, self.is_stopped = command, -1, 0, False


class Stored(Tiers):
    """Two tiers of an instance and storage, which another instance writes to as well."""

    @initialize(
        page=st.sampled_from([1, 2, 3]),
        policy=st.sampled_from([LeastRecentlyUsed(), FirstInFirstOut()]),
        num_host_pages=st.sampled_from([1, 6, 14, 40]),
        write=st.sampled_from(WRITES),
        waits=st.sampled_from(POLICIES),
        num_stored_pages=st.sampled_from([0, 3, 12, 1000]),
    )
    def start(self, page, policy, num_host_pages, write, waits, num_stored_pages) -> None:
        super().start(page, policy, num_host_pages, write)
        self.cache = stored(tiered(NUM_PAGES, num_host_pages, page, write, policy), waits)
        self.store = PageStore(num_stored_pages, page)
        self.prefixes: set[tuple[int, ...]] = set()
        """Every page that was ever written to storage, by the tokens up to its end."""
        self.queued: dict[int, list[int]] = {}
        self.reads: dict[int, Read] = {}

    def copy(self) -> None:
        host, others = self.cache.host, []
        for command in host.take_copies():
            if isinstance(command, StoreKv):
                self.carry_out(others)
                others = []
                stop = command.start_tokens + len(command.host_pages) * self.page
                ids = command.sequence.ids()
                ends = range(command.start_tokens + self.page, stop + 1, self.page)
                assert [self.on_host[page] for page in command.host_pages] == [ids[:end] for end in ends]
                self.put(ids, command.start_tokens, stop)
            elif isinstance(command, PrefetchKv):
                self.reads[command.request_id] = Read(command)
            elif isinstance(command, StopPrefetch):
                self.reads[command.request_id].is_stopped = True
            else:
                others.append(command)
        self.carry_out(others)

    def carry_out(self, copies) -> None:
        for copy in copies:
            self.cache.host.copies.append(copy)
        super().copy()

    def put(self, ids: list[int], start: int, stop: int) -> None:
        before = self.store.num_used
        num_written = self.store.write(TokenIds(ids), start, stop)
        assert self.store.num_used <= before + num_written
        for end in range(stop - num_written * self.page + self.page, stop + 1, self.page):
            self.prefixes.add(tuple(ids[:end]))

    @rule(ids=tokens)
    def another_instance_writes(self, ids) -> None:
        self.put(ids, 0, len(ids) - len(ids) % self.page)

    @rule(ids=tokens)
    def queue(self, ids) -> None:
        self.num_requests += 1
        self.queued[self.num_requests] = ids
        self.cache.prefetch(self.num_requests, TokenIds(ids), 0)
        self.copy()

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def read(self, data) -> None:
        """Look it up, or read a batch; one that was stopped may still be written into."""
        request_id = data.draw(st.sampled_from(sorted(self.reads)))
        read, tell = self.reads[request_id], self.cache.prefetcher.on_prefetched
        command, ids, is_over = read.command, read.command.prompt.ids(), False
        if read.num_found < 0:
            found = self.store.num_found(command.prompt, command.start_tokens)
            read.num_found = min(found, len(command.host_pages))
            for i in range(found):
                assert tuple(ids[: command.start_tokens + (i + 1) * self.page]) in self.prefixes
            is_over = read.is_stopped or read.num_found < command.least_pages
        else:
            num_pages = data.draw(st.integers(1, max(1, read.num_found - read.num_read)))
            for i in range(read.num_read, min(read.num_found, read.num_read + num_pages)):
                assert command.host_pages[i] in self.cache.prefetcher.held_pages()
                self.on_host[command.host_pages[i]] = ids[: command.start_tokens + (i + 1) * self.page]
                read.num_read += 1
            is_over = read.is_stopped or read.num_read == read.num_found
        tell(Prefetched(request_id, read.num_found, read.num_read, is_over))
        if is_over:
            del self.reads[request_id]

    @precondition(lambda self: self.queued)
    @rule(data=st.data(), now_ns=st.sampled_from([1, FOREVER_NS]))
    def begin(self, data, now_ns) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.queued)))
        if self.cache.prefetcher.awaits(request_id, now_ns):
            assert request_id in self.reads
            assert now_ns < FOREVER_NS or self.waits_for_ever
            return
        self.copy()
        self.admit(self.queued.pop(request_id))

    @property
    def waits_for_ever(self) -> bool:
        return self.cache.prefetcher.next_due_ns(1) is None

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def give_up(self, data) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.queued)))
        del self.queued[request_id]
        self.cache.stop_prefetch(request_id)
        self.copy()

    @invariant()
    def storage_holds_no_more_than_fits(self) -> None:
        assert self.store.num_used <= self.store.num_pages

    @invariant()
    def what_is_held_is_being_read(self) -> None:
        assert self.cache.prefetcher.under_way.keys() == self.reads.keys()


def stored(cache: KvCache, policy: str, least_tokens: int = LEAST_TOKENS) -> KvCache:
    cache.host._stores = True
    limits = PrefetchLimits(policy=policy, least_tokens=least_tokens, max_tokens=1000)
    prefetcher = Prefetcher(cache.host, cache.page_size, limits)
    return KvCache(cache.pool, cache.page_size, cache.prefix_cache, host=cache.host, prefetcher=prefetcher)


TestStored = Stored.TestCase
TestStored.settings = examples(200, stateful_step_count=40)


@given(st.lists(tokens, max_size=20), st.sampled_from([1, 2, 3]))
@examples(200)
def test_with_room_for_all_every_prefix_that_was_written_is_found(prompts, page):
    store = PageStore(1000, page)
    for i, ids in enumerate(prompts):
        sequence, whole = TokenIds(ids), len(ids) - len(ids) % page
        common = max((sequence.common_prefix(0, TokenIds(other), 0) for other in prompts[:i]), default=0)
        found = store.num_found(sequence, 0) * page
        assert found == common - common % page
        assert store.write(sequence, 0, whole) * page == whole - found


def test_the_least_recently_used_goes_and_nothing_stays_behind_a_gap():
    store = PageStore(4, 1)
    for ids in ([1, 2], [3, 4]):
        store.write(TokenIds(ids), 0, 2)
    store.num_found(TokenIds([1, 2]), 0)
    store.write(TokenIds([5, 6]), 0, 2)
    assert [store.num_found(TokenIds(ids), 0) for ids in ([1, 2], [3, 4], [5, 6])] == [2, 0, 2]
    assert store.write(TokenIds([3, 4]), 1, 2) == 0  # its first page is gone
    assert store.write(TokenIds(range(5)), 0, 5) == 0  # more than fits


def test_what_was_read_beside_what_was_computed_meanwhile_is_there_once():
    cache = stored(tiered(NUM_PAGES, 40, 1, "write_through_selective", LeastRecentlyUsed()), "best_effort")
    sequence = TokenIds([1, 2, 3, 4])
    cache.prefetch(7, sequence, 0)
    (asked,) = cache.host.take_copies()
    lease = cache.open(sequence, 4)
    cache.grow(lease, 4)
    cache.checkpoint(lease, sequence, 4)
    cache.prefetcher.on_prefetched(Prefetched(7, 2, 2, True))
    assert cache.host.tree.num_evictable_pages == 0  # the GPU has them, too
    longer = TokenIds([1, 2, 3, 4, 5])
    more = cache.open(longer, 5)
    cache.grow(more, 1)
    cache.checkpoint(more, longer, 5)  # inserts the first four again: those that are lacking are written
    commands = cache.host.take_copies()
    assert [len(asked.host_pages), *(len(getattr(one, "host_pages", ())) for one in commands)] == [4, 2, 2]
    assert [commands[1].start_tokens, cache.host.pool.num_free] == [2, 36]


def prefetching(page: int, **limits: Any) -> KvCache:
    cache = tiered(NUM_PAGES, 400, page, "write_through", LeastRecentlyUsed())
    prefetcher = Prefetcher(cache.host, page, PrefetchLimits(**{"least_tokens": 1, "max_tokens": 1 << 40, **limits}))
    return KvCache(cache.pool, page, cache.prefix_cache, host=cache.host, prefetcher=prefetcher)


@given(st.integers(0, 400), st.integers(0, 10**9))
def test_a_timeout_grows_with_what_was_found_up_to_30_seconds(num_found, begun_ns):
    cache = prefetching(1024, policy="timeout")
    cache.prefetch(7, Spans.of(0, 400 * 1024), begun_ns)
    cache.prefetcher.on_prefetched(Prefetched(7, num_found, 0, False))
    seconds = min(2.0 + 0.1 * num_found, 30)
    assert cache.prefetcher.next_due_ns(begun_ns) == pytest.approx(begun_ns + 1e9 * seconds, abs=1)


@given(st.lists(st.integers(1, 50), max_size=10), st.integers(1, 200))
def test_no_prefetch_begins_while_prefetches_hold_as_many_as_they_may(prompts, max_tokens):
    cache, held = prefetching(1, policy="best_effort", max_tokens=max_tokens), 0
    for i, num_tokens in enumerate(prompts):
        cache.prefetch(i, Spans.of(i, num_tokens), 0)
        held += num_tokens if held < max_tokens and held + num_tokens <= 400 else 0
        assert len(cache.prefetcher.held_pages()) == held


# Whole runs.


@st.composite
def clusters(draw: st.DrawFn, strategy: st.SearchStrategy[Scenario]) -> Scenario:
    scenario = draw(tiers(strategy).filter(host_caches))
    prompts = draw(st.sampled_from([3, 10, 100])) * scenario.page_size
    storage = StorageSettings(
        shared=draw(st.booleans()),
        size=f"{draw(st.sampled_from([0, 50, 300, 100_000])) * TOKEN_BYTES} B",
        read_bandwidth=draw(st.sampled_from(["50 MB/s", "7 GB/s"])),
        write_bandwidth=draw(st.sampled_from(["50 MB/s", "7 GB/s"])),
        io_limit=draw(st.sampled_from(["1e9/s", "1000/s"])),
        client_bandwidth=draw(st.sampled_from([None, "20 MB/s"])),
        latency=draw(st.sampled_from([0, "1 ms"])),
        prefetch=draw(st.sampled_from(POLICIES)),
        prefetch_threshold=prompts,
    )
    scenario = scenario.model_copy(update={"storage": storage})
    try:
        storage_costs(resolve(scenario))
    except ConfigError:  # ranks of two sizes
        scenario = scenario.model_copy(update={"storage": storage.model_copy(update={"shared": False})})
    return scenario


healthy = clusters(st.one_of(scenarios(), optimistic_scenarios(), aggregated_scenarios()))


@given(healthy)
@examples(150)
def test_every_request_ends_with_storage(scenario: Scenario):
    traced = run(scenario, checked=True)
    assert traced.result.stall == []
    assert all(r.outcome == "finished" or "not fit" in r.reason for r in traced.records.requests)


@given(healthy)
@examples(100)
def test_many_steps_at_once_are_single_steps_with_storage(scenario: Scenario):
    run_both_ways(scenario)


@given(clusters(fault_schedules(st.one_of(scenarios(), aggregated_scenarios()))))
@examples(60)
def test_nothing_leaks_with_storage_and_faults_and_its_journal_replays(scenario: Scenario):
    traced = run(scenario, checked=True)
    assert traced.result.stall == []
    assert all(r.outcome in {"finished", "failed"} for r in traced.records.requests)
    scenario = resolve(scenario)
    written = from_lines([to_line(entry) for entry in traced.journal])
    replay(written, state_machines(scenario), lambda name: restarted(scenario, name))


@given(healthy)
@examples(60)
def test_no_link_of_storage_carries_more_than_it_can(scenario: Scenario):
    """Between any two times at which batches begin and end: of a store, and of a client."""
    rows = [row for row in run(scenario).records.host_copies if row.kind in {"read", "store"}]
    costs = storage_costs(resolve(scenario))
    for kind, bandwidth in (("read", costs.read_bandwidth), ("store", costs.write_bandwidth)):
        for name in {row.instance_id for row in rows}:
            own = [row for row in rows if row.kind == kind and row.instance_id == name]
            _require_room(own, min(bandwidth, costs.client_bandwidth))
            assert all(a.end_ns <= b.start_ns for a, b in pairwise(own))  # one at a time
        if scenario.storage.shared:
            _require_room([row for row in rows if row.kind == kind], bandwidth)


def _require_room(rows, bandwidth: float) -> None:
    for first_ns in {row.start_ns for row in rows}:
        inside = sorted((row for row in rows if row.start_ns >= first_ns), key=lambda row: row.end_ns)
        num_bytes = 0
        for row in inside:
            num_bytes += row.num_bytes
            assert num_bytes <= bandwidth * (row.end_ns - first_ns + 1) / 1e9 * (1 + 1e-9)


def without_eviction(scenario: Scenario) -> Scenario:
    def ample(settings):
        host = None if settings.host_cache is None else 4000 * TOKEN_BYTES
        return settings.model_copy(update={"pool_tokens": 4000, "host_cache": host})

    roles = {role: getattr(scenario, role) for role in ("prefill", "decode", "aggregated")}
    return scenario.model_copy(update={role: ample(settings) for role, settings in roles.items() if settings})


@given(healthy)
@examples(40)
def test_storage_that_nobody_reads_changes_no_request(scenario: Scenario):
    """Where all fits: a look for what to prefetch is an access, which moves the order of eviction."""
    scenario = without_eviction(scenario)
    storage = scenario.storage.model_copy(update={"prefetch_threshold": 1_000_000})
    unread, none = (run(scenario.model_copy(update={"storage": one})) for one in (storage, None))
    assert all(row.kind != "read" for row in unread.records.host_copies)
    assert unread.records.requests == none.records.requests


# Queues of one instance.

PAGE_NS, NEVER_NS = 1000, 1 << 62


class Asked(NamedTuple):
    """A prompt whose first num_found pages are in storage. Only a stop is at odd times, so that nothing coincides."""

    at_ns: int
    num_pages: int
    num_found: int
    stop_ns: int


@st.composite
def asked_prompts(draw: st.DrawFn) -> list[Asked]:
    prompts, at_ns = [], 0
    for _ in range(draw(st.integers(1, 10))):
        at_ns += 2 * draw(st.sampled_from([0, 500, 20_000, 400_000]))
        num_pages = draw(st.sampled_from([1, 128, 129, 300]))
        num_found = draw(st.sampled_from([0, 1, 127, 128, 299, 300]))
        stop_ns = at_ns + 1 + draw(st.sampled_from([0, 2_000, 100_000, 600_000, NEVER_NS]))
        prompts.append(Asked(at_ns, num_pages, min(num_pages, num_found), stop_ns))
    return prompts


def by_two_queues(asked: list[Asked], latency_ns: int) -> list[tuple[int, int, int]]:
    """The naive twin. Times when each prompt was looked up and when it was over, and the pages read."""
    ends, looked_up_ns, read_ns = [], 0, 0
    for at_ns, num_pages, num_found, stop_ns in asked:
        looked_up_ns = max(looked_up_ns, at_ns)
        if looked_up_ns < stop_ns:
            looked_up_ns += latency_ns * min(1 + num_found // BATCH_PAGES, -(-num_pages // BATCH_PAGES))
        over_ns, num_read = looked_up_ns, 0
        if num_found and looked_up_ns < stop_ns:
            over_ns = read_ns = max(read_ns, looked_up_ns)
            while num_read < num_found and read_ns < stop_ns:
                batch_pages = min(BATCH_PAGES, num_found - num_read)
                num_read += batch_pages
                over_ns = read_ns = read_ns + latency_ns + batch_pages * PAGE_NS
        ends.append((looked_up_ns, over_ns, num_read))
    return ends


@given(asked_prompts(), st.sampled_from([0, 2_000, 50_000]))
@examples(300)
def test_an_instance_looks_up_and_reads_one_prompt_after_another_as_they_come(asked, latency_ns):
    timeline, told = Timeline(), []
    costs = StorageCosts(
        num_pages=1 << 20,
        read_page_bytes=PAGE_NS,
        write_page_bytes=PAGE_NS,
        read_page_objects=1,
        write_page_objects=1,
        read_bandwidth=1e9,
        write_bandwidth=1e9,
        objects_per_s=1e12,
        client_bandwidth=1e12,
        latency_ns=latency_ns,
    )

    def tell(one: Tell) -> None:
        told.append((timeline.now_ns, one.message))

    storage = Storage(timeline, costs, shared=True, page_size=1, record=[].append, tell=tell)
    client = StorageClient(storage, "prefill-0", "server-0")
    _, store = storage.store_of("server-0")
    for i, prompt in enumerate(asked):
        tokens = Spans.of(i, prompt.num_pages)
        store.write(tokens, 0, prompt.num_found)
        command = PrefetchKv(i, tokens, 0, tuple(range(prompt.num_pages)), 1, prompt.num_pages)
        timeline.after(prompt.at_ns, client.prefetches.prefetch, command)
        if prompt.stop_ns < NEVER_NS:
            timeline.after(prompt.stop_ns, client.prefetches.stop, StopPrefetch(i))
    timeline.run_all()
    reports = [[(now_ns, one) for now_ns, one in told if one.request_id == i] for i in range(len(asked))]
    ends = [(each[0][0], each[-1][0], each[-1][1].num_read) for each in reports]
    assert all([one.is_over for _, one in each] == [False] * (len(each) - 1) + [True] for each in reports)
    assert ends == by_two_queues(asked, latency_ns)


costs = st.builds(
    StorageCosts,
    num_pages=st.just(1 << 20),
    read_page_bytes=st.integers(1000, 100_000),
    write_page_bytes=st.integers(1000, 100_000),
    read_page_objects=st.sampled_from([1, 2, 8]),
    write_page_objects=st.sampled_from([1, 2, 8]),
    read_bandwidth=st.sampled_from([1e9, 1e10]),
    write_bandwidth=st.sampled_from([1e9, 1e10]),
    objects_per_s=st.sampled_from([1e4, 1e5, 1e9]),
    client_bandwidth=st.sampled_from([1e8, 1e12]),
    latency_ns=st.integers(0, 10**6),
)


@given(costs, st.integers(1, 400))
@examples(100)
def test_batches_take_their_latency_and_the_time_of_the_narrowest_link(costs, num_pages):
    """What an instance writes alone, and what another one reads of it: bytes, objects, and the client's own link."""
    timeline, rows = Timeline(), []
    storage = Storage(timeline, costs, shared=True, page_size=1, record=rows.append, tell=lambda _: None)
    writer, reader = (StorageClient(storage, f"prefill-{i}", f"server-{i}") for i in range(2))
    tokens, pages = Spans.of(0, num_pages), tuple(range(num_pages))
    writer.store(StoreKv(tokens, 0, pages), 0)
    timeline.run_all()
    reader.prefetches.prefetch(PrefetchKv(0, tokens, 0, pages, 1, len(pages)))
    timeline.run_all()
    batches = [min(BATCH_PAGES, num_pages - first) for first in range(0, num_pages, BATCH_PAGES)]
    assert [(row.kind, row.num_pages) for row in rows] == [("store", num_pages), *(("read", n) for n in batches)]
    for row in rows:
        reads = row.kind == "read"
        page_bytes = costs.read_page_bytes if reads else costs.write_page_bytes
        bandwidth = costs.read_bandwidth if reads else costs.write_bandwidth
        page_objects = costs.read_page_objects if reads else costs.write_page_objects
        links_s = (page_bytes / min(bandwidth, costs.client_bandwidth), page_objects / costs.objects_per_s)
        latency_ns = -(-row.num_pages // BATCH_PAGES) * costs.latency_ns
        assert row.end_ns - row.start_ns == pytest.approx(latency_ns + 1e9 * row.num_pages * max(links_s), abs=3)


# Closed forms.


def conversations(num_prefills: int = 2, **changes) -> Scenario:
    """A prompt of 1,000 tokens, in pages of 4, on one prefill instance after another."""
    specs = [request(i, Spans.of(1, 1000), 2, arrival_ns=i * 4_000_000_000) for i in range(num_prefills)]
    return small(
        *specs,
        prefill__instances=num_prefills,
        prefill__pool_tokens=1200,
        prefill__chunked_prefill_tokens=0,
        prefill__host_cache=f"{5000 * TOKEN_BYTES} B",
        **changes,
    )


PAGE_BYTES = 4 * TOKEN_BYTES


def test_what_one_instance_computed_another_reads():
    shared = run(conversations(storage={"shared": True}))
    assert [r.num_prefill_cached_tokens for r in shared.records.requests] == [0, 996]
    fields = shared.result.summary()["pdsim"]
    assert fields["storage_read_tokens"] == 1000
    assert fields["storage_read_bytes"] == fields["storage_written_bytes"] == 250 * PAGE_BYTES
    own = run(conversations(storage={}))
    assert [r.num_prefill_cached_tokens for r in own.records.requests] == [0, 0]
    assert own.result.summary()["pdsim"]["storage_written_bytes"] == 2 * 250 * PAGE_BYTES
    assert "storage_read_tokens" not in run(small(request(0, 8, 2))).result.summary()["pdsim"]


@pytest.mark.parametrize(
    ("storage", "seconds"),
    [
        ({"read_bandwidth": "2 GB/s"}, 250 * PAGE_BYTES / 2e9),
        ({"read_bandwidth": "2 GB/s", "drives": 4}, 250 * PAGE_BYTES / 8e9),
        ({"client_bandwidth": "1 GB/s"}, 250 * PAGE_BYTES / 1e9),
        ({"io_limit": "1000/s"}, 250 / 1000),
        ({"io_limit": "1000/s", "drives": 2}, 250 / 2000),
    ],
)
def test_a_prompt_waits_for_two_lookups_and_two_batches(storage, seconds):
    """Each takes the latency; the forward begins when all is read, and waits for its load as for any."""
    traced = run(conversations(storage={"shared": True, "latency": "3 ms", **storage}))
    waits = traced.records.requests[1]
    reads = [row for row in traced.records.host_copies if row.kind == "read"]
    begun_ns = 4_001_000_000  # a message later
    assert [row.num_pages for row in reads] == [128, 122]
    assert reads[0].start_ns == begun_ns + 2 * 3_000_000
    assert reads[-1].end_ns == pytest.approx(begun_ns + 4 * 3_000_000 + 1e9 * seconds, abs=3)
    assert waits.prefill_start_ns == reads[-1].end_ns


@pytest.mark.parametrize(("engine", "num_readers"), [("sglang", 4), ("vllm", 1)])
def test_one_rank_writes_latent_kv(engine: str, num_readers: int):
    """All four ranks hold the same KV. In SGLang each reads it; LMCache reads it once for all."""
    servers = {"aggregated__tp": 4, "aggregated__host_cache": "auto", "storage": {}}
    if engine == "vllm":
        servers["aggregated__host_cache_connector"] = "lmcache"
    costs = storage_costs(
        resolve(small_aggregated(request(0, 9, 9), model="moonlight-16b-a3b", engine=engine, **servers))
    )
    assert costs is not None
    assert (costs.read_page_objects, costs.write_page_objects) == (num_readers, 1)
    assert costs.read_page_bytes == num_readers * costs.write_page_bytes


def test_clients_of_a_store_share_its_bandwidth():
    """Two of three instances read the same prompt at once: each takes twice as long."""
    specs = [request(i, Spans.of(1, 1000), 2, arrival_ns=min(i, 1) * 4_000_000_000) for i in range(3)]
    changes = {"prefill__instances": 3, "prefill__host_cache": f"{9000 * TOKEN_BYTES} B"}
    storage = {"shared": True, "read_bandwidth": "1 GB/s", "latency": 0, "io_limit": "1e9/s"}
    records = run(small(*specs, **changes, storage=storage)).records
    reads = [row for row in records.host_copies if row.kind == "read"]
    assert {row.instance_id for row in reads} == {"prefill-1", "prefill-2"}
    seconds = (reads[-1].end_ns - reads[0].start_ns) / 1e9
    assert seconds == pytest.approx(2 * 250 * PAGE_BYTES / 1e9, rel=1e-6)


@pytest.mark.parametrize(
    ("policy", "cached", "begins_s"),
    [
        ("best_effort", 0, 0.002),
        ("wait_complete", 996, 0.001 + 250 * PAGE_BYTES / 20e6),
        ("timeout", 512, 0.001 + 2.0 + 0.1 * 1000 / 1024),
    ],
)
def test_a_prompt_waits_as_its_policy_says(policy, cached, begins_s):
    """Read at 20 MB/s, 128 pages take 2.9 s; a timeout of 2.1 s ends before that, and so does a third of it all."""
    rate = "40 MB/s" if policy == "timeout" else "20 MB/s"
    storage = {"shared": True, "read_bandwidth": rate, "latency": 0, "prefetch": policy, "io_limit": "1e9/s"}
    last = run(conversations(storage=storage)).records.requests[1]
    assert last.num_prefill_cached_tokens == cached
    assert last.prefill_start_ns == pytest.approx(4e9 + 1e9 * begins_s, abs=2)


def test_others_pass_a_prompt_that_waits():
    """The third request comes with the second, to the same instance."""
    storage = {"shared": True, "read_bandwidth": "20 MB/s", "latency": 0, "prefetch": "wait_complete"}
    specs = [request(i, Spans.of(1, 1000), 2, arrival_ns=i * 4_000_000_000) for i in range(2)]
    specs += [request(i, 8, 2, arrival_ns=4_000_000_000 + i) for i in (2, 3)]
    host = f"{9000 * TOKEN_BYTES} B"
    records = run(small(*specs, prefill__instances=2, prefill__host_cache=host, storage=storage)).records
    by_id = {row.request_id: row for row in records.requests}
    assert by_id[3].prefill_start_ns < 4_010_000_000
    assert by_id[1].prefill_start_ns > 9_000_000_000


def test_the_next_turn_reads_what_decode_wrote():
    """Decode stores prompt and output; prefill, whose GPU has the prompt alone, reads the output."""
    prompt, output = Spans.of(1, 600), Spans.of(2, 400)
    turns = [
        request(0, prompt, 400)._replace(output=output),
        request(1, prompt.then(output).then(Spans.of(3, 8)), 2, arrival_ns=20_000_000_000),
    ]
    host = f"{9000 * TOKEN_BYTES} B"
    changes = {"decode__radix_cache": True, "decode__host_cache": host, "prefill__host_cache": host}
    cached = [
        run(small(*turns, **changes, storage=storage)).records.requests[1].num_prefill_cached_tokens
        for storage in (None, {"shared": True}, {"shared": True, "prefetch_threshold": 401})
    ]
    assert cached == [600, 996, 600]


def test_what_goes_from_storage_while_it_is_read_is_not_read():
    """There is room for one prompt of 1,000 tokens: another takes its place before its second batch."""
    storage = {
        "shared": True,
        "size": f"{1100 * TOKEN_BYTES} B",
        "read_bandwidth": "20 MB/s",
        "prefetch": "wait_complete",
    }
    specs = [request(i, Spans.of(1, 1000), 2, arrival_ns=i * 4_000_000_000) for i in range(2)]
    specs.append(request(2, Spans.of(2, 1000), 2, arrival_ns=4_000_000_000 + 1))
    host = f"{9000 * TOKEN_BYTES} B"
    changes = {"prefill__instances": 2, "prefill__chunked_prefill_tokens": 0, "prefill__host_cache": host}
    last = run(small(*specs, **changes, storage=storage)).records.requests[1]
    assert last.num_prefill_cached_tokens == 512
    assert last.prefill_start_ns == pytest.approx(4.0013e9 + 1e9 * 128 * PAGE_BYTES / 20e6, abs=2)


def test_few_tokens_are_not_read():
    for threshold, cached in ((1000, 996), (1001, 0)):
        storage = {"shared": True, "prefetch_threshold": threshold}
        assert run(conversations(storage=storage)).records.requests[1].num_prefill_cached_tokens == cached
