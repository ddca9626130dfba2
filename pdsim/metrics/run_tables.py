"""A run as pandas DataFrames. pandas is an extra, and loaded when a table is asked for."""

from pathlib import Path
from typing import Any

from pdsim.metrics.records import RunRecords
from pdsim.metrics.run_folder import arrow_table, read_records, read_summary


class PandasMissingError(ImportError):
    """Says what to install."""

    def __init__(self) -> None:
        super().__init__("tables are pandas DataFrames: pip install 'pdsim[notebook]'")


class RunTables:
    """What has the records of a run, and shows them as tables with the columns of its folder's files.

    Times are ns since the run began; a column in which some are "never" is of floats, with NaN for those. Tables are
    made anew at each call. Raises PandasMissingError without pandas.
    """

    records: RunRecords

    @property
    def requests(self) -> Any:
        """By request_id. Beside the columns of requests.parquet: ttft_ms, tpot_ms, e2e_ms; NaN if not finished."""
        frame = self._frame("requests").set_index("request_id")
        is_done = frame["outcome"] == "finished"
        arrival_ns, num_gaps = frame["arrival_ns"], frame["num_output_tokens"] - 1
        frame["ttft_ms"] = ((frame["first_token_ns"] - arrival_ns) / 1e6).where(is_done)
        frame["e2e_ms"] = ((frame["end_ns"] - arrival_ns) / 1e6).where(is_done)
        frame["tpot_ms"] = (frame["e2e_ms"] - frame["ttft_ms"]) / num_gaps.where(num_gaps > 0)
        return frame

    @property
    def steps(self) -> Any:
        """A row for each prefill forward, and for each run of decode steps of one batch."""
        return self._frame("steps")

    @property
    def transfers(self) -> Any:
        """A row for each transfer unit."""
        return self._frame("transfers")

    @property
    def levels(self) -> Any:
        """How full an instance is from time_ns on. No rows unless the run observed levels."""
        return self._frame("levels")

    def _frame(self, name: str) -> Any:
        load_pandas()
        table = arrow_table(self.records, name)
        never = [column for column, values in zip(table.column_names, table.columns, strict=True) if values.null_count]
        return table.to_pandas().astype(dict.fromkeys(never, float))


class StoredRun(RunTables):
    """A run folder, of a simulated run or a real one."""

    def __init__(self, folder: Path | str) -> None:
        """Raises RunFolderError if it is none."""
        self.folder = Path(folder)
        self.records = read_records(self.folder)

    def summary(self) -> dict[str, Any]:
        return read_summary(self.folder)


def load_pandas() -> Any:
    """Raises PandasMissingError."""
    try:
        import pandas as pd  # noqa: PLC0415  an extra
    except ImportError:
        raise PandasMissingError from None
    return pd
