"""From a question to its answer: run the arms, judge, look at the winner once more, and say what limits it."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pdsim.ask.asked import Asked
from pdsim.ask.base import base_of
from pdsim.ask.columns import COLUMNS, cell
from pdsim.ask.figure import draw
from pdsim.ask.question import Question, Verdict
from pdsim.ask.study import Study
from pdsim.ask.words import number
from pdsim.cost.roofline import Roofline
from pdsim.metrics.limits import Limit, limiting_resource
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import ConfigError
from pdsim.sim.simulation import Observation, simulate
from pdsim.sweeps.design import Changes
from pdsim.workload.clients import ClosedLoop

_ALONE = 16
"""Requests, one after another."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Answer:
    name: str
    asks: str
    load: str
    winner: str
    text: str
    notes: tuple[str, ...]
    limit: Limit | None
    """Of the recommended arm; None: it has no result that says so."""
    rows: tuple[dict[str, Any], ...]
    """One for each arm: what it is, its estimates by column, and what is wrong with it."""
    columns: tuple[str, ...]

    def cells(self, row: dict[str, Any]) -> list[str]:
        return [row["arm"], *(cell(row["estimates"][name]) for name in self.columns), row["remark"]]

    @property
    def titles(self) -> list[str]:
        return ["", *(COLUMNS[name].title for name in self.columns), ""]

    def to_json(self) -> dict[str, Any]:
        limit = None if self.limit is None else {**asdict(self.limit), "relief": self.limit.relief}
        rows = [
            {
                **row,
                "estimates": {
                    name: None if value is None else value._asdict() for name, value in row["estimates"].items()
                },
            }
            for row in self.rows
        ]
        said = {"ask": self.name, "load": self.load, "recommendation": self.winner, "answer": self.text}
        return {**said, "notes": list(self.notes), "limit": limit, "arms": rows}

    def to_markdown(self) -> str:
        lines = [f"# {self.asks}", "", self.load, "", f"**{self.text}**", ""]
        lines += [f"- {note}" for note in self.notes_and_limit()]
        lines += ["", _row(self.titles), _row(["---"] * len(self.titles))]
        return "\n".join([*lines, *(_row(self.cells(row)) for row in self.rows), "", "![](answer.png)", ""])

    def notes_and_limit(self) -> list[str]:
        if self.limit is None:
            return list(self.notes)
        relief = f". More of it: {self.limit.relief}" if self.limit.relief else ""
        return [f"What limits {self.winner}: {self.limit.resource}; {self.limit.evidence}{relief}.", *self.notes]


def answer(
    name: str,
    question: Question,
    asked: Asked,
    *,
    changes: tuple[str, ...] = (),
    out: Path | None = None,
    num_seeds: int = 3,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Answer:
    """Ask it. With out, the folder has answer.md, answer.json and answer.png, and the sweep behind them.

    changes: of the scenario, as --set takes them. Raises ConfigError for wrong flags or fields.
    """
    with _folder(out) as folder:
        base = base_of(asked, Path(folder), changes, question.defaults)
        study = Study(base, asked, Path(folder), num_seeds=num_seeds, jobs=jobs)
        arms = question.arms(base)
        while arms:
            study.run(arms, progress)
            if not study.labels():
                raise ConfigError(f"no way of doing it is possible; the first: {study.error(study.arms[0].label)}")
            arms = question.then(study)
        verdict = question.verdict(study)
        made = _answer(name, question, study, verdict)
        if out is not None:
            (out / "answer.md").write_text(made.to_markdown(), encoding="utf-8")
            (out / "answer.json").write_text(json.dumps(made.to_json(), indent=2), encoding="utf-8")
            draw(question, study, verdict.winner).savefig(out / "answer.png", dpi=110)
    return made


def _folder(out: Path | None) -> AbstractContextManager[Path | str]:
    if out is None:
        return TemporaryDirectory(prefix="pdsim-ask-")
    out.mkdir(parents=True, exist_ok=True)
    return nullcontext(out)


def _answer(name: str, question: Question, study: Study, verdict: Verdict) -> Answer:
    changes = study.arm(verdict.winner).changes
    result = simulate(study.base.changed(changes), Observation(levels=True))
    concurrency = getattr(result.scenario.client, "concurrency", None)
    limit = None if result.stall else limiting_resource(result.records, concurrency)
    notes = [*_infeasible(study, changes), *verdict.notes, *_unmeasured(result.scenario)]
    rows = tuple(_table_row(question, study, arm.label) for arm in study.arms)
    load = _described(study)
    return Answer(
        name, question.asks, load, verdict.winner, verdict.text, tuple(notes), limit, rows, question.columns
    )


def _table_row(question: Question, study: Study, label: str) -> dict[str, Any]:
    point = study[label]
    error = study.error(label)
    missed = "" if error or study.meets(label) else "misses the SLO"
    remark = error or ("saturated" if point.is_saturated else missed)
    estimates = {column: COLUMNS[column].value(study, label) for column in question.columns}
    return {"arm": label, "changes": study.arm(label).changes, "estimates": estimates, "remark": remark}


def _infeasible(study: Study, changes: Changes) -> list[str]:
    """Whether what is missed is missed without any queue: then no number of instances helps."""
    alone: Changes = {**changes, "client": {"use": "closed_loop", "concurrency": 1}}
    if hasattr(study.base.scenario.workload, "num_requests"):
        alone["workload.num_requests"] = _ALONE
    summary = simulate(study.base.changed(alone)).summary()
    ttft, tpot = summary["median_ttft_ms"], summary["median_tpot_ms"]
    for what, alone_ms, slo_ms in (("TTFT", ttft, study.asked.ttft_ms), ("TPOT", tpot, study.asked.tpot_ms)):
        if alone_ms > slo_ms:
            return [
                f"Infeasible: a request that is alone in the cluster already has a {what} of {number(alone_ms)} ms, and "
                f"the SLO is {number(slo_ms)} ms. That is no queue: more instances do not help."
            ]
    return [f"Alone, a request has a TTFT of {number(ttft)} ms and a TPOT of {number(tpot)} ms; what is more is queueing."]


def _unmeasured(scenario: Scenario) -> list[str]:
    if scenario.cost.prefill == Roofline() and scenario.cost.decode == Roofline():
        return [
            "Step times are the roofline's with kernel speeds, not fitted to a measured run: compare, and fit a profile "
            "before trusting absolute numbers."
        ]
    return []


def _described(study: Study) -> str:
    base, scenario = study.base, study.base.scenario
    prefill, decode = scenario.pair
    tps = f"TP{prefill.tp}" if prefill.tp == decode.tp else f"TP{prefill.tp} and TP{decode.tp}"
    gpus = prefill.gpu if prefill.gpu == decode.gpu else f"{prefill.gpu} and {decode.gpu}"
    concurrency = base.concurrency
    rate = getattr(getattr(scenario.client, "arrivals", None), "rate_per_s", None)
    sent = "at its own times" if rate is None else f"{rate:g} a second"
    if isinstance(scenario.client, ClosedLoop):
        sent = f"{concurrency} at a time"
    runs = len(study[study.arms[0].label].replications)
    slo = f"TTFT {study.asked.ttft_ms:g} ms and TPOT {study.asked.tpot_ms:g} ms for {study.asked.attainment:.0%}"
    return (
        f"{scenario.model.name} on {base.num_gpus} {gpus} with {tps}, {_work(study)}, {sent}; SLO: {slo}; "
        f"{runs} run{'s' if runs > 1 else ''} of each."
    )


def _work(study: Study) -> str:
    row = study[study.labels()[0]].replications[0].row
    count = row["completed"] or 1
    tokens = f"{row['total_input_tokens'] / count:,.0f} tokens in and {row['total_output_tokens'] / count:,.0f} out"
    return f"{count:,} requests of {tokens} in the mean"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
