"""What is printed fits its terminal, whole."""

import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from pdsim.metrics.explanation.stages import STAGES
from pdsim.metrics.summary_rows import SUMMARY_ROWS
from pdsim.show.terminal import layout, tables
from tests.support import run, small


@pytest.fixture(scope="module")
def result():
    scenario = small(
        workload={"use": "random_lengths", "num_requests": 60, "input_tokens": 200, "output_tokens": 30},
        client={"use": "closed_loop", "concurrency": 20},
        front_end={"service": "1 ms", "latency_out": "2 ms"},
        decode__max_running_requests=8,
    )
    return run(scenario, levels=True).result


@pytest.fixture
def printed(monkeypatch):
    """Calls a printer as on a terminal of that width; the text, without styles."""

    def call(width, printer, *arguments):
        out = StringIO()
        for module in (layout, tables):
            monkeypatch.setattr(module, "new_console", lambda: Console(width=width, file=out))
        printer(*arguments)
        lines = out.getvalue().splitlines()
        assert all(len(line) <= width for line in lines)
        assert "…" not in out.getvalue()
        return out.getvalue()

    return call


def changed(summary, **values):
    return {**summary, **values, "pdsim": {**summary["pdsim"], **values.get("pdsim", {})}}


WIDTHS = (80, 100, 120, 160)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_runs", [1, 2, 3, 7])
def test_every_run_is_shown_whole(printed, result, width, num_runs):
    names = [f"configuration-{i}-of-a-long-name" for i in range(num_runs)]
    summary = result.summary()
    text = printed(width, tables.print_summaries, dict.fromkeys(names, summary))
    text += printed(width, tables.print_stages, dict.fromkeys(names, result.records))
    text += printed(width, tables.print_usage, dict.fromkeys(names, result.records))
    assert text.count("requests completed") == text.count("TTFT mean, s") >= 1
    for stage in STAGES:
        assert stage in text
    for i in range(num_runs):
        assert text.count(f"configuration-{i}-") >= (3 if num_runs > 1 else 1)
    for name in ("decode-0", "prefill-0"):
        assert text.count(f"  {name} ") == num_runs


def test_what_there_is_room_for(printed, result):
    runs = {"a": result.records}
    wide, narrow = (printed(width, tables.print_stages, runs) for width in (120, 80))
    assert ("median" in wide, "median" in narrow) == (True, False)
    assert "what happens" in narrow, "the meaning of a stage is the last that is left out"
    assert "slowest 1%" in narrow
    runs |= {"b": result.records}
    wide, narrow = (printed(width, tables.print_stages, runs) for width in (120, 80))
    assert "what happens" in wide
    assert "share" in narrow


def test_times_are_in_seconds_where_they_are_long(printed, result):
    summary = changed(result.summary(), median_ttft_ms=4321.0, p99_ttft_ms=999.0, mean_tpot_ms=12.345)
    text = printed(80, tables.print_summaries, {"a": summary})
    assert re.search(r"TTFT median, s +4\.32 ", text)
    assert re.search(r"TTFT p99, ms +999\.0 ", text)
    assert re.search(r"TPOT mean, ms +12\.3[45] ", text)
    assert re.search(r"ITL mean, ms +\d+\.\d\d ", text)
    both = printed(80, tables.print_summaries, {"a": summary, "b": changed(summary, p99_ttft_ms=12_000.0)})
    assert re.search(r"TTFT p99, s +1\.00 +12\.00 ", both)


def test_rates_differ_in_points_and_bytes_are_gigabytes(printed, result):
    first = changed(result.summary(), pdsim={"decode_cache_hit_rate": 0.0, "transfer_bytes": 6_985_232_154_624})
    second = changed(first, pdsim={"decode_cache_hit_rate": 0.042, "transfer_bytes": 3_492_616_077_312})
    text = printed(80, tables.print_summaries, {"a": first, "b": second})
    assert re.search(r"decode cache hits +0\.0% +4\.2% +\+4\.2 pt ", text)
    assert re.search(r"KV sent, GB +6,985\.2 +3,492\.6 +-50\.0% ", text)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (0, "0.0%"),
        (-0.0004, "0.0%"),
        (-0.003, "-0.3%"),
        (0.0049, "+0.5%"),
        (0.006, "[red]+0.6%[/red]"),
        (-0.2, "[green]-20.0%[/green]"),
        (12.5, "[red]+1,250.0%[/red]"),
    ],
)
def test_a_difference_has_a_colour_when_it_can_be_seen(change, shown):
    (row,) = (row for row in SUMMARY_ROWS if row.field == "mean_ttft_ms")
    assert tables._colored(row.difference(100 * (1 + change), 100)) == shown


@pytest.mark.parametrize("width", WIDTHS)
def test_a_request_and_the_catalog_fit(printed, result, width):
    request = result.records.requests[3]
    text = printed(width, tables.print_request, request)
    assert all(stage in text for stage in STAGES)
    assert "request 3: 200 + 30 tokens, prefill-0 -> decode-0, finished" in text
    printed(width, tables.print_request, replace(request, outcome="failed", reason="a reason " * 20))
    assert "qwen3.5-397b-a17b" in printed(width, tables.print_catalog)
