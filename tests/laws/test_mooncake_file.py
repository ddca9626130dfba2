"""A workload, written as a Mooncake trace and read again, is the same load, but for what lies within a block."""

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.sequence import Spans
from pdsim.workload.hash_ids import mooncake_rows, write_mooncake
from pdsim.workload.request_spec import RequestSpec, Streams
from pdsim.workload.traces import MooncakeTrace

BLOCK = 4
SPANS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from((0, BLOCK)), st.integers(1, 9)), min_size=1, max_size=4)


@st.composite
def loads(draw):
    """Requests with common prefixes, some of them turns of a session, and when each was sent."""
    specs, sent_ns, open_ends = [], {}, []
    for i in range(draw(st.integers(1, 8))):
        after = draw(st.sampled_from([(), *((end,) for end in open_ends)]))
        if after:
            open_ends.remove(*after)
        open_ends.append(i)
        think_ns = draw(st.integers(0, 10**12)) if after else 0
        num_outputs = draw(st.integers(1, 5))
        output = Spans.of(100 + i, num_outputs)
        spec = RequestSpec(i, Spans(draw(SPANS)), output, num_outputs, after=after, think_ns=think_ns)
        specs.append(spec._replace(request_class=draw(st.sampled_from(("", "chat", "batch")))))
        sent_ns[i] = draw(st.integers(0, 10**15)) + max((sent_ns[one] for one in after), default=0)
    return specs, sent_ns


def common(a, b):
    return a.prompt.common_prefix(0, b.prompt, 0)


@given(loads())
def test_what_is_read_is_what_was_written(load):
    specs, sent_ns = load
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        write_mooncake(path, mooncake_rows(specs, sent_ns, block_tokens=BLOCK))
        read = MooncakeTrace(path=path, block_tokens=BLOCK).requests(Streams(0))
    order = sorted(specs, key=lambda spec: (sent_ns[spec.request_id], spec.request_id))
    place = {spec.request_id: i for i, spec in enumerate(order)}
    for one, was in zip(read, order, strict=True):
        assert one.arrival_ns == sent_ns[was.request_id]
        assert (len(one.prompt), len(one.output)) == (len(was.prompt), len(was.output))
        assert (one.after, one.think_ns) == (tuple(place[one] for one in was.after), was.think_ns)
        assert one.request_class == was.request_class
        for other, other_was in zip(read, order, strict=True):
            if one is not other:
                assert common(one, other) == common(was, other_was) // BLOCK * BLOCK


@given(loads())
def test_ids_are_what_other_readers_ask_for(load):
    """One for each block; each of one size, behind one prefix."""
    specs, sent_ns = load
    sizes, parents = {}, {}
    for row in mooncake_rows(specs, sent_ns, block_tokens=BLOCK):
        ids = row["hash_ids"]
        assert len(ids) == -(-row["input_length"] // BLOCK)
        for i, block in enumerate(ids):
            size = min(BLOCK, row["input_length"] - i * BLOCK)
            assert sizes.setdefault(block, size) == size
            assert parents.setdefault(block, ids[:i]) == ids[:i]
            assert 0 <= block < 2**31
