"""The texts and tables that show a plan, in the order of the terminal's output."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pdsim.metrics.summary_rows import counted, markdown_table, markdown_text
from pdsim.study.planning.plan import Plan, Row
from pdsim.study.space import CandidateCluster
from pdsim.study.verdict.confidence import END, Confidence, by_chance, by_chance_each, confidence, limit_rows, range_of
from pdsim.study.verdict.outcome import SATURATED, Outcome

_MOST_TERMS = 2
"""Maximum number of the SLO's limits for which the table of clusters has a column. A further table shows all limits."""


class TextTable(NamedTuple):
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def money(price: float, currency: str) -> str:
    """Writes a price with its currency: "$12.50", "12.50 EUR"."""
    return f"{price:,.2f} {currency}" if currency.isalpha() else f"{currency}{price:,.2f}"


def priced(one: CandidateCluster, currency: str) -> str:
    """Names a cluster's GPUs and their price: "5 x H100, $12.50 an hour". Without a currency: the GPUs alone."""
    counts: dict[str, int] = {}
    for server, count in zip(one.servers, one.counts, strict=True):
        counts[server.gpu] = counts.get(server.gpu, 0) + count * server.num_gpus
    if one.encoders.number:
        counts[one.encoders.gpu] = counts.get(one.encoders.gpu, 0) + one.encoders.number
    gpus = " + ".join(f"{count} x {gpu.upper()}" for gpu, count in counts.items())
    return f"{gpus}, {money(one.price_per_h, currency)} an hour" if currency else gpus


class Screen:
    """Makes the texts and tables that show a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    @property
    def headline(self) -> str:
        plan = self._plan
        if plan.chosen is None:
            why = "" if plan.lone is None else ": requests miss it even one at a time"
            return f"No cluster of up to {plan.max_gpus} GPUs meets your SLO for {plan.model}{why}"
        return f"Cheapest cluster for {plan.model} that meets your SLO: {self._priced(plan.chosen.candidate)}"

    @property
    def saving(self) -> str:
        """A sentence on the user's own cluster: how the plan's price compares with the price of this cluster, and
        whether this cluster meets the SLO. Empty: the user gave no cluster, one of its GPUs has no price, or no cluster
        meets the SLO.
        """
        plan = self._plan
        if plan.own is None or plan.chosen is None:
            return ""
        own, price = plan.own, plan.chosen.candidate.price_per_h
        saved = 1 - price / own.candidate.price_per_h
        verdict = "meets it" if own.outcome.meets else f"misses it: {own.outcome.shortfall}"
        if not own.is_stable:
            verdict = f"meets it in {own.num_meeting} of {len(own.runs)} runs that differ by chance"
        costs = (
            f"{100 * saved:.0f} % less than"
            if saved > 0
            else "As much as"
            if not saved
            else f"{-100 * saved:.0f} % more than"
        )
        return f"{costs} your {own.candidate.label} ({self._priced(own.candidate)}), which {verdict}."

    @property
    def setting(self) -> str:
        """A sentence on the requests for which the plan was made: their number, lengths, source and sending times."""
        return f"For {self._plan.load}."

    @property
    def words(self) -> str:
        """A sentence on the plan's servers: the number of servers of each role and their GPUs, the cluster's label and,
        if known, the maximum power of all GPUs in kW. Empty: no cluster meets the SLO.
        """
        plan = self._plan
        if plan.chosen is None:
            return ""
        one = plan.chosen.candidate
        names = ["server"] if one.is_aggregated else ["prefill server", "decode server"]
        parts = [
            f"{counted(count, name)} of {counted(server.num_gpus, server.gpu.upper() + ' GPU')}"
            for count, name, server in zip(one.counts, names, one.servers, strict=True)
        ]
        if one.is_aggregated:
            parts[0] += f" that {'prefills and decodes' if one.counts == (1,) else 'prefill and decode'}"
        if one.encoders.number:
            parts.append(f"{counted(one.encoders.number, 'encode server')} of 1 {one.encoders.gpu.upper()} GPU")
        power = "" if one.kw is None else f", at most {one.kw:.1f} kW"
        return f"{' and '.join(parts)}: {one.label}{power}."

    @property
    def limits(self) -> TextTable:
        """The table of the SLO's limits for the planned cluster. Each row has the limit, the predicted value and,
        unless step times were measured on a server, the range of the prediction. If the load can be scaled, a last row
        has the largest multiple of the load that the cluster can take. No rows: no cluster meets the SLO.
        """
        plan = self._plan
        if plan.chosen is None or plan.chosen.outcome.judgement is None:
            return TextTable([], [])
        ends = plan.ends
        chosen = plan.chosen
        rows = limit_rows(chosen.outcome.readings, [one.readings for one in ends.values()])
        if plan.load_factor is not None:
            beyond = f", {plan.breaks}" if plan.breaks else " or more"
            rows.append(["load it can take", "1 x", f"{plan.load_factor:g} x{beyond}", *([""] if ends else [])])
        columns = ["", "limit", "predicted", *(["range: fast to slow servers"] if ends else [])]
        if chosen.repeated and chosen.outcome.is_near:
            columns.insert(3, "by chance")
            for row, band in zip(rows, [*by_chance_each(chosen.runs), ""], strict=False):
                row[2] = row[2].replace(", ", ",\n")  # four columns do not fit a terminal otherwise
                row.insert(3, band)
        return TextTable(columns, rows)

    @property
    def confidence(self) -> Confidence:
        """The confidence that the plan meets the SLO, as a word with its reason. Two empty texts: no cluster meets the
        SLO.
        """
        plan = self._plan
        if plan.chosen is None:
            return Confidence("", "")
        if plan.safe is None:
            instead = f"No cluster of up to {plan.max_gpus} GPUs meets the SLO there."
        else:
            instead = f"{plan.safe.candidate.label} ({self._priced(plan.safe.candidate)}) meets the SLO there, too."
        runs = plan.chosen.runs
        foreign, is_measured = plan.foreign_setup, plan.is_measured
        return confidence("The plan", runs, plan.ends, foreign_setup=foreign, is_measured=is_measured, instead=instead)

    @property
    def clusters(self) -> TextTable:
        """The table of clusters: the plan first, followed by the alternatives, the cheapest first."""
        plan = self._plan
        terms = plan.slo.terms[:_MOST_TERMS]
        rows = []
        for row in plan.rows:
            readings = {} if row.outcome.judgement is None else row.outcome.judgement.readings
            values = [readings[term].value_text if term in readings else "" for term in terms]
            price = [money(row.candidate.price_per_h, plan.currency)] if plan.currency else []
            is_plan = plan.chosen is not None and row.candidate == plan.chosen.candidate
            last = "the plan" if is_plan else self.why_not(row)
            rows.append([row.candidate.label, str(row.candidate.num_gpus), *price, *values, last])
        costs = ["an hour"] if plan.currency else []
        return TextTable(["cluster", "GPUs", *costs, *map(str, terms), "why not"], rows)

    def why_not(self, row: Row) -> str:
        """Says in a few words why the plan was preferred to this alternative. If there is no plan: how the alternative
        misses the SLO.
        """
        plan = self._plan
        yours = "yours: " if plan.own is not None and row.candidate == plan.own.candidate else ""
        if not row.is_stable:
            runs = f"{row.num_meeting} of {1 + len(row.repeated)} runs meet the SLO"
            return f"{yours}unstable: {runs}, one misses: {row.outcome.shortfall}"
        if not row.outcome.meets:
            return yours + row.outcome.shortfall + _band(row)
        if plan.chosen is None:
            return yours
        if row.candidate.price_per_h == plan.chosen.candidate.price_per_h:
            return f"{yours}same price, {self._headroom(row, plan.chosen)}"
        if row.candidate.price_per_h < plan.chosen.candidate.price_per_h:
            return f"{yours}costs less; the search did not try it"
        if plan.safe is not None and row.candidate == plan.safe.candidate:
            return f"{yours}costs more; meets the SLO on slow servers"
        return f"{yours}costs more, more headroom" if row in plan.faster else f"{yours}costs more"

    def _headroom(self, row: Row, chosen: Row) -> str:
        """Text that compares the headroom (distance to the SLO's limits) of another cluster at the plan's price with
        that of the plan's cluster. A cluster of Plan.others with more headroom at typical step times has less with the
        slowest step times, by which the plan was chosen. The user's own cluster, if it is not in Plan.others, was not
        simulated with the slowest step times. row: the other cluster. chosen: the plan's cluster.
        """
        ratio, ratios = row.outcome.ratio, [one.ratio for one in chosen.runs]
        if ratio > max(ratios):
            return "less headroom"
        if ratio >= min(ratios):
            return "equal headroom within chance"
        is_compared = any(row.candidate == other.candidate for other in self._plan.others)
        return "less headroom on slow servers" if is_compared else "more headroom with typical step times"

    @property
    def failing(self) -> list[str]:
        """Sentences that say what happens if a server fails, one for each role. Empty: no cluster meets the SLO."""
        plan = self._plan
        if plan.chosen is None:
            return []
        found = []
        for role, count in plan.chosen.candidate.numbers.items():
            name = "server" if role == "aggregated" else f"{role} server"
            if count == 1:
                what = "no image or audio clip is encoded" if role == "encode" else "nothing is served"
                found.append(f"One {name}: if it is lost, {what}.")
            elif role in plan.lost:
                lost = plan.lost[role]
                then = "the SLO is still met" if lost.meets else lost.shortfall
                found.append(f"1 of {count} {name}s lost: {then}.")
        return found

    @property
    def asked(self) -> list[str]:
        """Sentences that answer --check and --speedup. Empty: neither option was given."""
        plan = self._plan
        found = [] if plan.checked is None else [f"On the other trace (--check): {_found(plan.checked)}."]
        for factor, row in plan.loads.items():
            cheapest = f"no cluster of up to {plan.max_gpus} GPUs meets the SLO"
            if row is not None:
                cheapest = f"{row.candidate.label}, {self._priced(row.candidate)}"
            found.append(f"At {factor:g} times this load: {cheapest}.")
        return found

    @property
    def details(self) -> list[str]:
        """Sentences that the terminal shows only with --details, such as the number of simulated clusters, and the
        plan's numbers with one server less and with the fastest and slowest step times.
        """
        plan = self._plan
        found = [f"{plan.num_tried} of {counted(plan.num_candidates, 'cluster')} simulated; SLO: {plan.slo}."]
        found += [] if plan.lone is None else [f"{plan.lone}."]
        if plan.chosen is not None:
            found += _attained(plan.chosen.outcome)
            found.append(by_chance(plan.chosen.runs))
        found += [
            f"{row.candidate.label}: {row.outcome.lack}; {row.limit}." for row in plan.nearest if row.limit is not None
        ]
        found += [f"With one {role} server less: {_found(outcome)}." for role, outcome in plan.lost.items()]
        found += [f"At the {END[end]} end of the range: {_found(outcome)}." for end, outcome in plan.ends.items()]
        return found if plan.measure is None else [*found, str(plan.measure)]

    def _priced(self, one: CandidateCluster) -> str:
        return priced(one, self._plan.currency)

    def to_markdown(self) -> str:
        limits, clusters, confidence = self.limits, self.clusters, self.confidence
        parts = [f"**{markdown_text(self.headline)}**", self.saving, self.setting, self.words]
        parts += [markdown_table(limits.columns, limits.rows)] if limits.rows else []
        if self._plan.chosen is not None:
            parts.append(f"Confidence: {confidence.word}. {confidence.reason}")
        parts += [markdown_table(clusters.columns, clusters.rows), *self.failing]
        parts.append("\n".join(f"- {markdown_text(one)}" for one in (*self.asked, *self.details)))
        return "\n\n".join(part for part in parts if part) + "\n"

    def to_json(self) -> dict[str, Any]:
        """The content of plan.json, which includes the texts that the terminal shows."""
        plan = self._plan
        return {
            "headline": self.headline,
            "saving": self.saving,
            "setting": self.setting,
            "words": self.words,
            "model": plan.model,
            "load": plan.load,
            "currency": plan.currency,
            "slo": str(plan.slo),
            "terms": [str(term) for term in plan.slo.terms],
            "candidates": plan.num_candidates,
            "tried": plan.num_tried,
            "confidence": {"word": self.confidence.word, "reason": self.confidence.reason},
            "measure": None if plan.measure is None else plan.measure._asdict(),
            "if_a_server_fails": self.failing,
            "details": [*self.asked, *self.details],
            "limits_table": self.limits,
            "price": "" if plan.chosen is None else money(plan.chosen.candidate.price_per_h, plan.currency),
            "busiest": plan.busiest,
            "plan": None if plan.chosen is None else plan.chosen.to_json(),
            "alternatives": [{**row.to_json(), "why_not": self.why_not(row)} for row in plan.alternatives],
            "load_factor": plan.load_factor,
            "breaks": plan.breaks,
            "loads": {f"{factor:g}": None if row is None else row.to_json() for factor, row in plan.loads.items()},
            "lost": {role: outcome.to_json() for role, outcome in plan.lost.items()},
            "ends": {end: outcome.to_json() for end, outcome in plan.ends.items()},
            "safe": None if plan.safe is None else plan.safe.to_json(),
            "own": None if plan.own is None else plan.own.to_json(),
            "checked": None if plan.checked is None else plan.checked.to_json(),
            "lone": None if plan.lone is None else plan.lone.to_json(),
        }


def _attained(outcome: Outcome) -> list[str]:
    """One sentence in a list: the share of requests that meet all limits of the SLO, in total and for each class, and
    the goodput. Empty: the outcome has no such share.
    """
    if outcome.attained is None:
        return []
    of_classes = ", ".join(f"{name or 'no class'} {one.share:.2%}" for name, one in outcome.classes.items())
    classes = f" ({of_classes})" if of_classes else ""
    share, rate = f"{outcome.attained.share:.2%}", f"{outcome.attained.goodput_per_s:.4g}"
    return [f"{share} of the requests{classes} are within all limits: {rate} requests/s."]


def _band(row: Row) -> str:
    """For the SLO's limit that the cluster exceeds most: text with the smallest and the largest simulated value over
    the cluster's runs. Empty: the cluster was run once or is saturated, all runs gave the same value, or the limit is
    on a share of requests.
    """
    judged = row.outcome.judgement
    if not row.repeated or judged is None or row.outcome.reason == SATURATED or judged.worst.is_share:
        return ""
    runs = [one.judgement.readings[judged.worst] for one in row.runs if one.judgement is not None]
    text = range_of(sorted(runs, key=lambda one: one.value))
    return "" if text == judged.readings[judged.worst].value_text else f" ({text} by chance)"


def _found(outcome: Outcome) -> str:
    """Text with the values of the numbers that the SLO limits, and whether the cluster meets the SLO or is saturated.
    If a run failed or ended early: only the reason why the cluster misses the SLO.
    """
    judged = outcome.judgement
    if judged is None:
        return outcome.reason
    numbers = ", ".join(f"{one.name} {one.value_text}" for one in judged.readings.values())
    if outcome.reason == SATURATED:
        return f"{numbers}; the cluster {SATURATED}"
    return f"{numbers}: {'meets' if outcome.meets else 'misses'} the SLO"
