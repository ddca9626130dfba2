"""Choices of the page, and the answers to them."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from pdsim.metrics.explain import AGGREGATED_STAGES, STAGES
from pdsim.scenario.component import ROUTING_POLICIES
from pdsim.scenario.loading import Changes
from pdsim.scenario.servers import DecodeSettings, PrefillSettings, Split
from pdsim.scenario.sizing import resolve
from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.outcome import SATURATED
from pdsim.study.planning.space import Server, cluster, kilowatts, label_of, needs_staging, price_per_h
from pdsim.study.planning.trials import Trials
from pdsim.study.questions.base import ROUTERS, Base
from pdsim.study.readings import Times
from pdsim.study.slo import Term
from pdsim.study.tasks import described
from pdsim.system.catalog import names

_METRICS = {
    "TTFT mean": ("mean_ttft_ms", "ms"),
    "TPOT mean": ("mean_tpot_ms", "ms"),
    "ITL p99": ("p99_itl_ms", "ms"),
    "requests/s": ("request_throughput", ""),
    "output tokens/s": ("output_throughput", ""),
}
"""Fields of a summary, and their units."""
_TP = (1, 2, 4, 8)
MOST_INSTANCES = 16
MOST_KEPT = 200
"""Runs that are kept, so that a choice that comes again is answered at once."""
_LOADS = {
    "client.concurrency": ("requests at once", (1, 512)),
    "client.arrivals.rate": ("requests/s", (0.1, 200)),
    "workload.speedup": ("speed-up of the trace", (0.1, 10)),
}


@dataclass(frozen=True)
class Board:
    """A scenario of which a page changes the cluster and the load."""

    trials: Trials
    prices: Mapping[str, float]
    """Prices of an hour of each GPU, by name; others have none."""

    @property
    def base(self) -> Base:
        return self.trials.base

    def controls(self) -> dict[str, Any]:
        """Choices, and what the scenario has."""
        prefill, decode = self.base.scenario.pair
        load = self.base.load
        return {
            "scenario": self.base.scenario.name,
            "models": names("models"),
            "gpus": names("gpus"),
            "tp": _TP,
            "most_instances": MOST_INSTANCES,
            "routers": ROUTING_POLICIES,
            "load": None if load is None else {"title": _LOADS[load[0]][0], "range": _LOADS[load[0]][1]},
            "slo": str(self.trials.slo),
            "now": {
                "model": self.base.scenario.model,
                "kind": "separate",
                "prefill": self._fitting(prefill),
                "decode": self._fitting(decode),
                "aggregated": self._fitting(decode),
                "radix": decode.radix_cache,
                "router": ROUTERS[0],
                "load": None if load is None else load[1],
            },
        }

    def _fitting(self, settings: PrefillSettings | DecodeSettings) -> dict[str, Any]:
        """An instance as the scenario has it, with the GPUs that the model needs; without a file, priced ones."""
        is_priced = settings.gpu in self.prices or self.base.of_starter is None
        gpu = settings.gpu if is_priced else next(iter(self.prices), settings.gpu)
        tp = next((tp for tp in _TP if tp >= settings.tp and self._fits(Server(gpu, Split(tp)))), settings.tp)
        return {"gpu": gpu, "tp": tp, "instances": min(settings.instances, MOST_INSTANCES)}

    def _fits(self, server: Server) -> bool:
        try:
            resolve(self.base.changed(cluster(self.base, (server, server), (1, 1))))
        except ConfigError:
            return False
        return True

    def answer(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ConfigError if it is no cluster, or none that the model fits."""
        servers, counts = _servers(chosen)
        changes = self._changes(chosen, servers, counts)
        self.trials.forget_beyond(MOST_KEPT)
        scenario = self.base.changed(changes)
        ends = replace(self.base, scenario=scenario).ends
        row, *others = [
            rows[0] for rows in self.trials.whole_runs([changes, *({**changes, **end} for end in ends.values())])
        ]
        if row["status"] != "ok":
            raise ConfigError(row["message"])
        known = [row, *(other for other in others if other["status"] == "ok")]
        is_priced = all(server.gpu in self.prices for server in servers)
        stages = STAGES if scenario.aggregated is None else AGGREGATED_STAGES
        return {
            "requests": row["completed"],
            "lost": row["failed"] + row["unfinished"],
            "gpus": scenario.num_gpus,
            "price_per_h": price_per_h(self.prices, servers, counts) if is_priced else None,
            "kw": kilowatts(servers, counts),
            "cluster": label_of(servers, counts, names_gpu=True) + (", staged" if "network.staging" in changes else ""),
            "warning": f"The cluster {SATURATED}." if row["saturated"] else "",
            "slo": [_of_term(term, [row, *others]) for term in self.trials.slo.terms],
            "metrics": [
                {"title": title, "unit": unit, "values": [one[name] for one in known]}
                for title, (name, unit) in _METRICS.items()
            ],
            "stages": [
                {"stage": name, "meaning": meaning, "ms": row[f"mean_{name}_ms"] or 0.0}
                for name, (_, _, meaning) in stages.items()
            ],
            "command": self._command(changes),
        }

    def _changes(self, chosen: Mapping[str, Any], servers: Sequence[Server], counts: Sequence[int]) -> Changes:
        """Changes of the base scenario."""
        changes: dict[str, Any] = {"model": chosen.get("model"), "router": chosen.get("router")}
        if len(servers) > 1:
            changes["decode.radix_cache"] = chosen.get("radix")
        load = chosen.get("load")
        if self.base.load is not None and load is not None:
            least, most = _LOADS[self.base.load[0]][1]
            if isinstance(load, bool) or not isinstance(load, int | float) or not least <= load <= most:
                raise ConfigError(f"load: a number from {least:g} to {most:g}")
            changes |= self.base.with_load(load)
        found = {**cluster(self.base, servers, counts), **changes}
        return {**found, "network.staging": {}} if needs_staging(self.base, self.base.changed(found)) else found

    def _command(self, changes: Changes) -> str:
        """The same on a command line, which writes a scenario first where there is none."""
        given = [*self.base.changes, *(described({path: value}) for path, value in changes.items())]
        made = self.base.of_starter
        path = str(self.base.path) if made is None else self.base.path.name
        begin = [] if made is None else ["pdsim init", path, *_set(made), "&&"]
        return " ".join([*begin, "pdsim run", shlex.quote(path), "--seed 1", *_set(given)])


def _set(changes: Sequence[str]) -> list[str]:
    return [f"--set {shlex.quote(change)}" for change in changes]


def with_fewer(base: Base, num_requests: int) -> Base:
    """No more requests than that."""
    own = getattr(base.scenario.workload, "num_requests", None)
    if own is not None and own <= num_requests:
        return base
    return base.with_changes({"workload.num_requests": num_requests})


def _servers(chosen: Mapping[str, Any]) -> tuple[list[Server], list[int]]:
    """Servers of each role, and how many. Raises ConfigError."""
    roles = ("aggregated",) if chosen.get("kind") == "aggregated" else ("prefill", "decode")
    try:
        servers = [Server(chosen[role]["gpu"], Split(chosen[role]["tp"])) for role in roles]
        counts = [int(chosen[role]["instances"]) for role in roles]
    except (KeyError, TypeError, ValueError) as wrong:
        raise ConfigError(f"no cluster: {wrong!r}") from None
    if not 1 <= min(counts) <= max(counts) <= MOST_INSTANCES:
        raise ConfigError(f"{counts} instances: from 1 to {MOST_INSTANCES}")
    return servers, counts


def _of_term(term: Term, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What was found of a term; None: too many requests failed for the percentile to have an end."""
    readings = [term.reading(Times.of_row(row)) for row in rows if row["status"] == "ok"]
    values = [one.value if isfinite(one.value) else None for one in readings]
    are_met = [*(one.is_met for one in readings), *(False for _ in rows[len(readings) :])]
    return {"goal": term.goal, "values": values, "unit": readings[0].unit, "met": are_met}
