"""Makes the controls of the page that `pdsim serve` shows, and computes the results for the values that the user
chooses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from pdsim.metrics.explanation.stages import AGGREGATED_STAGES, STAGES, after_encoding
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.loading import Changes
from pdsim.scenario.sections.component import ROUTING_POLICIES, describe_component
from pdsim.scenario.sections.servers import DecodeSettings, PrefillSettings, Split
from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.base import Base
from pdsim.study.points.engine import Work
from pdsim.study.servers import Server, label_of
from pdsim.study.space import cluster, kilowatts, needs_staging, price_per_h
from pdsim.study.trials import Trials
from pdsim.study.verdict.confidence import by_chance
from pdsim.study.verdict.outcome import SATURATED, outcome_of
from pdsim.study.verdict.readings import Times
from pdsim.study.verdict.slo import Slo, Term
from pdsim.system.catalog import names
from pdsim.web.choice import MOST_INSTANCES, Choice, Part
from pdsim.web.command import shortest_command
from pdsim.web.load import Load, load_of, whole_part

_METRICS = {
    "TTFT mean": ("mean_ttft_ms", "ms"),
    "TPOT mean": ("mean_tpot_ms", "ms"),
    "ITL p99": ("p99_itl_ms", "ms"),
    "requests/s": ("request_throughput", ""),
    "output tokens/s": ("output_throughput", ""),
}
"""Numbers that the page shows: for each title, the field of the summary, and the unit."""
_TP = (1, 2, 4, 8)
MOST_KEPT = 200
"""If more runs than this number are kept, the next answer first forgets all of them. Runs are kept so that a choice
that was made before needs no new run.
"""
_LOADS = {
    "client.concurrency": ("requests in flight", (1, 512)),
    "client.arrivals.rate": ("requests/s", (0.1, 200)),
    "workload.speedup": ("speed-up of the trace", (0.1, 10)),
}
_WEIGHT_TYPES = ("bf16", "fp8", "fp4", "int4")
_KV_TYPES = ("bf16", "fp8", "fp4")


class Board:
    """The content of the page of `pdsim serve`: the controls for cluster and load of a scenario, and the numbers of the
    cluster that the user chose.
    """

    def __init__(self, base: Base, work: Work, slo: Slo, prices: Mapping[str, float], num_requests: int) -> None:
        """base: the scenario. work: computes the runs. slo: judges the runs until the user chooses another. prices:
        price of one hour of each GPU, by name. num_requests: number of requests to simulate until the user chooses
        another number; if the scenario has fewer, all of them.
        """
        self._base = base
        self._work = work
        self._slo = slo
        self._prices = prices
        whole = whole_part(base)
        self._own_part = replace(whole, count=min(whole.count, num_requests))
        self._load = self._own_load = load_of(base, self._own_part)
        self._trials = Trials(self._load.base, slo, 1, work)
        slo.require_classes(self._load.requests)

    def controls(self) -> dict[str, Any]:
        """The content of the page's controls, by name: the possible values of each control, such as "models", "gpus",
        "tp" or "routers"; the scenario's own data types and router, which the page offers as first option ("own"); the
        slider of the load ("load"); and the values that the controls have when the page opens ("now").
        """
        scenario, part = self._base.scenario, self._own_part
        prefill, decode = scenario.pair
        router = (describe_component(scenario.router.prefill), describe_component(scenario.router.decode))
        return {
            "scenario": scenario.name,
            "models": names("models"),
            "weight_types": _WEIGHT_TYPES,
            "kv_types": _KV_TYPES,
            "gpus": names("gpus"),
            "tp": _TP,
            "most_instances": MOST_INSTANCES,
            "routers": ROUTING_POLICIES,
            "own": {
                "weight_dtype": scenario.weight_dtype or "checkpoint",
                "kv_dtype": scenario.kv_dtype,
                "router": " / ".join(dict.fromkeys(one["use"] for one in router)),
            },
            "load": _slider(self._own_load),
            "now": {
                "model": scenario.model,
                "weight_dtype": None,
                "kv_dtype": None,
                "kind": "separate",
                "prefill": self._fitting(prefill),
                "decode": self._fitting(decode),
                "aggregated": self._fitting(decode),
                "radix": decode.radix_cache,
                "router": None,
                "load": None,
                "trace": part.trace,
                "first": part.first,
                "count": part.count,
                "slo": str(self._slo),
                "prices": dict(self._prices),
            },
        }

    def _fitting(self, settings: PrefillSettings | DecodeSettings) -> dict[str, Any]:
        """Values for the controls of a server ("gpu", "tp", "instances"): those of the scenario's server, but with at
        most MOST_INSTANCES instances. If the model does not fit: the next larger TP size of the page at which the model
        fits, or the server's own if there is none. Without a scenario file, a GPU without a price is replaced by the
        first GPU with a price.
        """
        is_priced = settings.gpu in self._prices or self._base.of_starter is None
        gpu = settings.gpu if is_priced else next(iter(self._prices), settings.gpu)
        tp = next((tp for tp in _TP if tp >= settings.tp and self._fits(Server(gpu, Split(tp)))), settings.tp)
        return {"gpu": gpu, "tp": tp, "instances": min(settings.instances, MOST_INSTANCES)}

    def _fits(self, server: Server) -> bool:
        try:
            resolve(self._base.changed(cluster(self._base, (server, server), (1, 1))))
        except ConfigError:
            return False
        return True

    def answer(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Simulates the cluster with the load that the user chose, and judges the run by the chosen SLO. Returns the
        content of the page, by field: among others "cluster", "stages", "command", "price_per_h" and the fields of
        `_results`. chosen: the value of each control. Raises ConfigError if a chosen value is wrong, a trace cannot be
        read, or the simulation fails, for example because the model does not fit.
        """
        choice, part = Choice.of(chosen), Part.of(chosen)
        load = self._load if part == self._load.part else load_of(self._base, part)
        choice.slo.require_classes(load.requests)
        lacks_itl = choice.slo.needs_own_itl and not self._trials.slo.needs_own_itl
        if load is not self._load or lacks_itl:
            self._trials.forget_beyond(0)
            self._load, self._trials = load, Trials(load.base, choice.slo, 1, self._work)
        base = load.base
        changes = _changes(base, choice)
        self._trials.forget_beyond(MOST_KEPT)
        scenario = base.changed(changes)
        ends = replace(base, scenario=scenario).ends
        row, *others = [
            rows[0] for rows in self._trials.whole_runs([changes, *({**changes, **end} for end in ends.values())])
        ]
        if row["status"] != "ok":
            raise ConfigError(row["message"])
        stages = STAGES if scenario.aggregated is None else AGGREGATED_STAGES
        if scenario.encode is not None:
            stages = after_encoding(stages)
        staged = ", staged" if "network.staging" in changes else ""
        return {
            "part": str(self._load),
            "load": _slider(load),
            "cluster": label_of(choice.servers, choice.counts, names_gpu=True) + staged,
            "stages": [
                {"stage": name, "meaning": meaning, "ms": row[f"mean_{name}_ms"] or 0.0}
                for name, (_, _, meaning) in stages.items()
            ],
            "command": shortest_command(base, changes, str(choice.slo)),
            **_costs(choice, scenario.num_gpus),
            **_results(choice.slo, row, others),
            "chance": self._chance(choice.slo, changes, row),
        }

    def _chance(self, slo: Slo, changes: Changes, row: Mapping[str, Any]) -> str:
        """A sentence if the verdict on the SLO depends on chance: this run, and runs with slightly lower and higher
        message latency, give different verdicts. Empty: the verdicts are equal, or the worst number (furthest above its
        limit, or nearest below) is not near its limit. row: the results of the run with `changes`.
        """
        own = outcome_of([row], slo)
        if not own.is_near:
            return ""
        jitters = self._load.base.jittered
        extremes = [{**changes, **jitter} for jitter in (jitters[0], jitters[-1])]
        runs = [own, *(outcome_of(rows, slo) for rows in self._trials.whole_runs(extremes))]
        return "" if len({one.meets for one in runs}) == 1 else f"The verdict depends on chance. {by_chance(runs)}"


def _slider(load: Load) -> dict[str, Any] | None:
    """The slider that sets the load: its "title", its "range" (least, most), and the load that the scenario, or the
    trace that the user chose, has itself ("now"). None: the load cannot be scaled.
    """
    if load.base.load is None:
        return None
    path, now = load.base.load
    title, limits = _LOADS[path]
    return {"title": title, "range": limits, "now": now}


def _changes(base: Base, choice: Choice) -> Changes:
    """Changes of the base scenario that make the chosen cluster and load. Raises ConfigError if the cluster is
    impossible, or if the load is outside the range of the slider.
    """
    kinds = {"model": choice.model, "weight_dtype": choice.weight_dtype, "kv_dtype": choice.kv_dtype}
    changes: dict[str, Any] = {name: value for name, value in kinds.items() if value is not None}
    is_aggregated = len(choice.servers) == 1
    if not is_aggregated:
        changes["decode.radix_cache"] = choice.radix
    if choice.router is not None:
        changes["router"] = _router(base, choice.router, is_aggregated=is_aggregated)
    if choice.load is not None and base.load is not None:
        least, most = _LOADS[base.load[0]][1]
        if (
            isinstance(choice.load, bool)
            or not isinstance(choice.load, int | float)
            or not least <= choice.load <= most
        ):
            raise ConfigError(f"load: expected a number from {least:g} to {most:g}")
        changes |= base.with_load(choice.load) if choice.load != base.load[1] else {}
    found = {**cluster(base, choice.servers, choice.counts), **changes}
    return {**found, "network.staging": {}} if needs_staging(base, base.changed(found)) else found


def _router(base: Base, policy: str, *, is_aggregated: bool) -> Any:
    """The scenario's router settings, with this policy for all roles. is_aggregated: True: for aggregated servers."""
    kept = ("shedding",) if is_aggregated else ("shedding", "disaggregation")
    others = {name: one for name in kept if (one := getattr(base.scenario.router, name)) is not None}
    if not others:
        return policy
    roles = ("prefill",) if is_aggregated else ("prefill", "decode")
    return {**dict.fromkeys(roles, policy), **{name: describe_component(one) for name, one in others.items()}}


def _costs(choice: Choice, num_gpus: int) -> dict[str, Any]:
    is_priced = all(server.gpu in choice.prices for server in choice.servers)
    return {
        "gpus": num_gpus,
        "price_per_h": price_per_h(choice.prices, choice.servers, choice.counts) if is_priced else None,
        "kw": kilowatts(choice.servers, choice.counts),
    }


def _results(slo: Slo, row: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of a run, by field: counts of requests ("requests", "lost"), a "warning" on saturation, each term of
    the SLO ("slo"), and "metrics". others: rows of the runs with the fastest and slowest step times, which give ranges.
    """
    known = [row, *(other for other in others if other["status"] == "ok")]
    return {
        "requests": row["completed"],
        "lost": row["failed"] + row["unfinished"],
        "warning": f"The cluster {SATURATED}." if row["saturated"] else "",
        "slo": [_of_term(term, [row, *others]) for term in slo.terms],
        "metrics": [
            {"title": title, "unit": unit, "values": [one[name] for one in known]}
            for title, (name, unit) in _METRICS.items()
        ],
    }


def _of_term(term: Term, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One term of the SLO as the page shows it: the "goal" as text, its "values" and their "unit", and whether each run
    meets the goal ("met"). A run that failed has no value and does not meet the goal. None as value: infinite. rows:
    results of the run, then results with the fastest and with the slowest step times.
    """
    readings = [term.reading(Times.of_row(row)) for row in rows if row["status"] == "ok"]
    values = [one.value if isfinite(one.value) else None for one in readings]
    are_met = [*(one.is_met for one in readings), *(False for _ in rows[len(readings) :])]
    return {"goal": term.goal, "values": values, "unit": readings[0].unit, "met": are_met}
