"""Answers a question: runs its candidates, chooses one, asks again with other step times and message latencies, and
finds the resource that limits the chosen candidate.
"""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from math import isfinite
from pathlib import Path
from statistics import median
from typing import NamedTuple

from pdsim.files import write_whole
from pdsim.metrics.summary import tpot_ms, ttft_ms
from pdsim.metrics.summary_rows import counted
from pdsim.scenario.loading import Changes
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.component import component_name
from pdsim.scenario.yaml_file import ConfigError
from pdsim.sim.simulation import Observation, simulate
from pdsim.sim.uncertainty.noise import JITTERS
from pdsim.sim.uncertainty.sensitivity import Limit
from pdsim.study.base import NUM_SEEDS, AskOptions, base_of, trace_lines, warm_up_text
from pdsim.study.examination import deciding_measurement, requests_alone
from pdsim.study.measurement import Measurement
from pdsim.study.points.engine import Progress, Work, open_engine
from pdsim.study.points.estimate import number, share
from pdsim.study.points.store import Store, opened_folder
from pdsim.study.questions.answer import Answer
from pdsim.study.questions.rows import COLUMNS, SATURATED, AnswerRow
from pdsim.study.questions.study import SLO, Question, Study, Verdict, place_of, question
from pdsim.study.trials import Trials
from pdsim.study.verdict.confidence import END, NOT_MEASURED, Confidence, confidence_in_numbers, limit_rows
from pdsim.workload.client import ClosedLoop


def ask(
    name: str,
    scenario: Path | str | None = None,
    /,
    *,
    trace: Path | str | None = None,
    changes: Sequence[str] = (),
    slo: str = AskOptions.slo,
    speedup: str = AskOptions.speedup,
    seeds: int = NUM_SEEDS,
    jobs: int | None = None,
    out: Path | str | None = None,
    progress: Progress | None = None,
) -> Answer:
    """Answer a question about a scenario.

    Args:
        name: Name of the question, such as pd-ratio; docs/ask.md lists all.
        scenario: A scenario file; None: pdsim's built-in scenario with four H200.
        trace: A trace that replaces the workload.
        changes: Changes of the scenario, as "dotted.path=value".
        slo: Limits of ttft, tpot and e2e, and the share of requests that must be within these limits.
        speedup: Speed-ups of a trace that the question capacity tries, as "0.5,1,2,4"; empty: chosen until one
            meets the SLO and one misses it.
        seeds: Number of runs of each candidate; a trace sent at its recorded times is run once.
        jobs: Number of processes; None: one for each CPU; 1: this process.
        out: A folder for answer.md, answer.json, answer.png and all runs; None: nothing is kept.
        progress: Called after each run.

    Raises ConfigError for wrong arguments and fields, and if no candidate is possible.

    """
    options = AskOptions(trace=None if trace is None else Path(trace), slo=slo, speedup=speedup)
    with opened_folder(out) as folder:
        path = None if scenario is None else Path(scenario)
        found = question(name)
        if seeds < 1:
            raise ConfigError(f"--seeds {seeds}: at least 1")
        base = base_of(path, options, changes, folder=folder, starter=found.starter)
        if speedup and not (name == "capacity" and base.keeps_times):
            raise ConfigError(
                "--speedup applies to the question capacity only, and needs a trace that has arrival times"
            )
        num_workers = os.cpu_count() or 1 if jobs is None else jobs
        with closing(open_engine("here" if num_workers == 1 else "pool", num_workers)) as opened:
            work = Work(Store(folder), opened, progress, {SLO: options.wanted})
            trials = Trials(base, options.wanted, seeds, work)
            study = Study(trials, options, repeats=True)
            verdict = _verdict(name, found, study)

            def at(changed: Changes) -> Judged:
                """The study at one end of unmeasured times, with one run of each candidate, and its verdict."""
                other = Study(trials.at(changed), options)
                return Judged(other, _verdict(name, found, other))

            ends = {end: at(changed) for end, changed in base.ends.items()}
            found_here = Judged(study, verdict)
            repeated = [at(changed) for changed in base.jittered] if base.is_sample else []
            chance = [*_by_chance(found_here, repeated), *_by_draws(found_here)]
            others = _others_at_ends(found_here, ends)
            measure = _measurement(found_here, at) if others else None
            held = [*_agreed(found_here, ends, others, measure), *_if_one_layout_is_slow(found_here, found, ends)]
        made = _answer(name, found, study, verdict._replace(notes=[*chance, *held, *verdict.notes]), ends)
        made = replace(made, confidence=_confidence(found_here, chance, held, others, ends), measure=measure)
        if out is not None:
            trials.keep_as_sweep(name, {SLO: study.slo})
            _write(folder, made)
    return made


def _write(folder: Path, made: Answer) -> None:
    from pdsim.metrics.plots import write_figure  # noqa: PLC0415  matplotlib takes long to load

    write_whole(folder / "answer.md", made.to_markdown())
    write_whole(folder / "answer.json", json.dumps(made.to_json(), indent=2))
    write_figure(folder / "answer.png", made.figure)


def _verdict(name: str, question: Question, study: Study) -> Verdict:
    """Runs the candidates of a question, then further candidates that depend on the first results, and gives the
    verdict. name: the question's name, for messages. Raises ConfigError if no candidate can run.
    """
    arms = question.arms(study.base)
    while arms:
        study.run(arms)
        if not study.labels():
            raise ConfigError(
                f"{study.base.where}: {name}: no candidate can run; the first fails: {study.error(study.arms[0].label)}"
            )
        arms = question.then(study)
    return _judged(study, question.verdict(study))


class Judged(NamedTuple):
    """The candidates of a question with their results, and the verdict over them."""

    study: Study
    """The candidates and their results."""
    verdict: Verdict
    """Which candidate the results recommend, and why."""

    def holds(self, other: "Judged") -> bool:
        """True if this verdict and the verdict of `other` agree: both recommend a candidate or neither does, and both
        name the same winner. Different winners also count as the same if, by this study's results, the winner of
        `other` is as good as this verdict's winner (Study.as_good).
        """
        mine, theirs = self.verdict, other.verdict
        if bool(mine.advice) != bool(theirs.advice) or mine.winner == theirs.winner:
            return bool(mine.advice) == bool(theirs.advice)
        return theirs.winner in self.study.labels() and self.study.as_good(theirs.winner, mine.winner)


def _by_chance(found: Judged, repeated: Sequence[Judged]) -> list[str]:
    """A sentence that says how many runs give another answer than `found`. Empty: all give the same answer. repeated:
    answers from runs with slightly faster or slower messages, which are made if the load is a recorded trace, because
    seeds do not change such a load.
    """
    others = [_said(one.verdict) for one in repeated if not one.holds(found)]
    if not others:
        return []
    runs = f"{len(others)} of {1 + len(repeated)} runs"
    differing = "; ".join(dict.fromkeys(others))
    return [f"Chance decides: if messages are up to {max(JITTERS):.0%} faster or slower, {runs} say {differing}."]


def _by_draws(found: Judged) -> list[str]:
    """A sentence on how many of the winner's runs, one for each seed of the random load, meet the SLO. Empty: all
    runs meet the SLO, none does, or the verdict is about single request classes.
    """
    study, winner = found
    if winner.is_of_classes:
        return []
    runs = study[winner.winner].replications
    meeting = sum(run.slos[SLO].meets for run in runs)
    if meeting in {0, len(runs)}:
        return []
    return [f"Chance decides whether '{winner.winner}' meets the SLO: {meeting} of {len(runs)} random loads."]


def _others_at_ends(found: Judged, ends: Mapping[str, Judged]) -> list[str]:
    """Sentences on the answers with the fastest and the slowest step times (`ends`, by "fastest" and "slowest"), where
    these differ from the answer `found`.
    """
    return [f"at the {END[end]} end, {_said(one.verdict)}" for end, one in ends.items() if not one.holds(found)]


def _measurement(found: Judged, at: Callable[[Changes], Judged]) -> Measurement | None:
    """The measurement that would settle the answer. It covers each group of step times that alone can change the
    answer. If no single group can, it covers all groups that were not measured. None: all were measured. at: answers
    the question with changed step times.
    """
    study, changes = found.study, found.study.arm(found.verdict.winner).changes
    return deciding_measurement(study.trials, changes, lambda group: all(at(changed).holds(found) for changed in group))


def _agreed(found: Judged, ends: Mapping[str, Judged], others: Sequence[str], measure: Measurement | None) -> list[str]:
    """Returns a sentence that says whether the answers with the fastest and with the slowest step times (`ends`) agree
    with the answer `found`. Empty: there is no range. others: a text for each answer of `ends` that differs from
    `found`. measure: what to measure in order to decide between them.
    """
    if others:
        return [f"The predicted range does not decide the answer: {'; '.join(others)}. {measure or ''}".rstrip()]
    return [f"The answer is '{found.verdict.winner}' at both ends of the predicted range, too."] if ends else []


def _if_one_layout_is_slow(found: Judged, asked: Question, ends: Mapping[str, Judged]) -> list[str]:
    """A sentence that warns if another candidate wins as soon as the winner has the slowest step times of its range and
    all others have the fastest. Candidates with the winner's layout (GPUs and parallel sizes) do not count. Empty: the
    winner still wins, the answer differs already at one end of the range, or there is no range. ends: results with the
    fastest and with the slowest step times.
    """
    winner, layouts = found.verdict.winner, found.study.layouts
    if any(not one.holds(found) or winner not in one.study.labels() for one in ends.values()) or not ends:
        return []
    mixed = ends["fastest"].study.with_result_of(winner, ends["slowest"].study)
    other = _judged(mixed, asked.verdict(mixed)).winner
    if other == winner or layouts(other) == layouts(winner):
        return []
    overlap = f"The ranges of '{winner}' and '{other}' overlap"
    return [f"{overlap}: which of the two layouts is better is not known if the errors of their step times differ."]


def _confidence(
    found: Judged, chance: Sequence[str], held: Sequence[str], others: Sequence[str], ends: Mapping[str, Judged]
) -> Confidence:
    if chance:
        return Confidence("low", " ".join(chance))
    scenario = found.study.trials.scenario(found.study.arm(found.verdict.winner).changes)
    if ends and not scenario.foreign_setup:
        where = f"The answer differs within the predicted range: {'; '.join(others)}." if others else " ".join(held)
        return Confidence("low" if others else "medium", f"{NOT_MEASURED} {where}")
    return confidence_in_numbers(scenario, has_range=bool(ends))


def _said(verdict: Verdict) -> str:
    return f"'{verdict.winner}'" if verdict.advice else f"nothing meets the SLO, and '{verdict.winner}' is the nearest"


def _judged(study: Study, verdict: Verdict) -> Verdict:
    """Returns the verdict, changed if the recommended candidate misses the SLO. The changed verdict recommends the best
    candidate that meets the SLO. If no candidate meets the SLO, the changed verdict recommends none, and names the
    candidate that comes nearest to the SLO. A verdict that recommends nothing, or is about some classes of requests,
    keeps its winner, and gets a note if the winner misses the SLO.
    """
    chosen = verdict.winner
    if study.meets(chosen):
        return verdict
    if verdict.is_of_classes or not verdict.advice:
        whose = "Over all classes, " if verdict.is_of_classes else ""
        return verdict._replace(notes=[f"{whose}'{chosen}' misses the SLO: {_missed(study, chosen)}.", *verdict.notes])
    best = study.best(study.labels(study.arm(chosen).series))
    notes = [f"Without the SLO the answer is '{chosen}': {verdict.why}", *verdict.notes]
    if study.meets(best):
        shares = [share(study.attained(label)) for label in (best, chosen)]
        why = f"{shares[0]} of the requests meet the SLO, {shares[1]} with '{chosen}'."
        return Verdict(best, f"Use '{best}'", why, notes)
    return Verdict(best, "", f"Nothing here meets the SLO. The nearest is '{best}': {_missed(study, best)}.", notes)


def _missed(study: Study, label: str) -> str:
    """Text on the terms of the SLO that the candidate `label` misses, with values and limits, and on the share of
    failed requests. For a saturated candidate: the share of requests that meet the SLO.
    """
    if study[label].is_saturated:
        return f"{share(study.attained(label))} of the requests meet the SLO, and the cluster cannot take the load"
    judged = study[label].judgement(SLO)
    found = judged.lacks
    found += [
        f"{one.name} is {one.value_text} (limit {one.limit_text})"
        for one in judged.details
        if not one.is_met and isfinite(one.value)
    ]
    if failed := study.failed_share(label):
        found.append(f"{share(failed)} of them failed")
    if len(found) == len(judged.missed) and any(term.is_share and len(term.limits_ms) > 1 for term in judged.missed):
        found.append("enough requests meet each limit, but not all limits together")
    return "; ".join(found)


def _answer(name: str, question: Question, study: Study, verdict: Verdict, ends: Mapping[str, Judged]) -> Answer:
    changes = study.arm(verdict.winner).changes
    scenario = study.trials.scenario(changes)
    result = simulate(scenario, Observation(levels=True))
    return Answer(
        name=name,
        asks=question.asks,
        load=_load(study),
        winner=verdict.winner,
        is_recommended=bool(verdict.advice),
        text=f"{verdict.advice}: {verdict.why}" if verdict.advice else verdict.why,
        notes=(*verdict.notes, *_default_router(study, scenario), _alone(study, changes), *_errors(study)),
        warnings=tuple(study.warnings),
        limit=None if result.stall else _limit(study, verdict.winner),
        run=result,
        percentiles={metric: f"p{study.slo.percentile_of(metric):.4g}" for metric in ("ttft", "tpot")},
        axis=next((arm.axis for arm in study.arms if arm.axis), question.axis),
        columns=question.columns,
        limits=_limits(study, verdict.winner, ends),
        as_good=_as_good(study, verdict),
        rows=tuple(
            _row(question, study, arm.label, [one.study for one in ends.values()])
            for arm in sorted(study.arms, key=place_of)
        ),
    )


def _limits(study: Study, label: str, ends: Mapping[str, Judged]) -> list[list[str]]:
    """Rows of a table with the SLO's limits and the values of the candidate `label`. ends: results with the fastest and
    slowest step times, which give each value a range. If `ends` is empty, or the candidate has no result in one of
    them, the values have no range.
    """
    at_ends = [one.study for one in ends.values()]
    known = at_ends if all(label in one.labels() for one in at_ends) else []
    return limit_rows(study[label].judgement(SLO).listed, [one[label].judgement(SLO).listed for one in known])


def _as_good(study: Study, verdict: Verdict) -> list[str]:
    """Labels of other candidates that meet the SLO, and whose goodput and mean latency are not told apart from the
    winner's (Estimate.is_told_apart). Empty: there are none, nothing is recommended, the verdict is about some classes
    of requests, or candidates were run only once.
    """
    winner = verdict.winner
    if not verdict.advice or verdict.is_of_classes or len([*study[winner].replications, *study[winner].repeats]) == 1:
        return []
    others = study.steady(study.labels(study.arm(winner).series))
    return [
        label
        for label in others
        if label != winner
        and study.meets(label)
        and not study.goodput_ratio(label, winner).is_told_apart
        and not study.ratio(label, winner, "mean_e2e_latency_ms").is_told_apart
    ]


def _default_router(study: Study, scenario: Scenario) -> list[str]:
    """A note that the router is the default. Empty: the question varies a setting of the router, each role has a single
    instance, or the scenario or the user named a router.
    """
    is_varied = any(field.startswith("router") for arm in study.arms for field in arm.changes)
    most_instances = max(servers.instances for servers in scenario.roles.values())
    if is_varied or most_instances == 1 or study.base.names("router"):
        return []
    router = component_name(scenario.router.prefill)
    return [f"The scenario names no router: {router}, the default, is used."]


def _limit(study: Study, label: str) -> Limit:
    """The resource that limits the latency with the least headroom, of the candidate `label`. If the candidate is
    saturated, or meets the SLO in a closed loop: the resource that limits its throughput.
    """
    judged, changes = study[label].judgement(SLO), study.arm(label).changes
    is_served = study.meets(label) and isinstance(study.trials.scenario(changes).client, ClosedLoop)
    by_throughput = is_served or study[label].is_saturated
    return study.trials.limit(changes, None if by_throughput else judged.worst_percentile)


def _errors(study: Study) -> list[str]:
    """One line for each reason why candidates have no result, with the labels of the candidates."""
    arms = defaultdict(list)
    for arm in study.arms:
        arms[study.error(arm.label)].append(arm.label)
    return [f"No result: {', '.join(labels)}: {error}" for error, labels in arms.items() if error]


def _row(question: Question, study: Study, label: str, ends: Sequence[Study]) -> AnswerRow:
    remark = ""
    if study.error(label):
        remark = "no result"
    elif study[label].is_saturated:
        remark = SATURATED
    elif failed := study.failed_share(label):
        remark = f"{failed:.1%} failed"
    elif not study.meets(label):
        remark = "misses SLO"
    estimates = {name: COLUMNS[name].value(study, label) for name in question.columns}
    arm = study.arm(label)
    at_ends = [one for one in ends if label in one.labels()]
    if not ends or len(at_ends) < len(ends):
        return AnswerRow(label, arm.changes, arm.x, estimates, remark)
    values = {name: [value, *(COLUMNS[name].value(one, label) for one in at_ends)] for name, value in estimates.items()}
    known = {name: [one.mean for one in found if one is not None] for name, found in values.items()}
    ranges = {name: (min(found), max(found)) for name, found in known.items() if len(found) == 1 + len(ends)}
    return AnswerRow(label, arm.changes, arm.x, estimates, remark, ranges)


def _alone(study: Study, changes: Changes) -> str:
    """Sentence for a cluster whose requests are sent one at a time. If requests miss the SLO even so: says that more
    instances do not help. If not: gives the median TTFT and TPOT in ms. changes: changes of the scenario that make the
    cluster.
    """
    requests = requests_alone(study.trials, changes)
    judged = study.slo.judge_requests(requests)
    if not judged.meets:
        lacks = " and ".join(judged.lacks)
        return f"Infeasible even with one request at a time: {lacks}. More instances do not help."
    done = [r for r in requests if r.outcome == "finished"]
    found = {"TTFT": [ttft_ms(r) for r in done], "TPOT": [tpot_ms(r) for r in done if r.num_output_tokens > 1]}
    medians = [f"{what} {number(median(ms))} ms" for what, ms in found.items() if ms]
    return f"One request at a time: median {', '.join(medians)}. Longer times are due to contention."


def _load(study: Study) -> str:
    scenario = study.base.scenario
    prefill, decode = scenario.pair
    gpus = " and ".join(dict.fromkeys((prefill.gpu, decode.gpu)))
    sizes = " and ".join(dict.fromkeys((f"TP{prefill.tp}", f"TP{decode.tp}")))
    first = study.labels()[0]
    inputs, outputs = study.mean_tokens("total_input_tokens"), study.mean_tokens("total_output_tokens")
    runs = len(study[first].replications)
    cluster = f"{scenario.model} on {scenario.num_gpus} {gpus} with {sizes}"
    load = f"{_requests(study, first)} of {inputs:,.0f} tokens in and {outputs:,.0f} out on average, {study.base.pace}"
    load += warm_up_text(scenario.client, _num_sent(study, first))
    repeats = len(study[first].repeats)
    chance = f", and {repeats} with messages up to {max(JITTERS):.0%} faster or slower for ±" if repeats else ""
    return f"{cluster}; {load}; SLO: {study.slo}; {counted(runs, 'run')} of each{chance}."


def _num_sent(study: Study, label: str) -> int:
    row = study[label].replications[0].row
    return int(row["completed"] + row["failed"] + row["unfinished"] + (row.get("warm_up_requests") or 0))


def _requests(study: Study, label: str) -> str:
    """Says how many requests were sent to the candidate `label`, and for a shortened trace which part was used."""
    count, workload = _num_sent(study, label), study.base.scenario.workload
    lines = trace_lines(workload.path) if getattr(workload, "num_requests", None) and hasattr(workload, "path") else 0
    return (
        f"the first {count:,} requests of a trace of {lines:,} lines," if lines > count else counted(count, "request")
    )
