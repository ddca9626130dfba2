"""Generators by their stated rules, and readers of traces."""

import gzip
import json
from bisect import bisect
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev

import pytest

from pdsim.workload.client import Bursts, Constant, Gamma, Poisson, Profile
from pdsim.workload.lengths import Fixed, Normal, Uniform
from pdsim.workload.request_spec import Streams
from pdsim.workload.synthetic import PrefixPool, RandomLengths, Sessions, SharedPrefixGroups
from pdsim.workload.trace_file import InputWarning, TraceError
from pdsim.workload.traces import AzureTrace, BailianTrace, BurstGptTrace, MooncakeTrace, RequestTable


def shared(a, b):
    return a.prompt.common_prefix(0, b.prompt, 0)


def test_prefix_pool_is_aiperfs_load():
    load = PrefixPool(
        num_requests=2000,
        num_prefixes=20,
        prefix_tokens=50_000,
        input_tokens=Normal(4500, 500),
        output_tokens=Normal(350, 100),
    )
    specs = load.requests(Streams(1))
    bodies = [len(spec.prompt) - 50_000 for spec in specs]
    outputs = [len(spec.output) for spec in specs]
    assert mean(bodies) == pytest.approx(4500.5, abs=40)
    assert stdev(bodies) == pytest.approx(500, rel=0.1)
    assert mean(outputs) == pytest.approx(350.5, abs=10)
    assert min(outputs) >= 1
    uses = {}
    for spec in specs:
        uses.setdefault(spec.prompt.spans[0][0], []).append(spec)
    assert len(uses) == 20
    assert all(60 < len(group) < 150 for group in uses.values())
    one, other = list(uses.values())[:2]
    assert shared(one[0], one[1]) == 50_000
    assert shared(one[0], other[0]) == 0


def test_shared_prefix_groups_are_sglangs_load():
    load = SharedPrefixGroups(
        num_groups=8,
        prompts_per_group=5,
        system_prompt_tokens=1000,
        question_tokens=100,
        output_tokens=200,
        range_ratio=0.5,
    )
    specs = load.requests(Streams(1))
    assert len(specs) == 40
    assert all(50 <= len(spec.prompt) - spec.prompt.spans[0][2] <= 100 for spec in specs)
    assert all(100 <= len(spec.output) <= 200 for spec in specs)
    systems = {spec.prompt.spans[0] for spec in specs}
    assert len(systems) == 8
    assert all(500 <= length <= 1000 for _, _, length in systems)


def test_turns_build_on_what_was_said():
    load = SharedPrefixGroups(
        num_groups=1, prompts_per_group=2, num_turns=3, system_prompt_tokens=30, question_tokens=10, output_tokens=20
    )
    specs = load.requests(Streams(1))
    assert [spec.after for spec in specs] == [(), (0,), (1,), (), (3,), (4,)]
    assert [len(spec.prompt) for spec in specs[:3]] == [40, 70, 100]
    assert specs[1].prompt.common_prefix(0, specs[0].prompt.then(specs[0].output), 0) == 60


def test_sessions():
    load = Sessions(
        num_sessions=2,
        num_turns=Fixed(3),
        system_prompt_tokens=7,
        input_tokens=Fixed(5),
        output_tokens=Fixed(3),
        think_ns=9,
    )
    specs = load.requests(Streams(1))
    assert [len(spec.prompt) for spec in specs] == [12, 20, 28, 12, 20, 28]
    assert [spec.after for spec in specs] == [(), (0,), (1,), (), (3,), (4,)]
    assert [spec.think_ns for spec in specs] == [0, 9, 9, 0, 9, 9]
    assert shared(specs[0], specs[3]) == 7


def test_lengths_stay_in_their_range():
    draw = Uniform(3, 6).sampler(Streams(1).named("x"))
    assert {draw() for _ in range(200)} == {3, 4, 5, 6}


@pytest.mark.parametrize(
    "arrivals",
    [
        Poisson(50),
        Gamma(50, burstiness=0.5),
        Gamma(50, burstiness=4),
        Constant(50),
        Bursts(50, burst_ns=100_000_000),
        Bursts(50, burst_factor=10, burst_ns=20_000_000),
        Profile((1, 4, 0), 1_000_000_000, 50),
        Profile((1, 4, 0), (1_000_000_000, 500_000_000, 200_000_000), 50),
        Profile((1, 4, 0), 1_000_000_000, 50, smooth=True),
        Profile((1, 4, 0), (1_000_000_000, 500_000_000, 200_000_000), 50, smooth=True),
    ],
    ids=repr,
)
def test_arrivals_keep_their_rate(arrivals):
    times = arrivals.times_ns(Streams(1).named("arrivals"))
    sample = [next(times) for _ in range(20_000)]
    assert sample == sorted(sample)
    assert sample[-1] / 1e9 == pytest.approx(400, rel=0.04)


def test_burstiness_is_the_shape_of_the_gaps():
    for burstiness in (0.5, 4.0):
        times = Gamma(10, burstiness=burstiness).times_ns(Streams(1).named("arrivals"))
        sample = [next(times) for _ in range(20_000)]
        gaps = [b - a for a, b in pairwise(sample)]
        assert (stdev(gaps) / mean(gaps)) ** 2 == pytest.approx(1 / burstiness, rel=0.1)


@pytest.mark.parametrize(
    ("smooth", "shares"),
    [(False, (1 / 6, 3 / 6, 2 / 6)), (True, (4 / 12, 5 / 12, 3 / 12))],
)
def test_a_profile_has_its_levels_again_and_again(smooth, shares):
    """Of straight lines, each level's share is that of the mean of its ends."""
    times = Profile((1, 3, 2), 2_000_000_000, 300, smooth=smooth).times_ns(Streams(2).named("arrivals"))
    counts = [0, 0, 0]
    for _ in range(90_000):
        counts[next(times) // 2_000_000_000 % 3] += 1
    assert [count / 90_000 for count in counts] == pytest.approx(shares, rel=0.03)


def test_stages_have_their_own_rates_and_lengths():
    """Without a rate, levels are requests a second: each stage has its own number of them."""
    profile = Profile((20, 100, 50), (3_000_000_000, 1_000_000_000, 2_000_000_000))
    assert profile.rate_per_s == pytest.approx((60 + 100 + 100) / 6)
    times = profile.times_ns(Streams(2).named("arrivals"))
    counts, cycles = [0, 0, 0], 300
    while (at := next(times)) < cycles * 6_000_000_000:
        counts[bisect([3_000_000_000, 4_000_000_000], at % 6_000_000_000)] += 1
    assert [count / cycles for count in counts] == pytest.approx([60, 100, 100], rel=0.03)


@pytest.mark.parametrize(("factor", "share"), [(4.0, 0.2), (8.0, 0.125)])
def test_counts_of_bursts_are_dispersed_as_the_closed_form_says(factor, share):
    """1 + 2 (a - b)^2 p q / ((p + q)^2 (a q + b p)) for rates a and b, which are left at rates p and q."""
    made = Bursts(100, factor, share, burst_ns=50_000_000)
    a, b = factor * 100, (1 - factor * share) / (1 - share) * 100
    p, q = 1 / 0.05, 1 / (0.05 * (1 - share) / share)
    expected = 1 + 2 * (a - b) ** 2 * p * q / ((p + q) ** 2 * (a * q + b * p))
    times, window_ns = made.times_ns(Streams(5).named("arrivals")), 20_000_000_000
    counts = [0] * 400
    while (at := next(times) // window_ns) < len(counts):
        counts[at] += 1
    assert mean(counts) == pytest.approx(100 * 20, rel=0.03)
    assert stdev(counts) ** 2 / mean(counts) == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bursts(5, burst_factor=20), "burst_factor of at most 10"),
        (lambda: Bursts(5, burst_share=0), "0 < burst_share < 1"),
        (lambda: Profile((), 1, 5), "needs levels"),
        (lambda: Profile((0, 0), 1, 5), "needs levels"),
        (lambda: Profile((1,), 0, 5), "level > 0"),
        (lambda: Profile((1, 2), (5, 0)), "level > 0"),
        (lambda: Profile((1, 2), (5, 5, 5)), "2 levels has 3 durations"),
    ],
)
def test_impossible_arrivals_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_one_stream_does_not_move_another():
    a = RandomLengths(num_requests=20, input_tokens=Uniform(1, 100), output_tokens=Fixed(5)).requests(Streams(4))
    b = RandomLengths(num_requests=20, input_tokens=Uniform(1, 100), output_tokens=Uniform(1, 9)).requests(Streams(4))
    assert [len(spec.prompt) for spec in a] == [len(spec.prompt) for spec in b]


def write(path: Path, rows) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def mooncake(timestamp, length, ids, output=5):
    return {"timestamp": timestamp, "input_length": length, "output_length": output, "hash_ids": ids}


def test_mooncake_blocks_are_shared_prefixes(tmp_path):
    rows = [
        mooncake(0, 1200, [0, 1, 2]),
        mooncake(3, 1300, [0, 1, 3]),
        mooncake(3, 600, [9, 10]),
        mooncake(4, 1536, [0, 4, 5]),
    ]
    specs = MooncakeTrace(path=write(tmp_path / "t.jsonl", rows)).requests(Streams(0))
    assert [spec.arrival_ns for spec in specs] == [0, 3_000_000, 3_000_000, 4_000_000]
    assert [len(spec.prompt) for spec in specs] == [1200, 1300, 600, 1536]
    assert [shared(specs[0], other) for other in specs] == [1200, 1024, 0, 512]
    assert len(specs[0].prompt.spans) == 1


def test_mooncake_may_be_cut_and_sped_up(tmp_path):
    path = write(tmp_path / "t.jsonl", [mooncake(1000 * i, 10, [i]) for i in range(5)])
    specs = MooncakeTrace(path=path, num_requests=3, speedup=2.0).requests(Streams(0))
    assert [spec.arrival_ns for spec in specs] == [0, 500_000_000, 1_000_000_000]


def test_a_later_part_of_a_trace_begins_at_0_and_follows_nothing_that_was_left_out(tmp_path):
    turns = [{**mooncake(1000 * i, 10 * (i + 1), [0]), "session_id": "a"} for i in range(5)]
    path = write(tmp_path / "t.jsonl", turns)
    whole = MooncakeTrace(path=path).requests(Streams(0))
    part = MooncakeTrace(path=path, skip_requests=2, num_requests=2).requests(Streams(0))
    assert [spec.request_id for spec in part] == [0, 1]
    assert [spec.after for spec in part] == [(), (0,)]
    assert part[0].arrival_ns == 0
    assert [spec.prompt for spec in part] == [spec.prompt for spec in whole[2:4]]
    with pytest.raises(TraceError, match="the trace has 5 requests"):
        MooncakeTrace(path=path, skip_requests=5).requests(Streams(0))


def test_azure(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n2023-11-16 18:17:05,110,27\n"
    )
    specs = AzureTrace(path=path).requests(Streams(0))
    assert [(spec.arrival_ns, len(spec.prompt), len(spec.output)) for spec in specs] == [
        (0, 4808, 10), (52_000_000, 3180, 8), (1_020_040_000, 110, 27)
    ]  # fmt: skip


def test_azure_begins_at_its_earliest_line(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:05,9,1\n2023-11-16 18:17:03,8,2\n")
    with pytest.warns(InputWarning, match="not in order of time"):
        specs = AzureTrace(path=path).requests(Streams(0))
    assert [(spec.arrival_ns, len(spec.prompt)) for spec in specs] == [(0, 8), (2_000_000_000, 9)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_request_tables(tmp_path, kind, packed, encoding):
    rows = [(0.5, 100, 7, "a", 60), (0.0, 50, 3, "", ""), (0.25, 90, 2, "a", 60)]
    names = ("arrival_s", "in_tokens", "out_tokens", "prefix_id", "prefix_tokens")
    if kind == "csv":
        text = ",".join(names) + ",k\n" + "\n".join(",".join(map(str, row)) + f",{i}" for i, row in enumerate(rows))
    else:
        text = "\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows)
    path = tmp_path / f"table.{kind}{'.gz' if packed else ''}"
    with (gzip.open if packed else open)(path, "wt", encoding=encoding) as file:
        file.write(text)
    with pytest.warns(InputWarning, match="lines earlier than the line before: 1"):
        specs = RequestTable(path=path).requests(Streams(0))
    assert [(spec.arrival_ns / 1e9, len(spec.prompt), len(spec.output)) for spec in specs] == [
        (0, 50, 3),
        (0.25, 90, 2),
        (0.5, 100, 7),
    ]
    assert shared(specs[1], specs[2]) == 60


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (mooncake(0, 600, [1]), "hash_ids is [1], expected a list of 2 ids"),
        (mooncake(-1, 6, [1]), "timestamp is -1, expected a time, 0 or later"),
        (mooncake("soon", 6, [1]), "timestamp is 'soon', expected a time"),
        (mooncake(0, 0, []), "input_length is 0, expected at least 1"),
        (mooncake(0, "x", []), "input_length is 'x', expected a whole number of tokens"),
        ({"timestamp": 0}, "no field of prompt tokens: input_length, in_tokens, input_tokens"),
        ([1], "expected a JSON object"),
    ],
)
def test_a_broken_line_says_where_and_what(tmp_path, row, complaint):
    path = write(tmp_path / "t.jsonl", [mooncake(0, 5, [0]), row])
    with pytest.raises(TraceError) as error:
        MooncakeTrace(path=path).requests(Streams(0))
    assert f"{path}, line 2: " in str(error.value)
    assert complaint in str(error.value)


def test_an_empty_trace_is_an_error(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("")
    with pytest.raises(TraceError, match="no requests in it"):
        MooncakeTrace(path=path).requests(Streams(0))


def test_turns_of_a_mooncake_session_may_have_one_timestamp(tmp_path):
    """Whatever fraction of a nanosecond it comes to."""
    rows = [{**mooncake(0.125403, 10, [0]), "session_id": "a"}] * 2
    before, after = MooncakeTrace(path=write(tmp_path / "t.jsonl", rows)).requests(Streams(0))
    assert before.arrival_ns == after.arrival_ns == 125_403
    assert (after.after, after.think_ns) == ((before.request_id,), 0)


def test_turns_of_a_mooncake_session_follow_each_other(tmp_path):
    rows = [
        {**mooncake(10, 600, [0, 1]), "session_id": "a"},
        {**mooncake(15, 100, [7]), "session_id": "b"},
        {**mooncake(40, 1200, [0, 2, 3]), "session_id": "a"},
        {"input_length": 1300, "output_length": 1, "hash_ids": [0, 2, 4], "session_id": "a", "delay": 5},
        mooncake(12, 20, [9]),
    ]
    with pytest.warns(InputWarning, match="not in order of time"):
        specs = MooncakeTrace(path=write(tmp_path / "t.jsonl", rows), speedup=2.0).requests(Streams(0))
    assert [len(spec.prompt) for spec in specs] == [600, 20, 100, 1200, 1300]
    assert [spec.after for spec in specs] == [(), (), (), (0,), (3,)]
    assert [spec.think_ns for spec in specs] == [0, 0, 0, 15_000_000, 5_000_000]
    back = [rows[0], {**rows[2], "timestamp": 9}]
    with pytest.raises(TraceError, match="line 2: timestamp is 9, expected a time not before"):
        MooncakeTrace(path=write(tmp_path / "t.jsonl", back)).requests(Streams(0))


def test_bailian_counts_in_seconds_and_blocks_of_16(tmp_path):
    rows = [
        {**mooncake(0.5, 40, [1, 2, 3]), "chat_id": 0, "parent_chat_id": -1, "type": "text", "turn": 1},
        {**mooncake(61.25, 60, [1, 2, 4, 5]), "chat_id": 1, "parent_chat_id": 0, "type": "text", "turn": 2},
    ]
    specs = BailianTrace(path=write(tmp_path / "t.jsonl", rows)).requests(Streams(0))
    assert [spec.arrival_ns for spec in specs] == [500_000_000, 61_250_000_000]
    assert shared(*specs) == 32
    assert [spec.after for spec in specs] == [(), ()]


def test_burstgpt_leaves_failures_out(tmp_path):
    head = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    rows = [
        "5,1,2.5,ChatGPT,472,18,490,Conversation log",
        "45,,0.1,GPT-4,1087,0,1087,API log",
        "118,2,9,GPT-4,7,9,16,x",
    ]
    path = tmp_path / "burst.csv"
    path.write_text(head + "\n".join(rows) + "\n")
    specs = BurstGptTrace(path=path, num_requests=2).requests(Streams(0))
    assert [(spec.arrival_ns / 1e9, len(spec.prompt), len(spec.output)) for spec in specs] == [
        (5, 472, 18),
        (118, 7, 9),
    ]
    assert shared(*specs) == 0


def test_images_stand_before_the_text_and_change_neither_lengths_nor_outputs():
    texts = {"num_requests": 200, "input_tokens": Uniform(1, 100), "output_tokens": Uniform(1, 9)}
    plain = RandomLengths(**texts).requests(Streams(4))
    images = {"images": Uniform(1, 3), "image_tokens": Uniform(10, 20), "distinct_images": 7, "image_share": 0.5}
    found = RandomLengths(**texts, **images).requests(Streams(4))
    assert [spec.output for spec in found] == [spec.output for spec in plain]
    assert [len(spec.prompt) - spec.num_media_tokens("image") for spec in found] == [len(spec.prompt) for spec in plain]
    assert 70 < sum(bool(spec.media) for spec in found) < 130
    spans = {}
    for spec in found:
        for span, image in zip(spec.prompt.spans, spec.media, strict=False):
            assert spans.setdefault(image.media_id, span) == span
            assert span[2] == image.num_tokens
    assert len(set(spans.values())) == len(spans) == 7


def test_images_without_a_size_are_refused():
    with pytest.raises(ValueError, match="images and image_tokens together"):
        RandomLengths(num_requests=1, input_tokens=Fixed(1), output_tokens=Fixed(1), images=Fixed(1))
