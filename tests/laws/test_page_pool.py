"""The page pool as a state machine."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdsim.core.page_pool import PagePool

SIZE = 40


class Pool(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(SIZE)
        self.held: list[list[int]] = []

    @rule(n=st.integers(0, SIZE))
    def allocate(self, n: int) -> None:
        if n > self.pool.num_free:
            with pytest.raises(RuntimeError, match="asked for"):
                self.pool.allocate(n)
        else:
            pages = self.pool.allocate(n)
            assert len(pages) == n
            self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data) -> None:
        self.pool.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def every_page_is_free_or_held_once(self) -> None:
        held = [page for pages in self.held for page in pages]
        assert sorted([*held, *self.pool.free_pages()]) == list(range(1, SIZE + 1))
        assert self.pool.num_free == SIZE - len(held)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)


@given(st.lists(st.integers(0, 8), max_size=30), st.integers(0, 10), st.integers(0, 10))
def test_listed_pages_come_in_one_order(history, a, b):
    """What lets many decode steps allocate at once."""
    split, whole = PagePool(64), PagePool(64)
    for pool in (split, whole):
        held = []
        for n in history:
            held.append(pool.allocate(min(n, pool.num_free)))
            if n % 3 == 0:
                pool.free(held.pop(len(held) // 2))
    if a + b <= whole.num_listed:
        assert split.allocate(a) + split.allocate(b) == whole.allocate(a + b)


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
