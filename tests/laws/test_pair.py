"""Whole lives of requests beside naive twins in one file: every stage of every request at the same nanosecond."""

from hypothesis import given
from hypothesis import strategies as st

from tests.support import examples, request, run, small
from tests.twins.pair import Pair, Request, Settings

STAGES = ("admitted", "prefill_start", "prefill_end", "transfer_start", "transfer_end", "first_token", "end")

loads = st.lists(
    st.tuples(st.integers(0, 200_000_000), st.integers(1, 200), st.integers(1, 12)), min_size=1, max_size=8
).map(sorted)
settings = st.builds(
    Settings,
    page_tokens=st.sampled_from([1, 4, 16]),
    chunk_tokens=st.sampled_from([16, 64, 96]),
    message_ns=st.integers(1, 2_000_000),
    setup_ns=st.integers(0, 2_000_000),
    bandwidth=st.sampled_from([1e8, 3e9, 1e11]),
)


def times_ns(record):
    return {stage: time for stage in STAGES if (time := getattr(record, f"{stage}_ns")) is not None}


def scenario_of(specs, settings, **changes):
    return small(
        *specs,
        page_size=settings.page_tokens,
        prefill__chunked_prefill_tokens=settings.chunk_tokens,
        network__message_latency=f"{settings.message_ns} ns",
        network__transfer_latency=f"{settings.setup_ns} ns",
        network__bandwidth=f"{settings.bandwidth / 1e9} GB/s",
        **changes,
    )


@given(loads, settings)
@examples(150)
def test_a_pair_with_room_for_all_does_what_its_twin_does(load, settings):
    twins = [Request(i, *lengths) for i, lengths in enumerate(load)]
    Pair(twins, settings).run()
    specs = [request(t.request_id, t.prompt_tokens, t.output_tokens, arrival_ns=t.arrival_ns) for t in twins]
    records = run(scenario_of(specs, settings, prefill__radix_cache=False)).records.requests
    assert [times_ns(record) for record in records] == [twin.times_ns for twin in twins]
