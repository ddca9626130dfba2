"""KV pages as runs of page ids: a `range` each, so that a contiguous prompt is one object whatever its length."""

from collections.abc import Iterable

PageRuns = tuple[range, ...]


def count_pages(runs: Iterable[range]) -> int:
    return sum(map(len, runs))


def cut_pages(runs: Iterable[range], start: int, stop: int | None = None) -> PageRuns:
    """Pages [start, stop) of a page table, counted in pages from its beginning."""
    cut = []
    for run in runs:
        if stop is not None and stop <= 0:
            break
        if start < len(run):
            cut.append(run[start:] if stop is None else run[start:stop])
            start = 0
        else:
            start -= len(run)
        if stop is not None:
            stop -= len(run)
    return tuple(cut)


def append_pages(table: list[range], runs: Iterable[range]) -> None:
    """Lengthen a page table, joining runs that continue its last one."""
    for run in runs:
        if table and run.step == 1 and table[-1].step == 1 and table[-1].stop == run.start:
            table[-1] = range(table[-1].start, run.stop)
        else:
            table.append(run)


def join_runs(runs: Iterable[range]) -> list[range]:
    """The same pages in ascending order, in as few runs as possible. Raises RuntimeError on a page that comes twice."""
    single: list[range] = []
    for run in runs:
        single.extend([run] if run.step == 1 else (range(page, page + 1) for page in run))
    joined: list[range] = []
    for run in sorted(single, key=lambda run: run.start):
        if joined and run.start < joined[-1].stop:
            raise RuntimeError(f"page {run.start} comes twice")
        append_pages(joined, [run])
    return joined


def deal_pages(runs: Iterable[range], num_hands: int) -> list[list[range]]:
    """Deal pages like cards, one to each hand in turn, without looking at each card."""
    hands: list[list[range]] = [[] for _ in range(num_hands)]
    turn = 0
    for run in runs:
        for i in range(min(num_hands, len(run))):
            dealt = run[i::num_hands]
            hands[(turn + i) % num_hands].append(dealt if len(dealt) > 1 else range(dealt.start, dealt.start + 1))
        turn += len(run)
    return hands
