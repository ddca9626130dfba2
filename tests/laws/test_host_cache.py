"""Laws of host memory behind the prefix cache: what it keeps, what it gives back, and when."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdsim.core.invariants import check_cache
from pdsim.core.journal.lines import from_lines, to_line
from pdsim.core.journal.replay import replay
from pdsim.core.memory.host_cache import LEAST_TOKENS, HostCache
from pdsim.core.memory.kv_cache import KvCache, Lease
from pdsim.core.memory.radix_cache import PagePool, RadixCache
from pdsim.core.messages import KvGranted, LoadBack, LoadRetracted, Send, WriteBackup
from pdsim.core.sequence import Spans, TokenIds
from pdsim.cost.copies import HostCopies, HostLink, end_behind_load
from pdsim.metrics.explanation.failures import failures_of
from pdsim.policy.pages import FirstInFirstOut, LeastFrequentlyUsed, LeastRecentlyUsed
from pdsim.scenario.building.machines import state_machines
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.schema import Scenario
from tests.laws.test_radix_cache import Holder, below, tokens
from tests.markdown import ROOT
from tests.strategies import aggregated_scenarios, fault_schedules, optimistic_scenarios, scenarios
from tests.support import decisions, examples, request, run, run_both_ways, small

NUM_PAGES = 14
WRITES = ["write_through", "write_through_selective", "write_back"]
TOKEN_BYTES = 114_688
"""qwen3-0.6b: 28 layers, 8 KV heads of 128, keys and values in bf16."""


def tiered(num_pages: int, num_host_pages: int | None, page: int, write: str, policy: object) -> KvCache:
    pool = PagePool(num_pages)
    tree, host = RadixCache(pool, page, policy), None
    if num_host_pages is not None:
        host = HostCache(PagePool(num_host_pages), tree, policy, write, least_tokens=1)
    return KvCache(pool, page, tree, host=host)


class Tiers(RuleBasedStateMachine):
    """Beside a shadow of both memories: what each page holds is the tokens up to its end."""

    @initialize(
        page=st.sampled_from([1, 2, 3]),
        policy=st.sampled_from([LeastRecentlyUsed(), LeastFrequentlyUsed(), FirstInFirstOut()]),
        num_host_pages=st.sampled_from([0, 1, 6, 14, 40, 1000]),
        write=st.sampled_from(WRITES),
    )
    def start(self, page, policy, num_host_pages, write) -> None:
        self.page, self.write = page, write
        self.cache = tiered(NUM_PAGES, num_host_pages, page, write, policy)
        self.holders: list[Holder] = []
        self.on_gpu: dict[int, list[int]] = {}
        self.on_host: dict[int, list[int]] = {}
        self.num_requests = 0

    def copy(self) -> None:
        for copy in self.cache.host.take_copies():
            if isinstance(copy, WriteBackup):
                assert copy.blocks == (self.write == "write_back")
                self.on_host |= {h: self.on_gpu[p] for p, h in zip(copy.pages, copy.host_pages, strict=True)}
            else:
                self.on_gpu |= {p: self.on_host[h] for p, h in zip(copy.pages, copy.host_pages, strict=True)}

    def compute(self, holder: Holder) -> None:
        """The pages that it owns itself."""
        self.copy()
        lease = holder.lease
        for i in range(lease.num_shared, len(lease.table)):
            self.on_gpu[lease.table[i]] = holder.ids[: (i + 1) * self.page]

    @rule(ids=tokens)
    def admit(self, ids) -> None:
        sequence = TokenIds(ids)
        lease = self.cache.open(sequence, len(ids))
        num_pages = -(-len(ids) // self.page)
        if num_pages - lease.num_shared > self.cache.num_available_pages:
            self.cache.drop(lease)
            return
        if num_loadable := self.cache.num_loadable_pages(lease, sequence, len(ids), self.num_requests):
            self.num_requests += 1
            self.cache.load(lease, sequence, num_loadable, self.num_requests)
        self.cache.grow(lease, num_pages - len(lease.table))
        holder = Holder(lease, ids, [])
        self.holders.append(holder)
        self.compute(holder)
        assert self.cache.num_loadable_pages(lease, sequence, len(ids), self.num_requests) == 0

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def checkpoint(self, data) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        num_tokens = data.draw(st.integers(1, len(holder.ids)))
        self.cache.checkpoint(holder.lease, holder.sequence, num_tokens)
        self.copy()

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def generate(self, data, more) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        num_pages = -(-len(holder.ids + more) // self.page) - len(holder.lease.table)
        if num_pages <= self.cache.num_available_pages:
            holder.ids = holder.ids + more
            self.cache.grow(holder.lease, num_pages)
            self.compute(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), share=st.booleans())
    def leave(self, data, share) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        if share:
            self.cache.close(holder.lease, holder.sequence, len(holder.ids))
        else:
            self.cache.drop(holder.lease)
        self.copy()

    @rule(n=st.integers(1, NUM_PAGES))
    def press(self, n) -> None:
        if n <= self.cache.num_available_pages:
            self.cache.pool.free(self.cache.allocate(n))
            self.copy()

    @rule()
    def flush(self) -> None:
        self.cache.flush()
        assert all(node.locks for node in (*below(self.cache.prefix_cache.root), *below(self.cache.host.tree.root)))
        assert self.cache.host.take_copies() == []

    @invariant()
    def every_page_holds_the_tokens_that_the_trees_say(self) -> None:
        for tree, memory in ((self.cache.prefix_cache, self.on_gpu), (self.cache.host.tree, self.on_host)):
            for node in below(tree.root):
                ids = node.sequence.ids()
                ends = range(node.start + self.page, node.stop + 1, self.page) if node.pages else []
                assert [memory[page] for page in node.pages] == [ids[:end] for end in ends]

    @invariant()
    def laws(self) -> None:
        check_cache(self.cache, [holder.lease for holder in self.holders])


TestTiers = Tiers.TestCase
TestTiers.settings = examples(200, stateful_step_count=40)


def serve(cache: KvCache, ids: list[int]) -> int:
    """One request from its admission to its end. Returns its tokens that were cached."""
    sequence = TokenIds(ids)
    lease = cache.open(sequence, len(ids))
    if num_loadable := cache.num_loadable_pages(lease, sequence, len(ids), 0):
        cache.load(lease, sequence, num_loadable, 0)
    num_cached_tokens = lease.num_shared * cache.page_size
    cache.grow(lease, -(-len(ids) // cache.page_size) - len(lease.table))
    cache.checkpoint(lease, sequence, len(ids))
    cache.close(lease, sequence, len(ids))
    return num_cached_tokens


@given(
    st.lists(tokens, max_size=30),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(WRITES),
    st.sampled_from([LeastRecentlyUsed(), LeastFrequentlyUsed(), FirstInFirstOut()]),
)
@examples(200)
def test_with_room_for_all_every_prefix_that_was_served_is_found(prompts, page, write, policy):
    """So hits with host memory are at least those without it."""
    plain, cache = tiered(NUM_PAGES, None, page, write, policy), tiered(NUM_PAGES, 1000, page, write, policy)
    for i, ids in enumerate(prompts):
        common = max((TokenIds(ids).common_prefix(0, TokenIds(other), 0) for other in prompts[:i]), default=0)
        found = serve(cache, ids)
        assert found == common - common % page
        assert found >= serve(plain, ids)


@given(st.lists(tokens, max_size=30), st.sampled_from([1, 2, 3]), st.sampled_from(WRITES))
@examples(100)
def test_host_memory_of_no_page_is_none(prompts, page, write):
    policy = LeastRecentlyUsed()
    plain, cache = tiered(NUM_PAGES, None, page, write, policy), tiered(NUM_PAGES, 0, page, write, policy)
    for ids in prompts:
        assert serve(plain, ids) == serve(cache, ids)
        assert plain.pool.free_pages() == cache.pool.free_pages()
        assert cache.host.take_copies() == []


@pytest.mark.parametrize(("write", "num_writes"), [("write_through", 1), ("write_through_selective", 2)])
def test_a_prompt_is_written_when_it_was_inserted_so_often(write, num_writes):
    cache = tiered(NUM_PAGES, 40, 1, write, LeastRecentlyUsed())
    sequence = TokenIds([1, 2, 3])
    lease = cache.open(sequence, 3)
    cache.grow(lease, 3)
    cache.checkpoint(lease, sequence, 2)  # a chunk of it counts for nothing
    assert cache.host.take_copies() == []
    cache.checkpoint(lease, sequence, 3)
    first = cache.host.take_copies()
    cache.close(lease, sequence, 3)
    second = cache.host.take_copies()
    assert [sum(len(copy.pages) for copy in copies) for copies in (first, second)] == [3, 0][:: 3 - 2 * num_writes]


def test_few_tokens_are_computed_again():
    pool = PagePool(NUM_PAGES)
    tree = RadixCache(pool, 1, LeastRecentlyUsed())
    cache = KvCache(pool, 1, tree, host=HostCache(PagePool(40), tree, LeastRecentlyUsed(), "write_through"))
    for num_tokens in (LEAST_TOKENS - 1, LEAST_TOKENS):
        ids = list(range(num_tokens))
        serve(cache, ids)
        cache.pool.free(cache.allocate(NUM_PAGES))
        assert serve(cache, ids) == (0 if num_tokens < LEAST_TOKENS else num_tokens)


def test_the_least_recently_used_goes_from_host_memory_and_nothing_that_the_gpu_has():
    cache = tiered(2, 3, 1, "write_through", LeastRecentlyUsed())
    for ids in ([1], [2], [3]):  # 1 is on the host alone
        serve(cache, ids)
    assert serve(cache, [1]) == 1  # and back; 2 goes from the GPU
    serve(cache, [4])  # takes the place of 2 on the host, and of 3 on the GPU
    host = [node.sequence.ids() for node in below(cache.host.tree.root)]
    assert sorted(host) == [[1], [3], [4]]


@pytest.mark.parametrize(("policy", "goes"), [(LeastFrequentlyUsed(), [2]), (FirstInFirstOut(), [1])])
def test_what_comes_back_from_host_memory_has_the_history_that_it_left_with(policy, goes):
    cache = tiered(2, 9, 1, "write_through", policy)
    for ids in ([1], [1], [1]):
        serve(cache, ids)
    cache.pool.free(cache.allocate(2))
    for _ in range(2):
        serve(cache, [2])
    assert serve(cache, [1]) == 1
    cache.pool.free(cache.allocate(1))
    left = [node.sequence.ids() for node in below(cache.prefix_cache.root)]
    assert left == [ids for ids in ([1], [2]) if ids != goes]


def test_what_is_being_loaded_does_not_make_room_for_what_is_written_back():
    cache = tiered(2, 2, 1, "write_back", LeastRecentlyUsed())
    for ids in ([1], [2], [3], [4]):  # 3 and 4 are on the GPU, 1 and 2 on the host
        serve(cache, ids)
    assert serve(cache, [1]) == 1  # 3 takes the place of 2, though 1 is older
    assert sorted(node.sequence.ids() for node in below(cache.host.tree.root)) == [[1], [3]]


def test_what_is_written_back_together_does_not_make_room_for_each_other():
    cache = tiered(2, 2, 1, "write_back", LeastRecentlyUsed())
    for ids in ([1], [2], [3], [4]):
        serve(cache, ids)
    for ids in ([1], [2]):  # both are looked at on the host, and are younger than 3 and 4
        lease = cache.open(TokenIds(ids), 1)
        assert cache.num_loadable_pages(lease, TokenIds(ids), 1, 0) == 1
        cache.drop(lease)
    cache.pool.free(cache.allocate(2))
    assert sorted(node.sequence.ids() for node in below(cache.host.tree.root)) == [[3], [4]]


def test_half_of_a_node_keeps_its_place_in_host_memory_when_the_other_half_goes():
    cache = tiered(3, 3, 1, "write_through", LeastRecentlyUsed())
    serve(cache, [1, 2])
    cache.drop(cache.open(TokenIds([1, 3]), 2))
    cache.pool.free(cache.allocate(2))
    (left,) = below(cache.prefix_cache.root)
    assert left.sequence.ids()[: left.stop] == [1]
    assert left.host is not None


@pytest.mark.parametrize("line", range(40))
def test_it_does_what_sglangs_own_tree_did(line):
    """Hits, loads, writes and what stays free in both memories, after each of 50 calls (experiments/host-cache)."""
    log = json.loads((ROOT / "experiments/host-cache/sglang_tree.jsonl").read_text().splitlines()[line])
    page = log["page"]
    cache = tiered(log["gpu_pages"], log["host_pages"], page, log["write"], LeastRecentlyUsed())
    requests: list[tuple[Lease, TokenIds]] = []
    copied = {WriteBackup: 0, LoadBack: 0}
    for what, hits, *after in log["calls"]:
        if isinstance(what, str):
            sequence = TokenIds(map(int, what))
            lease = cache.open(sequence, len(what))
            num_cached, num_loadable = lease.num_shared, cache.num_loadable_pages(lease, sequence, len(what), 0)
            num_pages = -(-len(what) // page)
            assert (num_pages - num_cached > cache.num_available_pages) == (hits is None)
            if hits is None:
                cache.drop(lease)
            else:
                assert hits == [num_cached * page, num_loadable * page]
                if num_loadable:
                    cache.load(lease, sequence, num_loadable, 0)
                cache.grow(lease, num_pages - len(lease.table))
                requests.append((lease, sequence))
        else:
            lease, sequence = requests.pop(what)
            cache.checkpoint(lease, sequence, len(sequence))
            cache.close(lease, sequence, len(sequence))
        for copy in cache.host.take_copies():
            copied[type(copy)] += len(copy.pages) * page
        assert after == [*copied.values(), cache.pool.num_free * page, cache.host.pool.num_free * page]


# Whole runs.


@st.composite
def tiers(draw: st.DrawFn, clusters: st.SearchStrategy[Scenario]) -> Scenario:
    """A cluster whose prefix caches have host memory behind them, from too little to plenty."""
    scenario = draw(clusters)
    roles = ["prefill", "decode"] if scenario.aggregated is None else ["aggregated"]
    changes = {}
    for role in roles:
        servers = getattr(scenario, role)
        if draw(st.booleans()) or role == "aggregated":
            num_tokens = draw(st.sampled_from([0, 20, 100, 400, 10_000]))
            update = {"radix_cache": True, "host_cache": num_tokens * TOKEN_BYTES}
            update["host_cache_write"] = draw(st.sampled_from(WRITES))
            if role == "decode":
                update["retraction_backup"] = draw(st.booleans())
                update["retracts_to_host_cache"] = draw(st.booleans())
                update["polling_interval"] = draw(st.sampled_from([1, 1, 3]))
            changes[role] = servers.model_copy(update=update)
    return scenario.model_copy(update=changes)


clusters = tiers(st.one_of(scenarios(), optimistic_scenarios(), aggregated_scenarios()))


@given(clusters)
@examples(150)
def test_every_request_ends_with_host_memory(scenario: Scenario):
    traced = run(scenario, checked=True)
    assert traced.result.stall == []
    assert all(r.outcome == "finished" or "not fit" in r.reason for r in traced.records.requests)


@given(clusters)
@examples(150)
def test_many_steps_at_once_are_single_steps_with_host_memory(scenario: Scenario):
    run_both_ways(scenario)


@given(clusters)
@examples(60)
def test_a_journal_with_host_memory_replays(scenario: Scenario):
    traced = run(scenario)
    written = [to_line(entry) for entry in traced.journal]
    assert replay(from_lines(written), state_machines(resolve(scenario))) == len(traced.journal)


@given(tiers(fault_schedules(st.one_of(scenarios(), aggregated_scenarios()))))
@examples(60)
def test_nothing_leaks_with_host_memory_and_faults(scenario: Scenario):
    traced = run(scenario, checked=True)
    assert traced.result.stall == []
    assert all(r.outcome in {"finished", "failed"} for r in traced.records.requests)


@given(clusters)
@examples(60)
def test_pages_are_copied_before_they_are_granted(scenario: Scenario):
    """Whoever carries out commands one after another writes back what lay in a page, not what comes into it."""
    for entry in run(scenario).journal:
        granted: set[int] = set()
        for command in entry.returned[1] if entry.call == "next_step" else ():
            if isinstance(command, WriteBackup):
                assert granted.isdisjoint(command.pages)
            elif isinstance(command, Send) and isinstance(command.message, KvGranted):
                granted.update(command.message.pages)


@given(clusters)
@examples(60)
def test_host_memory_of_no_size_changes_nothing(scenario: Scenario):
    def with_host(size: int | None) -> Scenario:
        update = {}
        for role, servers in scenario.roles.items():
            host = None if servers.host_cache is None else size
            update[role] = servers.model_copy(update={"host_cache": host, "retracts_to_host_cache": False})
        return scenario.model_copy(update=update)

    nothing, none = run(with_host(0)), run(with_host(None))
    assert decisions(nothing.journal) == decisions(none.journal)
    assert nothing.records.requests == none.records.requests
    assert nothing.records.host_copies == []


# Retracted requests.


def outgrowing(num_host_pages: int | None) -> Scenario:
    """Two requests outgrow 10 pages of 4: one makes way. None: its KV goes to memory of its own."""
    changes = {"pool_tokens": 40, "admission": {"use": "reserve_decode_tokens", "reserved_tokens": 0}}
    if num_host_pages is not None:
        host = {"host_cache": f"{num_host_pages * 4 * TOKEN_BYTES} B", "host_cache_write": "write_through_selective"}
        changes |= {"radix_cache": True, **host, "retracts_to_host_cache": True}
    decode = {"gpu": "h100", "retraction_backup": False, **changes}
    return small(request(0, 8, 20), request(1, 8, 24), decode=decode)


def test_a_retracted_request_goes_into_host_memory_and_comes_back():
    """As it would to memory of its own; the loop stands still while its pages cross the link."""
    own, shared = run(outgrowing(None)), run(outgrowing(50), checked=True)
    assert [r.num_retractions for r in shared.records.requests] == [r.num_retractions for r in own.records.requests]
    copies = [
        c
        for entry in shared.journal
        if entry.call == "next_step"
        for c in entry.returned[1]
        if isinstance(c, LoadRetracted) or (isinstance(c, WriteBackup) and c.blocks)
    ]
    save, load = copies
    assert save.host_pages == load.host_pages
    assert len(save.pages) == len(load.pages)
    rows = [row for row in shared.records.host_copies if row.num_pages == len(save.pages)]
    copied_ns = sum(row.end_ns - row.start_ns for row in rows[:1] + rows[-1:])
    assert sum(step.copying_ns for step in shared.records.steps) == copied_ns
    ends = [max(r.end_ns for r in traced.records.requests) for traced in (own, shared)]
    assert ends[1] - ends[0] == copied_ns


def test_a_retracted_request_without_room_in_host_memory_fails():
    """Host memory gives up what it has cached for it first."""
    needed = next(n for n in range(11) if all(r.outcome == "finished" for r in run(outgrowing(n)).records.requests))
    assert needed > 3
    traced = run(outgrowing(needed - 1), checked=True)
    (failed,) = [r for r in traced.records.requests if r.outcome == "failed"]
    assert failed.reason.endswith("do not fit the host memory of decode-0")
    assert "decode.host_cache" in failures_of([failed], has_faults=False)[0].relief


# Times.


@given(
    st.integers(0, 10**6),
    st.integers(1, 1000),
    st.integers(0, 10**6),
    st.integers(0, 1000),
    st.integers(1, 80),
)
def test_a_forward_ends_when_its_last_layer_does(start_ns, layer_ns, first_ns, part_ns, num_layers):
    """Layer by layer: each begins when the one before is done and its own part is loaded."""
    end_ns = start_ns
    for layer in range(1, num_layers + 1):
        end_ns = max(end_ns, first_ns + layer * part_ns) + layer_ns
    load = (first_ns, first_ns + num_layers * part_ns)
    assert end_behind_load(start_ns, num_layers * layer_ns, load, num_layers) == end_ns


def test_copies_of_one_direction_follow_each_other():
    costs = HostCopies(
        page_bytes=10,
        num_planes=4,
        copy_ns=3,
        save_bandwidth=1e9,
        load_bandwidth=0.5e9,
        pinning_bandwidth=1e9,
        all_page_bytes=20,
    )
    link = HostLink(costs)
    assert link.copy("write", 10, 5) == (5, 105)
    assert link.copy("write", 1, 50) == (105, 115)
    assert link.copy("load", 10, 50) == (50, 250)
    assert link.num_bytes(10) == 200


def conversations(write: str, size: int) -> Scenario:
    """Two prompts of 400 tokens take turns in a pool of 600, which holds one."""
    prompts = [Spans.of(1, 400), Spans.of(2, 400)]
    specs = [request(i, prompts[i % 2], 2, arrival_ns=i * 2_000_000_000) for i in range(4)]
    host = {"prefill__host_cache": f"{size * TOKEN_BYTES} B", "prefill__host_cache_write": write}
    return small(*specs, prefill__pool_tokens=600, prefill__chunked_prefill_tokens=0, **host)


@pytest.mark.parametrize("write", WRITES)
def test_what_was_evicted_is_loaded_and_not_computed(write):
    traced = run(conversations(write, 1000))
    cached = [r.num_prefill_cached_tokens for r in traced.records.requests]
    assert cached == [0, 0, 396, 396]
    fields = traced.result.summary()["pdsim"]
    assert fields["host_hit_tokens"] == 2 * 396
    assert fields["host_loaded_bytes"] == 2 * 396 * TOKEN_BYTES
    assert fields["host_written_bytes"] == 2 * 400 * TOKEN_BYTES
    assert "host_hit_tokens" not in run(small(request(0, 8, 2))).result.summary()["pdsim"]


def test_a_forward_waits_for_what_its_load_does_not_hide():
    """396 tokens are 45.4 MB, 0.959 ms at 0.74 of 64 GB/s; the other 4 take 4 ms, 28 layers of 1/7 ms."""
    traced = run(conversations("write_through", 1000))
    step = next(s for s in traced.records.steps if s.num_context_tokens == 396)
    load = next(c for c in traced.records.host_copies if c.kind == "load")
    assert load.end_ns - load.start_ns == round(1e9 * 396 * TOKEN_BYTES / (0.74 * 64e9))
    assert step.duration_ns == 4_000_000 + (load.end_ns - load.start_ns) // 28


def test_what_is_loaded_is_sent_behind_its_forward():
    """A prefix that the GPU has is sent before."""
    records = run(conversations("write_through", 1000)).records
    again = run(small(*(request(i, Spans.of(1, 400), 2, arrival_ns=i * 2_000_000_000) for i in range(2)))).records
    loaded, found = (next(t for t in one.transfers if t.request_id == i) for one, i in ((records, 2), (again, 1)))
    assert loaded.queued_ns == records.requests[2].prefill_end_ns
    assert found.queued_ns == again.requests[1].prefill_start_ns


def test_a_loop_that_writes_back_waits_for_its_copies():
    through, back = (run(conversations(write, 1000)).records for write in ("write_through", "write_back"))
    first = [next(s for s in records.steps if s.start_ns > 2_000_000_000) for records in (through, back)]
    write = next(c for c in back.host_copies if c.kind == "write")
    assert first[1].start_ns - first[0].start_ns == write.end_ns - write.start_ns > 0


def test_decode_waits_for_its_load_as_for_its_kv():
    """4,000 tokens are loaded in 9.7 ms; prefill has them cached, and its KV arrives after 7 ms."""
    prompts = [Spans.of(1, 4000), Spans.of(2, 4000)]
    specs = [request(i, prompts[i % 2], 2, arrival_ns=i * 20_000_000_000) for i in range(3)]
    host = f"{10_000 * TOKEN_BYTES} B"
    scenario = small(
        *specs, prefill__pool_tokens=10_000, decode__pool_tokens=6000, decode__host_cache=host, decode__radix_cache=True
    )
    traced = run(scenario)
    (load,) = [c for c in traced.records.host_copies if c.kind == "load"]
    last = traced.records.requests[2]
    assert last.num_decode_cached_tokens == 4000
    assert last.transfer_bytes == 0
    assert load.start_ns == last.admitted_ns < last.transfer_end_ns < load.end_ns == last.streamed_ns
