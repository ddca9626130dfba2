"""Whole lives of requests beside naive twins: every stage of every request at the same nanosecond."""

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.sequence import Spans
from pdsim.workload.request_spec import RequestSpec
from tests.support import examples, request, run, small, small_aggregated
from tests.twins.aggregated import Aggregated
from tests.twins.cached_pair import CachedPair, Conversation
from tests.twins.overlapped_pair import OverlappedPair, ScheduledRequest
from tests.twins.pair import KV_TOKEN_BYTES, Pair, Request, Settings
from tests.twins.pulled_pair import PulledPair
from tests.twins.staged_pair import StagedPair, StagedRequest

STAGES = ("admitted", "prefill_start", "prefill_end", "transfer_start", "transfer_end", "first_token", "end")

arrivals = st.integers(0, 200_000_000)
prompts = st.one_of(st.integers(1, 200), st.sampled_from([16, 64, 96, 192]))
lengths = st.tuples(prompts, st.integers(1, 12))
settings = st.builds(
    Settings,
    page_tokens=st.sampled_from([1, 4, 16]),
    chunk_tokens=st.sampled_from([16, 64, 96]),
    message_ns=st.integers(1, 2_000_000),
    setup_ns=st.integers(0, 2_000_000),
    bandwidth=st.sampled_from([1e8, 3e9, 1e11]),
)


@st.composite
def loads(draw) -> list[RequestSpec]:
    times_ns = draw(st.lists(arrivals, min_size=1, max_size=8).map(sorted))
    return [request(i, *draw(lengths), arrival_ns=time_ns) for i, time_ns in enumerate(times_ns)]


def beginning(sequence: Spans, num_tokens: int) -> Spans:
    kept = Spans(())
    for stream, offset, length in sequence.spans:
        kept = kept.then(Spans(((stream, offset, min(length, num_tokens - len(kept))),)))
    return kept


@st.composite
def conversations(draw) -> list[RequestSpec]:
    """Prompts that begin as an earlier one does, or with its output too."""
    specs: list[RequestSpec] = []
    for spec in draw(loads()):
        history = Spans(())
        if (earlier := draw(st.sampled_from([None, *specs]))) is not None:
            history = beginning(earlier.prompt.then(earlier.output), draw(st.integers(1, 200)))
        specs.append(spec._replace(prompt=history.then(spec.prompt)))
    return specs


def times_ns(scenario) -> list[dict[str, int]]:
    """The stages that each request has been through."""
    rows = [{stage: getattr(record, f"{stage}_ns") for stage in STAGES} for record in run(scenario).records.requests]
    return [{stage: time_ns for stage, time_ns in row.items() if time_ns is not None} for row in rows]


def twin_times_ns(twin_type, twins, settings) -> list[dict[str, int]]:
    twin_type(twins, settings).run()
    return [twin.times_ns for twin in twins]


def twins_of(specs: list[RequestSpec], kind=Request):
    return [kind(spec.request_id, spec.arrival_ns, len(spec.prompt), len(spec.output)) for spec in specs]


def pair(specs, settings, **changes):
    return small(
        *specs,
        page_size=settings.page_tokens,
        prefill__chunked_prefill_tokens=settings.chunk_tokens,
        prefill__radix_cache=False,
        network__message_latency=f"{settings.message_ns} ns",
        network__transfer_latency=f"{settings.setup_ns} ns",
        network__bandwidth=f"{settings.bandwidth / 1e9} GB/s",
        **changes,
    )


@given(loads(), settings)
@examples(100)
def test_a_pair_with_room_for_all_does_what_its_twin_does(specs, settings):
    assert times_ns(pair(specs, settings)) == twin_times_ns(Pair, twins_of(specs), settings)


@given(loads(), settings)
@examples(60)
def test_a_pair_that_chooses_ahead_does_what_its_twin_does(specs, settings):
    scenario = pair(specs, settings, prefill__overlap=True)
    assert times_ns(scenario) == twin_times_ns(OverlappedPair, twins_of(specs, ScheduledRequest), settings)


@given(loads(), settings)
@examples(60)
def test_a_pair_that_moves_kv_without_prefills_loop_does_what_its_twin_does(specs, settings):
    scenario = pair(specs, settings, engine="vllm", decode__admission="free_pages")
    assert times_ns(scenario) == twin_times_ns(PulledPair, twins_of(specs), settings)


@given(loads(), settings)
@examples(60)
def test_an_aggregated_instance_does_what_its_twin_does(specs, settings):
    scenario = small_aggregated(
        *specs,
        page_size=settings.page_tokens,
        aggregated__chunked_prefill_tokens=settings.chunk_tokens,
        aggregated__radix_cache=False,
        network__message_latency=f"{settings.message_ns} ns",
    )
    assert times_ns(scenario) == twin_times_ns(Aggregated, twins_of(specs), settings)


def tokens(spans: Spans) -> list[tuple[int, int]]:
    return [(stream, offset + i) for stream, offset, length in spans.spans for i in range(length)]


@given(conversations(), settings)
@examples(60)
def test_a_pair_with_a_decode_cache_does_what_its_twin_does(specs, settings):
    twins = twins_of(specs, Conversation)
    for twin, spec in zip(twins, specs, strict=True):
        twin.tokens = tokens(spec.prompt.then(spec.output))
    scenario = pair(specs, settings, decode__radix_cache=True)
    assert times_ns(scenario) == twin_times_ns(CachedPair, twins, settings)


@given(loads(), settings, st.integers(1, 4), st.sampled_from([0, 0.25, 0.7]))
@examples(60)
def test_a_pair_with_a_staging_ring_does_what_its_twin_does(specs, settings, num_cells, rest):
    ring_bytes = int((num_cells + rest) * settings.chunk_tokens * KV_TOKEN_BYTES)
    scenario = pair(specs, settings, prefill__tp=2, network__staging={"ring": f"{ring_bytes} B"})
    twins = twins_of(specs, StagedRequest)
    assert times_ns(scenario) == twin_times_ns(partial(StagedPair, ring_bytes=ring_bytes), twins, settings)
