"""Many decode steps at once, beside a naive twin that takes them one at a time."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdsim.core.decode.running_batch import RunningBatch, RunningRequest
from pdsim.core.memory.kv_cache import KvCache
from pdsim.core.memory.radix_cache import PagePool
from pdsim.core.messages import StepResult
from pdsim.core.sequence import Spans
from tests.support import examples
from tests.twins.decode_steps import NaiveBatch
from tests.twins.page_pool import NaivePagePool

NUM_PAGES = 60


class Batch(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from([1, 2, 3, 8]))
    def start(self, page_size) -> None:
        self.cache = KvCache(PagePool(NUM_PAGES), page_size, None)
        self.batch: RunningBatch[RunningRequest] = RunningBatch(self.cache)
        self.twin = NaiveBatch(page_size, NaivePagePool(NUM_PAGES))
        self.num_joined = 0

    @rule(num_tokens=st.integers(1, 40))
    def join(self, num_tokens) -> None:
        num_pages = -(-num_tokens // self.cache.page_size)
        if num_pages <= self.cache.num_available_pages:
            prompt = Spans.of(self.num_joined, num_tokens)
            request = RunningRequest(
                self.num_joined, 0, prompt, num_tokens, max_output_tokens=1000, num_output_tokens=1
            )
            request.lease = self.cache.open(prompt, 0)
            self.cache.grow(request.lease, num_pages)
            self.batch.join(request)
            self.twin.join(self.num_joined, num_tokens)
            self.num_joined += 1

    @precondition(lambda self: self.batch.num_requests)
    @rule(data=st.data())
    def run(self, data) -> None:
        num_lacking = sum(r.num_kv_tokens % self.cache.page_size == 0 for r in self.batch.requests())
        if num_lacking <= self.cache.num_available_pages:
            assert not list(self.batch.make_room(None, None))
            step = self.batch.step(1 << 62)
            assert step.num_context_tokens == sum(self.twin.num_tokens.values()) + step.num_requests
            num_steps = data.draw(st.integers(1, step.max_steps))
            self.batch.advance(StepResult(num_steps))
            for _ in range(num_steps):
                self.twin.step()

    @precondition(lambda self: self.batch.num_requests)
    @rule(data=st.data(), ends=st.booleans())
    def leave(self, data, ends) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.twin.tables)))
        if ends:
            self.batch.end(request_id, Spans.of(0, 1))
        else:
            self.batch.remove(request_id)
        self.twin.leave(request_id)

    @invariant()
    def it_does_what_its_twin_does(self) -> None:
        requests = self.batch.requests()
        assert {r.request_id: r.num_kv_tokens for r in requests} == self.twin.num_tokens
        assert {r.request_id: r.lease.table for r in requests} == self.twin.tables
        assert set(self.cache.pool.free_pages()) == self.twin.pool.listed | self.twin.pool.freed


TestBatch = Batch.TestCase
TestBatch.settings = examples(150, stateful_step_count=40)
