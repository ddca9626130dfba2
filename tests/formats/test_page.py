"""The page of formats has the tables that the readers declare."""

from pathlib import Path

from pdsim.formats.page import results_table, traces_table
from pdsim.scenario.sections.component import BUILT_IN
from pdsim.workload.request_spec import Workload
from pdsim.workload.trace_kind import READS

PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")


def test_the_page_has_the_tables_of_the_readers():
    for table in (results_table(), traces_table()):
        assert table in PAGE


def test_every_workload_of_a_file_says_what_it_reads():
    made = {"random_lengths", "prefix_pool", "shared_prefix_groups", "sessions"}
    assert set(BUILT_IN[Workload]) - made == set(READS)
