"""How long does a KV transfer take, and how well is that predicted? python experiments/transfer-micro/fit.py

Every row of rows.csv is one measured transfer. Rows of one table and transport are sorted by payload, then number of
descriptors, then time; the first, third, ... are fitted and the others predicted. One fit per transport and machine,
of five forms (FORMS); the table at the end says which form predicts best.
"""

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

HERE = Path(__file__).parent
LOOPBACK = "2 AMD EPYC cores, loopback"
OUT_OF_CACHE = 16 << 20
"""Payload whose source and target together fill the 32 MiB of that machine's last-level cache."""
BASELINES = {"memcpy", "raw-tcp"}
"""Measured beside the engines to compare with them; no engine moves KV this way, so totals leave them out."""
LARGE = 1 << 20
GOAL = 0.15
FEWEST_ROWS = 6
"""A group below this is listed and not fitted: three or four parameters would be read off as many rows."""
LEAST = 1e-9
"""Stands for zero: parameters are fitted as logarithms."""

Floats = NDArray[np.float64]


class Row(NamedTuple):
    """A transfer. Where the number of descriptors is unknown it is 1, so the fixed time carries their cost."""

    table: str
    transport: str
    machine: str
    payload: float
    descriptors: float
    streams: int
    time_us: float

    @property
    def group(self) -> str:
        """What shares one set of parameters. A cache is another link: no single bandwidth describes both sides."""
        cached = self.machine == LOOPBACK and self.payload < OUT_OF_CACHE
        place = self.machine + (", in cache" if cached else "")
        return f"{self.transport} | {place}"


class Group(NamedTuple):
    fitted: list[Row]
    predicted: list[Row]


class Parameters(NamedTuple):
    """Microseconds, microseconds per descriptor, microseconds per byte, and what the form adds."""

    fixed: float
    per_descriptor: float
    per_byte: float
    extra: float


Form = Callable[[Parameters, Floats, Floats], Floats]


def serial(p: Parameters, descriptors: Floats, payload: Floats) -> Floats:
    """Each descriptor is posted, then moved: a + b n + S / B."""
    return p.fixed + p.per_descriptor * descriptors + p.per_byte * payload


def pipelined(p: Parameters, descriptors: Floats, payload: Floats) -> Floats:
    """Posting hides behind moving, or moving behind posting: a + max(b n, S / B)."""
    return p.fixed + np.maximum(p.per_descriptor * descriptors, p.per_byte * payload)


def overlapped(p: Parameters, descriptors: Floats, payload: Floats) -> Floats:
    """A share o of posting runs while bytes move: a + (1 - o) b n + max(o b n, S / B). 0: serial, 1: pipelined."""
    posting = p.per_descriptor * descriptors
    return p.fixed + (1 - p.extra) * posting + np.maximum(p.extra * posting, p.per_byte * payload)


def half(p: Parameters, descriptors: Floats, payload: Floats) -> Floats:
    """The same with o = 1/2 everywhere: three parameters, for a transport of which little is known."""
    return overlapped(p._replace(extra=0.5), descriptors, payload)


def smooth(p: Parameters, descriptors: Floats, payload: Floats) -> Floats:
    """The same with a soft corner, ((b n)^q + (S / B)^q)^(1/q): no mechanism, a bound on what a corner costs."""
    posting, moving = p.per_descriptor * descriptors, p.per_byte * payload
    return p.fixed + (posting**p.extra + moving**p.extra) ** (1 / p.extra)


FORMS: dict[str, Form] = {
    "serial": serial,
    "pipelined": pipelined,
    "half": half,
    "overlapped": overlapped,
    "smooth": smooth,
}
EXTRA: dict[str, tuple[float, ...]] = {
    "serial": (),
    "pipelined": (),
    "half": (),
    "overlapped": (0.0, 0.05, 0.5, 0.95, 1.0),
    "smooth": (1.0, 1.2, 2.0, 6.0, 8.0),
}
"""The fourth parameter, if there is one: lower bound, starts, upper bound."""
WEAK = 0.01
"""Weight of the middle start: it decides where the rows say nothing of the fourth parameter."""
CHOSEN = "overlapped"


def load() -> list[Row]:
    with (HERE / "rows.csv").open(newline="") as file:
        return [
            Row(
                row["table"],
                row["transport"],
                row["machine"],
                float(row["payload_bytes"]),
                float(row["num_descriptors"] or 1),
                int(row["num_threads_or_streams"] or 1),
                float(row["time_us"]),
            )
            for row in csv.DictReader(file)
        ]


def several_threads(row: Row) -> bool:
    """More threads than one on the loopback machine take each other's two cores: not a property of the transport."""
    return row.machine == LOOPBACK and row.streams > 1


def split(rows: Iterable[Row]) -> dict[str, Group]:
    """The halves of every table, gathered by what they share."""
    series: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        series[row.table, row.transport, row.machine].append(row)
    groups: dict[str, Group] = defaultdict(lambda: Group([], []))
    for members in series.values():
        ordered = sorted(members, key=lambda row: (row.payload, row.descriptors, row.time_us))
        for index, row in enumerate(ordered):
            groups[row.group][index % 2].append(row)
    return dict(sorted(groups.items()))


def columns(rows: Sequence[Row]) -> tuple[Floats, Floats, Floats]:
    return (
        np.array([row.descriptors for row in rows]),
        np.array([row.payload for row in rows]),
        np.array([row.time_us for row in rows]),
    )


def separable(rows: Sequence[Row]) -> bool:
    """Whether descriptors can be told from bytes and from the fixed time; if not, their cost is set to zero."""
    descriptors, payload, _ = columns(rows)
    return bool(descriptors.max() > 1 and np.ptp(payload / descriptors) > 0)


def fit(name: str, rows: Sequence[Row]) -> Parameters:
    """Robust least squares on the logarithm of the time, from several starts: relative errors, few outliers."""
    descriptors, payload, time = columns(rows)
    form, free = FORMS[name], separable(rows)
    per_descriptor, per_byte = time / descriptors, time / payload
    lower, *starts, upper = EXTRA[name] or (0.0, 0.0, LEAST)
    highest = [time.max(), per_descriptor.max() if free else 2 * LEAST, per_byte.max()]
    low = np.array([*np.full(3, np.log(LEAST)), lower])
    high = np.array([*np.log(highest), upper])

    def unpack(x: Floats) -> Parameters:
        fixed, each, byte = np.exp(x[:3])
        return Parameters(float(fixed), float(each), float(byte), float(x[3]))

    def residuals(x: Floats) -> Floats:
        relative = np.log(form(unpack(x), descriptors, payload) / time)
        return np.append(relative, WEAK * (x[3] - starts[len(starts) // 2]))

    best, cost = low, np.inf
    for (fixed, each), extra in product(((0.9, 0.05), (0.5, 0.5), (0.1, 0.9)), starts):
        guess = np.log([fixed * time.min(), each * per_descriptor.min(), 0.95 * per_byte.min()])
        x0 = np.clip([*guess, extra], low + LEAST / 4, high - LEAST / 4)
        found = least_squares(residuals, x0, bounds=(low, high), loss="soft_l1", f_scale=0.1)
        if found.cost < cost - LEAST:
            best, cost = found.x, found.cost
    parameters = unpack(best)
    return parameters if free else parameters._replace(per_descriptor=0.0)


def errors(name: str, parameters: Parameters, rows: Sequence[Row]) -> Floats:
    """Predicted over measured, less one."""
    if not rows:
        return np.empty(0)
    descriptors, payload, time = columns(rows)
    return FORMS[name](parameters, descriptors, payload) / time - 1


def print_rows(title: str, half: str, rows: Sequence[Row], relative: Floats) -> None:
    for row, error in zip(rows, relative, strict=True):
        size = f"{row.payload:14,.0f} B {row.descriptors:8,.0f} desc {row.streams:3} streams"
        times = f"measured {row.time_us:12,.1f} us  predicted {row.time_us * (1 + error):12,.1f} us  {error:+7.1%}"
        print(f"{half:9} {size}  {times}  {row.table}  [{title}]")


def describe(parameters: Parameters) -> str:
    bandwidth = 1e-3 / parameters.per_byte
    overlap = f"{parameters.extra:4.2f}" if parameters.per_descriptor else "   -"
    fixed, each = 1e3 * parameters.fixed, 1e3 * parameters.per_descriptor
    return f"a {fixed:9,.0f} ns  b {each:8,.0f} ns  o {overlap}  B {bandwidth:7.2f} GB/s"


def summary(relative: Floats) -> str:
    return (
        f"{np.median(np.abs(relative)):6.1%} {np.max(np.abs(relative)):7.1%}" if relative.size else f"{'-':>6} {'-':>7}"
    )


def mark(group: Group) -> str:
    counts = {row.descriptors for half in group for row in half}
    return "*" if len(counts) == 1 and counts != {1} else " "


def large(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.payload >= LARGE]


def print_fits(groups: Mapping[str, Group], fits: Mapping[str, Parameters]) -> None:
    """Every row, then a line a transport: parameters from the fitted half, errors of the predicted half."""
    lines = []
    for title, group in groups.items():
        fitted, predicted = group
        relative = errors(CHOSEN, fits[title], predicted)
        print_rows(title, "fitted", fitted, errors(CHOSEN, fits[title], fitted))
        print_rows(title, "predicted", predicted, relative)
        far = errors(CHOSEN, fits[title], large(predicted))
        counts = f"{len(fitted):3} +{len(predicted):3}"
        lines.append(f"{title:67}{mark(group)} {counts}  {describe(fits[title])}  {summary(relative)}  {summary(far)}")
    head = f"{'transport | machine':68} {'rows':8}  {'parameters, from the fitted half':54}"
    print(f"\n{head}  predicted half  1 MiB and up")
    print(f"{'':134}  median     max  median     max")
    print("\n".join(lines))
    print("* all rows have the same number of descriptors: a and b are told apart only by how the time bends")


def print_forms(groups: Mapping[str, Group], fits: Mapping[str, Mapping[str, Parameters]]) -> None:
    """Which form to take. Baselines are left out; loopback stands apart, for its noise is that of two shared cores."""
    for place, local in (("networks and NVLink", False), ("loopback", True), ("all", None)):
        print(f"\n{place}: predicted half at 1 MiB and above, by form")
        for name in FORMS:
            parts = [
                np.abs(errors(name, fits[name][title], large(group.predicted)))
                for title, group in groups.items()
                if local in (None, LOOPBACK in title) and title.split(" | ")[0] not in BASELINES
            ]
            parts = [part for part in parts if part.size]
            every = np.concatenate(parts)
            medians = sum(bool(np.median(part) <= GOAL) for part in parts)
            within = f"{np.mean(every <= GOAL):4.0%} of {every.size} rows within {GOAL:.0%}"
            spread = f"median {np.median(every):5.1%}, 90th percentile {np.quantile(every, 0.9):5.1%}"
            print(f"  {name:10} {within}, {spread}; median within it for {medians} of {len(parts)} transports")


def print_presets(groups: Mapping[str, Group]) -> None:
    """Parameters from all rows: for use, where the errors above are for trust."""
    print("\nparameters from both halves:")
    for title, group in groups.items():
        rows = [*group.fitted, *group.predicted]
        parameters = fit(CHOSEN, rows)
        print(f"  {title:67}{mark(group)} {describe(parameters)}  all rows {summary(errors(CHOSEN, parameters, rows))}")


def print_threads(rows: Sequence[Row], fits: Mapping[str, Parameters]) -> None:
    print("\nseveral threads on two cores, predicted as if one thread sent it all (not in any total):")
    for row in rows:
        if row.group in fits:
            print_rows(row.group, "threads", [row], errors(CHOSEN, fits[row.group], [row]))


def print_rest(groups: Mapping[str, Group]) -> None:
    print("\ntoo few rows to fit:")
    for title, (fitted, predicted) in groups.items():
        for row in (*fitted, *predicted):
            rate = row.payload / row.time_us / 1e3
            print(f"  {title:68} {row.payload:14,.0f} B {row.descriptors:6,.0f} desc {rate:7.2f} GB/s")


def main() -> None:
    rows = load()
    groups = split(row for row in rows if not several_threads(row))
    enough = {title: group for title, group in groups.items() if sum(map(len, group)) >= FEWEST_ROWS}
    fits = {name: {title: fit(name, group.fitted) for title, group in enough.items()} for name in FORMS}
    print_fits(enough, fits[CHOSEN])
    print_forms(enough, fits)
    print_presets(enough)
    print_threads([row for row in rows if several_threads(row)], fits[CHOSEN])
    print_rest({title: group for title, group in groups.items() if title not in enough})


if __name__ == "__main__":
    main()
