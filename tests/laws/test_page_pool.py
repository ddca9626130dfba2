"""The page pool as a state machine, beside a naive twin of two sets."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdsim.core.memory.radix_cache import PagePool
from tests.support import examples
from tests.twins.page_pool import NaivePagePool

SIZE = 40


class Pool(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool, self.twin = PagePool(SIZE), NaivePagePool(SIZE)
        self.held: list[list[int]] = []

    @rule(n=st.integers(0, SIZE))
    def allocate(self, n: int) -> None:
        if n > self.pool.num_free:
            with pytest.raises(RuntimeError, match="asked for"):
                self.pool.allocate(n)
        else:
            self.held.append(self.pool.allocate(n))
            assert self.held[-1] == self.twin.allocate(n)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data) -> None:
        pages = data.draw(st.sampled_from(self.held))
        self.held.remove(pages)
        self.pool.free(pages)
        self.twin.free(pages)

    @invariant()
    def it_does_what_its_twin_does(self) -> None:
        free = self.pool.free_pages()
        assert len(free) == len(set(free)) == self.pool.num_free
        assert set(free) == self.twin.listed | self.twin.freed
        assert self.pool.num_listed == len(self.twin.listed)


TestPool = Pool.TestCase
TestPool.settings = examples(60, stateful_step_count=40)


def test_a_fresh_pool_is_contiguous_and_churn_breaks_it_up():
    pool = PagePool(8)
    assert pool.allocate(3) == [1, 2, 3]
    first, second = pool.allocate(2), pool.allocate(3)
    pool.free(second)
    pool.free(first)
    assert pool.allocate(4) == [4, 5, 6, 7]


def test_the_list_is_sorted_anew_only_when_it_is_too_short():
    pool = PagePool(8)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.free(first)
    assert pool.allocate(3) == [5, 6, 7]
    pool.free(second)
    assert pool.allocate(3) == [1, 2, 3]


def test_a_double_free_is_a_bug():
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.free(pages)
    with pytest.raises(RuntimeError, match="double free"):
        pool.free(pages)
