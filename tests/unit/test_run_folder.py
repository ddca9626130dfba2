"""A run as files: the tables say what the summary says, and read back as they were."""

import errno
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from pdsim.core.instance import Levels
from pdsim.files import files_replaced
from pdsim.metrics.records import LevelRecord, LevelRows, RequestRecord, RunRecords, StepRecord, TransferRecord
from pdsim.metrics.run_folder import read_records, read_summary, write_records
from pdsim.metrics.tables import KINDS, RunFolderError
from tests.support import run, small

COLUMNS = {
    "requests": [field.name for field in fields(RequestRecord) if field.metadata.get("in_table", True)],
    "steps": [field.name for field in fields(StepRecord)],
    "transfers": [field.name for field in fields(TransferRecord)],
    "levels": ["instance_id", "time_ns", *Levels._fields],
}


@pytest.fixture(scope="module")
def result():
    """Sessions on a decode pool so small that requests are retracted."""
    scenario = small(
        workload={
            "use": "sessions",
            "num_sessions": 20,
            "num_turns": 3,
            "input_tokens": {"use": "uniform", "low": 10, "high": 50},
            "output_tokens": {"use": "uniform", "low": 10, "high": 60},
        },
        prefill__instances=2,
        decode__pool_tokens=400,
        decode__radix_cache=True,
        client={"use": "closed_loop", "concurrency": 8, "warm_up_requests": 0},
    )
    return run(scenario, levels=True).result


@pytest.fixture(scope="module")
def folder(result, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_records(folder, result.summary(), result.records)
    return folder


@pytest.fixture(scope="module")
def tables(folder):
    return {name: parquet.read_table(folder / f"{name}.parquet") for name in COLUMNS}


def total(table, column):
    return sum(table.column(column).to_pylist())


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_the_fields_of_the_records(tables, name):
    assert tables[name].column_names == COLUMNS[name]


def test_requests_keep_the_class_of_their_trace(tmp_path):
    """Folders written before there was the column read as requests without a class."""
    classes = ["chat", "batch", "", "chat"]
    rows = [f"{i},40,5,{name}" for i, name in enumerate(classes)]
    (tmp_path / "trace.csv").write_text("\n".join(["arrival_s,in_tokens,out_tokens,class", *rows]))
    traced = run(small(workload={"use": "request_table", "path": str(tmp_path / "trace.csv")}, client="open_loop"))
    write_records(tmp_path / "run", traced.result.summary(), traced.result.records)
    assert [one.request_class for one in read_records(tmp_path / "run").requests] == classes
    path = tmp_path / "run" / "requests.parquet"
    parquet.write_table(parquet.read_table(path).drop_columns(["request_class"]), path)
    assert [one.request_class for one in read_records(tmp_path / "run").requests] == [""] * len(classes)


def test_a_row_for_each_record(result, tables):
    assert {name: tables[name].num_rows for name in COLUMNS} == {
        name: len(getattr(result.records, name)) for name in COLUMNS
    }


def test_the_tables_agree_with_the_summary(folder, tables):
    summary = read_summary(folder)
    own, requests, steps, transfers = summary["pdsim"], tables["requests"], tables["steps"], tables["transfers"]
    assert requests.num_rows == summary["completed"] == 60
    assert total(requests, "num_prompt_tokens") == summary["total_input_tokens"]
    assert total(requests, "num_output_tokens") == summary["total_output_tokens"]
    assert total(requests, "num_retractions") == own["retractions"] > 0
    assert total(requests, "transfer_bytes") == total(transfers, "num_bytes") == own["transfer_bytes"]
    assert transfers.num_rows == own["transfers"]
    kinds = steps.column("kind").to_pylist()
    assert kinds.count("prefill") == own["prefill_steps"]
    rows = [row for row in steps.to_pylist() if row["kind"] == "decode"]
    assert sum(row["num_steps"] for row in rows) == own["decode_steps"]


def test_every_token_is_computed_once(tables):
    """Prefill computes what it has not cached; decode all outputs but each first, which prefill computes."""
    requests = tables["requests"]
    steps = tables["steps"].to_pylist()
    computed = sum(step["num_tokens"] for step in steps if step["kind"] == "prefill")
    assert computed == total(requests, "num_prompt_tokens") - total(requests, "num_prefill_cached_tokens")
    decoded = sum(step["num_steps"] * step["num_requests"] for step in steps if step["kind"] == "decode")
    assert decoded == total(requests, "num_output_tokens") - requests.num_rows


def test_levels_are_in_order_and_keep_the_pool(tables):
    rows = tables["levels"].to_pylist()
    for instance_id, pool in (("prefill-0", 1024), ("prefill-1", 1024), ("decode-0", 100)):
        own = [row for row in rows if row["instance_id"] == instance_id]
        times = [row["time_ns"] for row in own]
        assert times == sorted(times)
        assert {r["num_used_pages"] + r["num_evictable_pages"] + r["num_free_pages"] for r in own} == {pool}


LEVELS = st.builds(Levels, *[st.integers(0, 2)] * 8, st.sampled_from(["", "pages", "slots"]))


@given(st.lists(st.tuples(st.sampled_from(["prefill-0", "pages", "décode"]), LEVELS), max_size=30))
def test_rows_of_levels_are_the_records_without_those_that_repeat_their_instance_s_last(seen):
    records: list[LevelRecord] = []
    rows = LevelRows()
    for time_ns, (instance_id, levels) in enumerate(seen):
        rows.add(instance_id, time_ns, levels)
        if next((row.levels for row in reversed(records) if row.instance_id == instance_id), None) != levels:
            records.append(LevelRecord(instance_id, time_ns, levels))
    assert rows == records
    assert deepcopy(rows) == records
    assert all(row in rows for row in records)
    for name in KINDS["levels"].columns:
        assert list(rows.column(name)) == KINDS["levels"].column(name, records)


def test_records_read_back_as_they_were(result, folder):
    back = read_records(folder)
    for name in COLUMNS:
        assert getattr(back, name) == getattr(result.records, name)


def test_a_folder_that_lacks_a_table(result, tmp_path):
    write_records(tmp_path, result.summary(), result.records)
    (tmp_path / "steps.parquet").unlink()
    with pytest.raises(RunFolderError, match=r"has no steps\.parquet"):
        read_records(tmp_path)


def test_a_run_that_did_nothing_has_empty_tables(tmp_path):
    counts = dict.fromkeys(("completed", "duration", "total_input_tokens", "total_output_tokens"), 0)
    write_records(tmp_path, {**counts, "pdsim": {}}, RunRecords())
    assert read_records(tmp_path) == RunRecords()
    assert parquet.read_table(tmp_path / "steps.parquet").column_names == [field.name for field in fields(StepRecord)]


@pytest.mark.parametrize("num_replaced", range(4))
def test_no_folder_with_files_of_two_runs_looks_whole(num_replaced, tmp_path, monkeypatch):
    """The last file stands for a whole run, whenever the replacing ends early."""
    names = ["journal", "requests", "summary"]
    for name in names:
        (tmp_path / name).write_text("old")
    replace, calls = Path.replace, iter(range(num_replaced))

    def replace_some(path, target):
        if next(calls, None) is None:
            raise OSError(errno.EIO, "the disk is gone")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", replace_some)
    with suppress(OSError), files_replaced(tmp_path, names, last="summary") as new:
        for name in names:
            (new / name).write_text("new")
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(found) | {"summary"} == set(names)
    assert ("summary" in found) == (num_replaced == len(names))
    assert [found[name] for name in names if name in found].count("new") == num_replaced


def test_a_full_disk_names_the_run_folder(tmp_path):
    """A failed write does not know the name of its file."""
    with pytest.raises(OSError, match="No space") as full, files_replaced(tmp_path / "run", [], last="summary"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert full.value.filename == str(tmp_path / "run")
