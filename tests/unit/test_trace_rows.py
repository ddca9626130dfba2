"""Traces as tools write them: each is known, and its lengths, times and prefixes are read."""

import json
from datetime import UTC, datetime
from math import inf

import pytest
from pyarrow import Table, parquet

from pdsim.scenario.sections.component import BUILT_IN, build_component
from pdsim.study.base import trace_lines
from pdsim.workload.request_spec import Streams, Workload
from pdsim.workload.trace_file import InputWarning, TraceError, records
from pdsim.workload.trace_kind import trace_kind
from pdsim.workload.traces import MooncakeTrace, RequestTable


def read(path, **settings):
    kind = trace_kind(path)
    assert kind.use in BUILT_IN[Workload]
    workload = build_component(Workload, {"use": kind.use, "path": str(path), **settings}, path.parent)
    return workload.requests(Streams(0))


def seen(specs):
    return [(len(spec.prompt), len(spec.output), spec.arrival_ns / 1e9) for spec in specs]


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def record(name, at_ns, **more):
    metrics = {"input_sequence_length": {"value": 500, "unit": "tokens"}, "output_sequence_length": {"value": 20}}
    metadata = {
        "conversation_id": name,
        "turn_index": 0,
        "request_start_ns": at_ns,
        "request_end_ns": at_ns + 300_000_000,
    }
    return {"metadata": {**metadata, "benchmark_phase": "profiling", **more}, "metrics": metrics, "error": None}


EPOCH_NS = 1_700_000_000_000_000_000


WIDE = '{"input_length": 3, "score": %s}'


@pytest.mark.parametrize("text", [f"{WIDE}\n", f"[{WIDE}]", f'{{"data": [{WIDE}]}}', f'{{\n"data": [\n{WIDE}\n]}}'])
def test_a_field_that_is_not_read_may_have_any_number_of_json(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_text(text % "1e999")
    assert [(line.get("input_length"), line.get("score")) for line in records(path)] == [(3, inf)]
    path.write_text(text % "NaN")
    with pytest.raises(TraceError, match="NaN is no finite number"):
        list(records(path))


def test_records_of_aiperf_count_from_the_first(tmp_path):
    path = lines(tmp_path / "t.jsonl", record("a", EPOCH_NS), record("b", EPOCH_NS + 700_000_000))
    assert trace_kind(path) == ("request_table", True)
    assert seen(read(path)) == [(500, 20, 0.0), (500, 20, 0.7)]
    failed = {**record("c", EPOCH_NS), "error": {"code": 500}}
    path = lines(tmp_path / "t.jsonl", record("w", EPOCH_NS, benchmark_phase="warmup"), failed, record("a", EPOCH_NS))
    with pytest.warns(InputWarning, match="2 requests are left out, which failed or warmed up"):
        assert seen(read(path)) == [(500, 20, 0.0)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,100,7\n1.25,90,3\n", [(100, 7, 0.5), (90, 3, 1.25)]),
        ("request_id;arrival_timestamp;prompt_size;token_size\n0;2;10;3\n", [(10, 3, 2)]),
        ('{"input_lens": [5, 6], "output_lens": [2, 3], "duration": 4, "ttfts": [0.1, 0.2]}', [(5, 2, 0), (6, 3, 0)]),
        ('[{"start_time": 1700000000.5, "info": {"input_tokens": 4, "output_tokens": 2}}]', [(4, 2, 0)]),
        ('{"created_time": 1700000000500, "input_tokens": 4, "output_tokens": 2}', [(4, 2, 0)]),
        ('{"usage": {"prompt_tokens": 8, "completion_tokens": 2}, "created": 1700000000}', [(8, 2, 0)]),
    ],
)
def test_rows_of_other_tools(tmp_path, text, found):
    path = tmp_path / "t.any"
    path.write_text(text)
    assert seen(read(path)) == found


def test_the_size_of_blocks_is_found_out(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 200, "output_length": 4, "hash_ids": [0, 1, 2, 3]},
        {"timestamp": 9, "input_length": 180, "output_length": 4, "hash_ids": [0, 1, 4]},
    ]
    with pytest.warns(InputWarning, match="blocks of 64 tokens fit all lengths and hash_ids"):
        first, second = read(lines(tmp_path / "t.jsonl", *rows))
    assert first.prompt.common_prefix(0, second.prompt, 0) == 128
    first, second = read(lines(tmp_path / "t.jsonl", *({"block_size": 60, **row} for row in rows)))
    assert first.prompt.common_prefix(0, second.prompt, 0) == 120
    with pytest.raises(TraceError, match=r"no block size fits all lengths and hash_ids: set block_tokens"):
        read(lines(tmp_path / "t.jsonl", rows[0], {**rows[1], "input_length": 20}))
    odd = [{**row, "input_length": length} for row, length in zip(rows, (400, 221), strict=True)]
    with pytest.raises(TraceError, match=r"blocks of 100 to 110 tokens fit all lengths and hash_ids: set block_tokens"):
        read(lines(tmp_path / "t.jsonl", *odd))
    exact = [{**row, "input_length": length} for row, length in zip(rows, (400, 201), strict=True)]
    first, second = read(lines(tmp_path / "t.jsonl", *exact))
    assert first.prompt.common_prefix(0, second.prompt, 0) == 200


def test_only_whole_blocks_may_have_ids(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": n, "output_length": 4, "hash_ids": [0, i + 1]} for i, n in enumerate((40, 39))
    ]
    first, second = MooncakeTrace(path=lines(tmp_path / "t.jsonl", *rows), block_tokens=16).requests(Streams(0))
    assert (len(first.prompt), len(second.prompt)) == (40, 39)
    assert first.prompt.common_prefix(0, second.prompt, 0) == 16


def test_token_ids_are_shared_to_whole_blocks(tmp_path):
    ids = list(range(40))
    rows = [
        {"arrival_time_ns": 5, "input_toks": 40, "output_toks": 2, "input_tok_ids": each}
        for each in (ids, [*ids[:36], 7])
    ]
    first, second = read(lines(tmp_path / "t.jsonl", *rows))
    assert (len(first.prompt), len(second.prompt)) == (40, 37)
    assert first.prompt.common_prefix(0, second.prompt, 0) == 32


def test_a_unit_is_said_where_it_is_guessed(tmp_path):
    path = lines(tmp_path / "t.jsonl", *({"timestamp": at, "in": 9, "out": 9} for at in (0, 1.5)))
    with pytest.warns(InputWarning, match="timestamp is assumed to be in s; else set time_unit"):
        assert RequestTable(path=path).requests(Streams(0))[1].arrival_ns == 1.5e9
    assert RequestTable(path=path, time_unit="ms").requests(Streams(0))[1].arrival_ns == 1.5e6


SYSTEM = {"role": "system", "content": "You are helpful. " * 40}


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


def chat(*messages, **more):
    return {"messages": [SYSTEM, *({"role": "user", "content": text} for text in messages)], **more}


@pytest.mark.filterwarnings("ignore::pdsim.workload.trace_file.InputWarning")
def test_chats_share_what_they_begin_with(tmp_path):
    path = lines(tmp_path / "t.jsonl", chat("a" * 400, max_tokens=50), chat("b" * 400, max_tokens=60))
    assert trace_kind(path) == ("chat_trace", False)
    first, second = read(path)
    assert [len(first.output), len(second.output)] == [50, 60]
    assert 160 <= first.prompt.common_prefix(0, second.prompt, 0) <= 180
    assert 260 <= len(first.prompt) <= 285


@pytest.mark.filterwarnings("ignore::pdsim.workload.trace_file.InputWarning")
@pytest.mark.parametrize(
    ("row", "lengths"),
    [
        ({"prompt": "x" * 400, "output_tokens": 9}, [(100, 9)]),
        ({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": chat(max_tokens=9)}, [(172, 9)]),
        ({"request": json.dumps({"prompt": "x" * 400}), "info": {"input_tokens": 90, "output_tokens": 7}}, [(90, 7)]),
        ({"turns": [{"text": "x" * 400}, {"text": "y" * 80, "delay": 1000}]}, [(100, 5), (125, 5)]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 394}, IMAGE]}]}, [(1100, 5)]),
        ({"prompt": "x" * 40, "completion": "y" * 80}, [(10, 20)]),
    ],
)
def test_texts_of_other_tools(tmp_path, row, lengths):
    found = read(lines(tmp_path / "t.jsonl", row), **({"output_tokens": 5} if lengths[0][1] == 5 else {}))
    assert [(len(spec.prompt), len(spec.output)) for spec in found] == lengths


def test_an_answer_of_no_length_is_said(tmp_path):
    with pytest.warns(InputWarning) as said:
        assert len(read(lines(tmp_path / "t.jsonl", chat("a")))[0].output) == 256
    assert any("1 answers of unknown length are assumed to have 256 tokens each" in str(one.message) for one in said)


@pytest.mark.filterwarnings("ignore::pdsim.workload.trace_file.InputWarning")
def test_later_turns_of_texts_come_behind_what_was_said(tmp_path):
    said = {"session_id": "a", "text": "x" * 400}
    new = read(lines(tmp_path / "new.jsonl", said, {**said, "text": "y" * 400}), output_tokens=20)
    whole = read(lines(tmp_path / "whole.jsonl", said, {**said, "text": "x" * 400 + "y" * 400}), output_tokens=20)
    assert [len(spec.prompt) for spec in new] == [100, 220]
    assert [len(spec.prompt) for spec in whole] == [100, 200]


@pytest.mark.filterwarnings("ignore::pdsim.workload.trace_file.InputWarning")
def test_times_too_near_for_milliseconds_are_seconds(tmp_path):
    rows = [{"ts": at, "isl": 9, "osl": 9} for at in range(5)]
    assert [spec.arrival_ns for spec in read(lines(tmp_path / "t.jsonl", *rows))] == [at * 10**9 for at in range(5)]


def turn(session, length, **more):
    return {"session_id": session, "input_length": length, "output_length": 10, **more}


def test_turns_without_ids_begin_with_what_was_said(tmp_path):
    """As AIPerf sends them: a turn is what is new, unless lengths only grow."""
    new = lines(tmp_path / "new.jsonl", turn("a", 300), turn("a", 50, delay=1000), turn("b", 100))
    with pytest.warns(InputWarning, match="have the lengths of new input"):
        first, second, other = read(new)
    assert [len(spec.prompt) for spec in (first, second, other)] == [300, 360, 100]
    assert (second.after, second.think_ns) == ((0,), 1_000_000_000)
    assert first.prompt.common_prefix(0, second.prompt, 0) == 300
    whole = lines(tmp_path / "whole.jsonl", turn("a", 300), turn("a", 400, delay=1000))
    with pytest.warns(InputWarning, match="have the lengths of whole prompts"):
        first, second = read(whole)
    assert len(second.prompt) == 400
    assert first.prompt.common_prefix(0, second.prompt, 0) == 300
    assert [len(spec.prompt) for spec in read(whole, new_turns=True)] == [300, 710]


def test_branches_of_aiperf_are_refused(tmp_path):
    turns = [{"messages": [{"role": "user", "content": "go"}], "max_tokens": 3, "spawns": ["b"]}]
    with pytest.raises(TraceError, match="turns with spawns"):
        read(lines(tmp_path / "t.jsonl", {"session_id": "a", "turns": turns}))


@pytest.mark.filterwarnings("ignore::pdsim.workload.trace_file.InputWarning")
@pytest.mark.parametrize(
    "row",
    [
        {"Prompt Tokens": 100, "Completion Tokens": 20, "Arrival Time (s)": 1.5},
        {"promptTokens": 100, "completionTokens": 20, "arrivalTimeS": 1.5},
        {"prompt-tokens": 100, "completion-tokens": 20, "arrival-time-ms": 1500},
    ],
)
def test_names_may_be_spelt_otherwise(tmp_path, row):
    (found,) = read(lines(tmp_path / "t.jsonl", row))
    assert (len(found.prompt), len(found.output), found.arrival_ns) == (100, 20, 1_500_000_000)


@pytest.mark.filterwarnings("ignore::pdsim.workload.trace_file.InputWarning")
def test_turns_that_hold_lengths_are_requests(tmp_path):
    turns = [{"input_tokens": 100, "output_tokens": 20}, {"input_tokens": 50, "output_tokens": 9, "think_time": 2}]
    first, second = read(lines(tmp_path / "t.jsonl", {"conversation_id": "c", "timestamp_ms": 40, "turns": turns}))
    assert (first.arrival_ns, second.after, second.think_ns) == (40_000_000, (first.request_id,), 2_000_000_000)
    assert len(second.prompt) == 100 + 20 + 50


@pytest.mark.filterwarnings("ignore::pdsim.workload.trace_file.InputWarning")
@pytest.mark.parametrize("name", ["payloads", "payload"])
def test_inputs_of_aiperf(tmp_path, name):
    (tmp_path / "inputs.json").write_text(json.dumps({"data": [{"session_id": "a", name: [chat(max_tokens=9)] * 2}]}))
    assert [len(spec.output) for spec in read(tmp_path / "inputs.json")] == [9, 9]


def request_end(name, begin_ms, end_ms, hashes, session="a"):
    """Of Dynamo's request traces, whose hashes are of whole blocks."""
    replay = {"trace_block_size": 64, "input_length": 140, "input_sequence_hashes": hashes}
    request = {"request_id": name, "input_tokens": 9, "output_tokens": 8, "request_received_ms": begin_ms}
    event = {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": end_ms}
    return {**event, "agent_context": {"session_id": session}, "request": {**request, "replay": replay}}


def test_requests_of_dynamo_lie_by_their_ends(tmp_path):
    payload = {"event_type": "request_payload", "request_id": "b", "body": {"prompt": "x"}}
    begin_ms = 1_700_000_000_000
    late = request_end("b", begin_ms + 8000, begin_ms + 9000, [1001, 2002])
    early = request_end("a", begin_ms, begin_ms + 20_000, [1001, 1002])
    path = lines(tmp_path / "t.jsonl", payload, late, early, request_end("c", begin_ms + 1, begin_ms + 2, [3], "b"))
    with pytest.raises(TraceError, match="line 3: input_sequence_hashes is"):
        read(path)
    first, second = read(lines(tmp_path / "t.jsonl", payload, late, early))
    assert trace_kind(path) == ("mooncake_trace", True)
    assert [len(spec.prompt) for spec in (first, second)] == [140, 140]
    assert first.prompt.common_prefix(0, second.prompt, 0) == 64
    assert second.after == (first.request_id,)


def at(second):
    return datetime(2023, 11, 16, 18, 17, second, 250_000, tzinfo=UTC)


AGENT = {"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    "rows",
    [
        [{"TIMESTAMP": at(second), "ContextTokens": 9, "GeneratedTokens": 2} for second in (3, 5)],
        [{"timestamp": 500 * i, "input_length": 1000, "output_length": 7, "hash_ids": [1, 2 + i]} for i in (0, 1)],
        [{"input_tokens": 100 + i, "output_tokens": 5, "arrived_at": 0.5 * i, "class": None} for i in (0, 1)],
        [{"request_id": "a", "wait_for": [], **AGENT}, {"request_id": "b", "wait_for": ["a"], **AGENT}],
    ],
)
def test_a_parquet_file_is_read_like_lines_of_json(tmp_path, rows):
    as_text = [{name: str(v) if isinstance(v, datetime) else v for name, v in row.items()} for row in rows]
    plain, packed = lines(tmp_path / "trace.jsonl", *as_text), tmp_path / "trace.parquet"
    parquet.write_table(Table.from_pylist(rows), packed)
    assert trace_kind(packed) == trace_kind(plain)
    assert seen(read(packed)) == seen(read(plain))
    assert trace_lines(packed) == trace_lines(plain) == 2


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 0), ("\n\n", 0), ("\n{}\n{}\n", 2), ("\na,b\n1,2\n", 1), ("a,b\n", 0), ("{}\n\n{}", 2), ("[{}, {}]", 0)],
)
def test_lines_of_a_trace_are_counted_without_blank_ones(tmp_path, text, count):
    (tmp_path / "trace").write_text(text)
    assert trace_lines(tmp_path / "trace") == count


def test_a_damaged_parquet_file_is_one_error(tmp_path):
    path = tmp_path / "trace.parquet"
    path.write_bytes(b"PAR1" + bytes(40))
    for call in (trace_kind, trace_lines):
        with pytest.raises(TraceError, match="cannot be read as Parquet"):
            call(path)


@pytest.mark.filterwarnings("ignore::pdsim.workload.trace_file.InputWarning")
def test_images_stand_at_the_end_of_their_turn_and_equal_names_are_one_image(tmp_path):
    rows = [
        {"session_id": "a", "input_length": 100, "output_length": 5, "images": ["u", "v"], "timestamp": 0},
        {"session_id": "a", "input_length": 30, "output_length": 5, "images": ["u"], "timestamp": 1000},
        {"input_length": 50, "output_length": 5, "num_images": 2, "timestamp": 2000},
        {"input_length": 50, "output_length": 5, "timestamp": 3000},
    ]
    found = read(lines(tmp_path / "t.jsonl", *rows), image_tokens=10, new_turns=True)
    assert [len(spec.prompt) for spec in found] == [120, 120 + 5 + 40, 70, 50]
    first, second, third, fourth = ([image[:3] for image in spec.media] for spec in found)
    assert first == [(100, 10, 0), (110, 10, 1)]
    assert second == [*first, (155, 10, 0)]
    assert [(start, num) for start, num, _ in third] == [(50, 10), (60, 10)]
    assert {number for _, _, number in third}.isdisjoint({0, 1})
    assert fourth == []


@pytest.mark.filterwarnings("ignore::pdsim.workload.trace_file.InputWarning")
def test_images_of_messages_are_told_apart_by_all_that_they_contain(tmp_path):
    def message(end):
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * 500}{end}"}}
        return {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 394}, image]}]}

    found = read(lines(tmp_path / "t.jsonl", message("a"), message("b"), message("a")), output_tokens=5)
    assert [spec.media[0].media_id for spec in found] == [0, 1, 0]
    assert found[0].media[0].start_token + 1000 == len(found[0].prompt)
