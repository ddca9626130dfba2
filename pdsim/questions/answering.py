"""From a question to its answer: run the arms, judge, look at the winner once more, and say what limits it."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from pdsim.cost.roofline import Roofline
from pdsim.metrics.limits import limiting_resource
from pdsim.metrics.summary import tpot_ms, ttft_ms
from pdsim.metrics.summary_rows import counted
from pdsim.questions.answer import SATURATED, Answer, Row
from pdsim.questions.asked import NUM_SEEDS, Asked, asked_of
from pdsim.questions.base import base_of
from pdsim.questions.catalog import question
from pdsim.questions.columns import COLUMNS
from pdsim.questions.question import Arm, Question, Verdict, place_of
from pdsim.questions.study import Study
from pdsim.questions.words import number, percent
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import ConfigError
from pdsim.sim.simulation import Observation, simulate
from pdsim.sweeps.design import Changes
from pdsim.sweeps.running import Progress
from pdsim.workload.clients import ClosedLoop


def ask(
    name: str,
    /,
    *,
    changes: Sequence[str] = (),
    seeds: int = NUM_SEEDS,
    jobs: int | None = None,
    out: Path | str | None = None,
    progress: Progress | None = None,
    **asked: Any,
) -> Answer:
    """Answer a question.

    Args:
        name: Of the question; docs/ask.md has them.
        changes: Of the scenario, as "dotted.path=value".
        seeds: Runs of each arm; one of a trace with its own times.
        jobs: Processes; None: one for each CPU; 1: this one.
        out: A folder for answer.md, answer.json and answer.png, and for the sweep behind them; None: nothing is kept.
        progress: Told after each run.
        asked: Cluster, load and SLO: the flags of `pdsim ask`, with underscores.

    Raises ConfigError for wrong arguments and fields, and if no arm is possible.

    """
    with _folder(out) as folder:
        found, study, arms = begin(
            name, folder, changes=changes, seeds=seeds, jobs=jobs, progress=progress, asked=asked_of(asked)
        )
        while arms:
            study.run(arms)
            if not study.labels():
                raise ConfigError(f"{name}: no arm is possible; the first: {study.error(study.arms[0].label)}")
            arms = found.then(study)
        made = _answer(name, found, study, found.verdict(study))
        if out is not None:
            (folder / "answer.md").write_text(made.to_markdown(), encoding="utf-8")
            (folder / "answer.json").write_text(json.dumps(made.to_json(), indent=2), encoding="utf-8")
            made.figure.savefig(folder / "answer.png", dpi=110)
    return made


def begin(
    name: str,
    folder: Path,
    *,
    changes: Sequence[str],
    seeds: int,
    jobs: int | None,
    asked: Asked,
    progress: Progress | None = None,
) -> tuple[Question, Study, list[Arm]]:
    """With the arms to run first; nothing has run yet. Raises ConfigError for what cannot be asked."""
    found = question(name)
    for flag, value in (("--seeds", seeds), ("--jobs", jobs)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} {value}: at least 1")
    base = base_of(asked, folder, tuple(changes), found.defaults)
    return found, Study(base, asked, folder, num_seeds=seeds, jobs=jobs, progress=progress), found.arms(base)


@contextmanager
def _folder(out: Path | str | None) -> Iterator[Path]:
    if out is None:
        with TemporaryDirectory(prefix="pdsim-ask-") as folder:
            yield Path(folder)
    else:
        Path(out).mkdir(parents=True, exist_ok=True)
        yield Path(out)


def _answer(name: str, question: Question, study: Study, verdict: Verdict) -> Answer:
    changes = study.arm(verdict.winner).changes
    result = simulate(study.base.changed(changes), Observation(levels=True))
    concurrency = getattr(result.scenario.client, "concurrency", None)
    return Answer(
        name=name,
        asks=question.asks,
        load=_load(study),
        winner=verdict.winner,
        text=verdict.text,
        notes=(_alone(study, changes), *verdict.notes, *_costs(result.scenario)),
        limit=None if result.stall else limiting_resource(result.records, concurrency),
        run=result,
        axis=question.axis,
        columns=question.columns,
        rows=tuple(_row(question, study, arm.label) for arm in sorted(study.arms, key=place_of)),
    )


def _row(question: Question, study: Study, label: str) -> Row:
    remark = study.error(label)
    if not remark and study[label].is_saturated:
        remark = SATURATED
    elif not remark and (share := study.failed_share(label)):
        remark = f"{share:.1%} of the requests failed"
    elif not remark and not study.meets(label):
        remark = "misses the SLO"
    estimates = {name: COLUMNS[name].value(study, label) for name in question.columns}
    arm = study.arm(label)
    return Row(label, arm.changes, arm.x, estimates, remark)


def _alone(study: Study, changes: Changes) -> str:
    """Whether the SLO is missed without any queue: then no number of instances helps."""
    one: Changes = {**changes, "client": {"use": "closed_loop", "concurrency": 1}}
    done = [r for r in simulate(study.base.changed(one)).records.requests if r.outcome == "finished"]
    ttft, tpot = [ttft_ms(r) for r in done], [tpot_ms(r) for r in done if r.num_output_tokens > 1]
    for what, times_ms, slo_ms in (("TTFT", ttft, study.asked.ttft_ms), ("TPOT", tpot, study.asked.tpot_ms)):
        share = sum(ms <= slo_ms for ms in times_ms) / max(1, len(times_ms))
        if times_ms and share < study.asked.attainment:
            return (
                f"Infeasible: even one at a time, {percent(share)} of the requests have a {what} within {slo_ms:g} ms, "
                f"and the median is {number(median(times_ms))} ms. That is no queue: more instances do not help."
            )
    medians = [f"{what} {number(median(ms))} ms" for what, ms in (("TTFT", ttft), ("TPOT", tpot)) if ms]
    return f"One request at a time: median {', '.join(medians)}. What is more is what requests do to each other."


def _costs(scenario: Scenario) -> list[str]:
    if Roofline() not in {scenario.cost.prefill, scenario.cost.decode}:
        return []
    speeds = "No profile: step times are the roofline's, with kernel speeds that served systems do not always reach"
    return [f"{speeds}. Compare with them; fit a profile to a measured run before trusting absolute numbers."]


def _load(study: Study) -> str:
    scenario, asked = study.base.scenario, study.asked
    prefill, decode = scenario.pair
    gpus = " and ".join(dict.fromkeys((prefill.gpu, decode.gpu)))
    sizes = " and ".join(dict.fromkeys((f"TP{prefill.tp}", f"TP{decode.tp}")))
    rate = getattr(getattr(scenario.client, "arrivals", None), "rate_per_s", None)
    sent = "at their own times" if rate is None else f"{rate:g} a second"
    if isinstance(scenario.client, ClosedLoop):
        sent = f"{scenario.client.concurrency} at a time"
    first = study.labels()[0]
    count = int(study[first].replications[0].row["completed"])
    inputs, outputs = study.mean_tokens("total_input_tokens"), study.mean_tokens("total_output_tokens")
    runs = len(study[first].replications)
    cluster = f"{scenario.model.name} on {scenario.num_gpus} {gpus} with {sizes}"
    load = f"{counted(count, 'request')} of {inputs:,.0f} tokens in and {outputs:,.0f} out in the mean, {sent}"
    slo = f"TTFT {asked.ttft_ms:g} ms and TPOT {asked.tpot_ms:g} ms for {percent(asked.attainment)} of them"
    return f"{cluster}; {load}; SLO: {slo}; {counted(runs, 'run')} of each."
