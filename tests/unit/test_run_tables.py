"""A run as DataFrames says what its summary says, simulated or read from its folder."""

import sys
from copy import deepcopy

import pytest

from pdsim import StoredRun
from pdsim.metrics.run_folder import PandasMissingError, write_records
from pdsim.metrics.tables import TABLES, RunFolderError
from tests.support import run, small


@pytest.fixture(scope="module")
def result():
    pytest.importorskip("pandas")
    load = {"use": "random_lengths", "num_requests": 30, "input_tokens": 40, "output_tokens": 12}
    return run(small(workload=load), levels=True).result


def test_statistics_of_columns_are_those_of_the_summary(result):
    summary, requests = result.summary(), result.requests
    assert len(requests) == summary["completed"]
    for column, metric in {"ttft_ms": "ttft", "tpot_ms": "tpot", "e2e_ms": "e2e_latency"}.items():
        assert requests[column].mean() == pytest.approx(summary[f"mean_{metric}_ms"])
        assert requests[column].quantile(0.99) == pytest.approx(summary[f"p99_{metric}_ms"])
    assert result.transfers["num_bytes"].sum() == summary["pdsim"]["transfer_bytes"]
    assert (result.steps["kind"] == "prefill").sum() == summary["pdsim"]["prefill_steps"]


def test_what_did_not_finish_has_no_latency(result):
    result = deepcopy(result)
    requests = result.records.requests
    requests[0].outcome, requests[1].num_output_tokens = "failed", 1
    requests[2].admitted_ns = None
    table = result.requests
    assert table.loc[0, ["ttft_ms", "e2e_ms", "tpot_ms"]].isna().all()
    assert table.loc[1, ["ttft_ms", "e2e_ms"]].notna().all()
    assert table["tpot_ms"].isna().sum() == 2
    assert table["admitted_ns"].dtype == float
    assert table["arrival_ns"].dtype == int


def test_a_run_folder_has_the_same_tables(result, tmp_path):
    write_records(tmp_path, result.summary(), result.records)
    stored = StoredRun(tmp_path)
    assert stored.summary() == result.summary()
    for name in TABLES:
        assert getattr(stored, name).equals(getattr(result, name)), name
    assert "records" not in vars(stored), "a table was read without the others"
    with pytest.raises(RunFolderError, match="is no run folder"):
        StoredRun(tmp_path / "nothing")


def test_without_pandas_the_message_says_what_to_install(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(PandasMissingError, match=r"pip install 'pdsim\[notebook\]'"):
        _ = result.requests
