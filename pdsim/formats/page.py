"""Makes the tables of `docs/formats.md` from the lists of tools and traces in the code."""

from collections.abc import Iterable, Sequence

from pdsim.formats.results.exports import TOOLS as WRITTEN
from pdsim.formats.results.reading import TOOLS
from pdsim.workload.trace_kind import READS


def results_table() -> str:
    """Table of the results that can be read, by tool: the file, what its numbers mean, and the value of --to that
    writes it.
    """
    rows = [(tool.name, tool.file, tool.differs, _written(tool.name)) for tool in TOOLS]
    return _table(("tool", "file", "what differs from a [summary](metrics.md)", "`--to`"), rows)


def traces_table() -> str:
    """Table of the trace formats that pdsim reads, by the name of the workload."""
    return _table(("workload", "reads"), [(f"`{use}`", what) for use, what in READS.items()])


def _written(tool: str) -> str:
    return next((f"`{name}`" for name in WRITTEN if name in tool.lower().replace(" ", "")), "")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
