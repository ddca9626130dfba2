"""What `pdsim compare` prints first: the key numbers of runs, and which differences are larger than chance."""

from collections.abc import Sequence
from typing import Any

from pdsim.metrics.explanation.explain import stage_times
from pdsim.metrics.explanation.failures import failures_in
from pdsim.metrics.summary_rows import SummaryRow, counted, percentage, ranges_of, signed
from pdsim.show.terminal.layout import new_console
from pdsim.show.terminal.run import cluster_text, key_rows, load_text, print_numbers, stage_text, value_text
from pdsim.show.terminal.screen import print_headline, print_sentence, screen_table
from pdsim.study.repetition import Change, ComparedRun, change, value_in
from pdsim.study.verdict.cold import cold_wave
from pdsim.study.verdict.confidence import NOT_MEASURED

_CHANCE = "chance"
_IN_HEADLINE = ("request_throughput", "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "pdsim.failed")


def print_comparison(runs: Sequence[ComparedRun]) -> None:
    """Prints how each run differs from the first run. A single run is printed without differences."""
    console, (first, *others) = new_console(), runs
    for other in others:
        print_headline(console, _headline(first, other))
    for line in _settings(runs):
        print_sentence(console, line)
    if not others:
        print_numbers(first.summary, None)
    for other in others:
        console.print(_table(first, other))
    ends = (note for other in others for note in _at_ends(first, other))
    for note in [*_chance(runs), *_draws(runs), *ends, *_cold_servers(runs)]:
        print_sentence(console, note)
    for run in runs:
        for failure in failures_in(run.summary):
            text = f"{counted(failure.num_requests, 'request')} of {run.name} failed: {failure.text}."
            print_sentence(console, text)
        if stages := stage_text({one.stage: one.share for one in stage_times(run.records)}):
            print_sentence(console, f"Where a request's time goes in {run.name}: {stages}.")


def _settings(runs: Sequence[ComparedRun]) -> list[str]:
    """Sentences on the cluster and the load of each run. Runs with equal cluster and load share one sentence."""
    named: dict[str, list[str]] = {}
    for run in runs:
        if run.scenario is not None:
            load = load_text(run.summary, run.records, run.scenario)
            text = f"{run.scenario.model} on {cluster_text(run.scenario)}; {load}"
            named.setdefault(text, []).append(run.name)
    return [f"{' and '.join(names)}: {text}." for text, names in named.items()]


def changes_of(first: ComparedRun, other: ComparedRun) -> dict[str, Change]:
    """How another run differs from the first, by the summary's field, for each key number whose change is known."""
    return {row.field: found for row, _, found in _rows(first, other) if found is not None}


def _rows(first: ComparedRun, other: ComparedRun) -> list[tuple[SummaryRow, list[float | None], Change | None]]:
    """Returns, for each key number: its row in the summary, its values in both runs, and its change. The change is None
    if the number is not known in a run or repetition, or if it is relative and the first number is 0.
    """
    found = []
    for row, values in key_rows([first.summary, other.summary]):
        repeated = zip(first.repeated, other.repeated, strict=False)
        runs = [(values[0], values[1]), *((value_in(row, one), value_in(row, two)) for one, two in repeated)]
        found.append((row, values, change(row, runs)))
    return found


def _headline(first: ComparedRun, other: ComparedRun) -> str:
    told = [(row, one) for row, _, one in _rows(first, other) if one is not None and one.is_certain and row.better]
    told = [(row, one) for row, one in told if row.field in _IN_HEADLINE] or told
    if not told:
        return f"{other.name} differs from {first.name} by no more than chance"
    parts = []
    for word, sign in (("better", 1), ("worse", -1)):
        named = [f"{row.title} {percentage(one.own)}" for row, one in told if one.own * row.better * sign > 0]
        parts += [f"{word}: {', '.join(named)}"] if named else []
    return f"{other.name} against {first.name}: {'; '.join(parts)}"


def _table(first: ComparedRun, other: ComparedRun) -> Any:
    num_runs = 1 + _num_pairs(first, other)
    rows = []
    for row, values, found in _rows(first, other):
        cells = [row.title, *(value_text(row, value) for value in values)]
        if found is None:
            rows.append([*cells, "", *([""] if num_runs > 1 else []), ""])
            continue
        shown = _change_text(row, found.own)
        band = [f"{_change_text(row, found.least)} to {_change_text(row, found.most)}"] if num_runs > 1 else []
        rows.append([*cells, shown, *band, _verdict(row, found)])
    band = [f"in {num_runs} runs"] if num_runs > 1 else []
    return screen_table(["", first.name, other.name, "difference", *band, ""], rows)


def _num_pairs(first: ComparedRun, other: ComparedRun) -> int:
    return min(len(first.repeated), len(other.repeated))


def _change_text(row: SummaryRow, value: float) -> str:
    return f"{signed(100 * value)} pt" if row.kind == "share" else percentage(value)


def _verdict(row: SummaryRow, found: Change) -> str:
    if not found.is_certain:
        return _CHANCE if round(found.own, 4) else ""
    return "" if not row.better else "better" if found.own * row.better > 0 else "worse"


def _chance(runs: Sequence[ComparedRun]) -> list[str]:
    """Sentences on how the runs were repeated, or on why they were not."""
    first, *others = runs
    if not others:
        return []
    if any(run.summary.get("backend") != "pdsim" for run in runs):
        return ["Measured runs cannot be repeated here, so differences by chance are not marked."]
    if not all(_num_pairs(first, other) for other in others):
        return ["Differences by chance are not marked without repetitions (--repeats 4)."]
    is_chance = any(_verdict(row, found) == _CHANCE for o in others for row, _, found in _rows(first, o) if found)
    repeated = "with slightly faster and slower messages" if first.is_sample else "with other draws of the load"
    meaning = f' "{_CHANCE}" marks a difference that the repetitions do not confirm.' if is_chance else ""
    return [f"Each run was repeated {repeated}.{meaning}"]


def _draws(runs: Sequence[ComparedRun]) -> list[str]:
    """A sentence if runs have different seeds and their loads are drawn at random, because loads then differ by chance.
    Empty: the runs have the same seed, or a run's load is a recorded trace.
    """
    seeds = {run.name: run.scenario.seed for run in runs if run.scenario is not None and not run.is_sample}
    if len(seeds) < len(runs) or len(set(seeds.values())) == 1:
        return []
    of_each = ", ".join(f"{name} {seed}" for name, seed in seeds.items())
    return [f"The runs have different seeds ({of_each}), so each has another draw of the load."]


def _cold_servers(runs: Sequence[ComparedRun]) -> list[str]:
    """Sentences on measured runs that may have begun on cold servers: compared with a simulation of the same requests,
    the first requests were late by more than the later ones.
    """
    simulated = [run for run in runs if run.summary.get("backend") == "pdsim"]
    notes = []
    for run in runs:
        found = cold_wave(run.records, simulated[0].records) if simulated and run not in simulated else None
        if found is None:
            continue
        late = f"{found.late_ns / 1e6:.0f} ms"
        notes.append(
            f"Compared with {simulated[0].name}, the first {counted(found.num_requests, 'request')} of {run.name} took "
            f"{late} longer than later requests did. The servers may have been cold: send the load twice, or try "
            f"--set 'cost.cold_start={{1: {late}}}'."
        )
    return notes


def _at_ends(first: ComparedRun, other: ComparedRun) -> list[str]:
    """A sentence on the differences between two runs at the ends of their ranges: whether a number that is larger in
    one run becomes smaller at one end. Empty: no difference is larger than chance, or the runs have no range.
    """
    mine, theirs = ranges_of(first.summary), ranges_of(other.summary)
    told = [
        (row, one.own)
        for row, _, one in _rows(first, other)
        if one is not None and one.is_certain and row.field in mine and row.field in theirs
    ]
    turned = [
        row.title
        for row, own in told
        if any(own * (theirs[row.field][end] - mine[row.field][end]) < 0 for end in (0, 1))
    ]
    if not told:
        return []
    if turned:
        return [f"{NOT_MEASURED} At one end of the range, {' and '.join(turned)} of {other.name} differ the other way."]
    return [f"{NOT_MEASURED} The differences have the same direction at both ends of the predicted range."]
