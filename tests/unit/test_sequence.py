"""Spans and token ids against plain lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.sequence import Spans, TokenIds

spans = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 6)), max_size=5).map(Spans)
ids = st.lists(st.integers(0, 2), max_size=20).map(TokenIds)
KINDS = [pytest.param(spans, id="spans"), pytest.param(ids, id="ids")]


def tokens(sequence):
    if isinstance(sequence, TokenIds):
        return sequence.ids()
    return [(stream, offset + i) for stream, offset, length in sequence.spans for i in range(length)]


def common(a, b):
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_as_plain_lists(kind, data):
    a, b = data.draw(kind), data.draw(kind)
    i, j = data.draw(st.integers(0, len(a))), data.draw(st.integers(0, len(b)))
    assert len(a) == len(tokens(a))
    assert a.common_prefix(i, b, j) == common(tokens(a)[i:], tokens(b)[j:])
    assert tokens(a.then(b)) == tokens(a) + tokens(b)
    assert (a == b) == (tokens(a) == tokens(b))


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_page_keys_are_equal_for_equal_pages_only(kind, data):
    a, b = data.draw(kind), data.draw(kind)
    size = data.draw(st.integers(1, 4))
    for i in range(len(a) - size + 1):
        for j in range(len(b) - size + 1):
            same = tokens(a)[i : i + size] == tokens(b)[j : j + size]
            assert (a.page_key(i, size) == b.page_key(j, size)) == same


def test_adjoining_spans_are_one():
    assert Spans([(7, 0, 3), (7, 3, 4), (8, 7, 0)]).spans == ((7, 0, 7),)
