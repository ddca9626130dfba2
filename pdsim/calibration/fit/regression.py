"""Fits times of steps, transfers and copies by least squares of relative errors; outliers hardly affect the fit. A form
is a sum of terms with coefficients of at least 0. Needs scipy.

Errors are found by holding out whole shapes (rows of similar size), and intervals by a bootstrap over shapes. A
monotone table is also a sum of terms: a first value, and a step from each knot to the next.
"""

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from functools import cached_property, partial
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdsim.calibration.fit.rows import FOUND_IDLE, Columns, Floats, Rows
from pdsim.cost.model import LEAST_TILES
from pdsim.dataclass import dataclass
from pdsim.metrics.summary_rows import counted

Term = Callable[[Columns], Floats]

ABOVE_LEAST = (1.3, 3.0)
"""Two limits that a fit tries, as factors over the smallest time. Rows below a limit are taken to be bound by the
minimum time, rows above by work."""
LEAST_GAIN = 0.05
"""A further effect (tiles, launches, a busy GPU's slowdown) is fitted only if it removes more than this share of the
fit's error."""
STRETCH = "stretch"
"""Column with the factors by which a busy GPU makes forwards longer. Without it, all factors are 1."""
MOST_KNOTS = 16
TILES = (1, 64, 128, 256, 512)
"""Numbers of tokens in a tile of matrix products to try for forwards without CUDA graphs. 1: no tiles."""
WAVES = (1, *(2**k for k in range(6, 12)))
"""Wave sizes to try for forwards in CUDA graphs: attention computes new tokens in whole waves of this number."""


@dataclass(frozen=True)
class Form:
    """A formula for times in ns: the sum of coefficient x term over `terms`, but at least the same sum over `least`.
    terms, least: functions of the rows' columns, by the name of the coefficient. overlap: share of the time of
    posting a transfer's descriptors in which bytes move, too; the longer of the two counts. None: no transfer. knots:
    sizes at which the pieces of a table meet; empty: no table. wave_tokens, tile_tokens: see `prefill_form`.
    """

    name: str
    terms: dict[str, Term]
    shape: tuple[str, ...]
    """Columns that define the shape of a measured row. Rows of one shape are held out together."""
    least: dict[str, Term] = field(default_factory=dict)
    """Terms of the host's time. A forward takes at least their sum, because the host works while the GPU computes."""
    overlap: float | None = None
    knots: tuple[float, ...] = ()
    wave_tokens: int = 1
    tile_tokens: int = 1
    has_free_rows: bool = False
    """True: a CUDA graph's rows without a request count only in per_empty_row_token. False: also as requests."""
    by_ratio: bool = False
    """True: errors are ratios of fit to measurement, so that half and twice the time are equally wrong. False: errors
    are relative to the measured time, so that half the time is less wrong than twice. Times that a client measures may
    vary by a factor within one shape; a fit with False is then near the shortest times."""

    @property
    def parameters(self) -> tuple[str, ...]:
        return (*self.terms, *self.least)

    def design(self, columns: Columns) -> Floats:
        """Matrix (rows, parameters) of the terms' values, which are to be multiplied by the coefficients."""
        stretch = columns.get(STRETCH, 1.0)
        work = [term(columns) * stretch for term in self.terms.values()]
        return np.column_stack([*work, *[term(columns) for term in self.least.values()]])

    def times_ns(self, values: Floats, design: Floats) -> Floats:
        if self.overlap is not None:
            batch, posting, moving = (design * values).T
            return np.asarray(batch + (1 - self.overlap) * posting + np.maximum(self.overlap * posting, moving))
        if self.least:
            work, least = self._sides(values, design)
            return np.asarray(np.maximum(work, least))
        return np.asarray(design @ values)

    def slopes(self, values: Floats, design: Floats) -> Floats:
        """Derivatives of times (rows) by coefficients (columns). values: coefficients. design: result of `design`."""
        if self.overlap is not None:
            batch, posting, moving = design.T
            waits = self.overlap * posting * values[1] > moving * values[2]
            return np.column_stack([batch, posting * (1 - self.overlap + self.overlap * waits), moving * ~waits])
        if self.least:
            work, least = self._sides(values, design)
            is_work = (work > least)[:, None]
            return design * np.where(np.arange(len(values)) < len(self.terms), is_work, ~is_work)
        return design

    def _sides(self, values: Floats, design: Floats) -> tuple[Floats, Floats]:
        num_terms = len(self.terms)
        return design[:, :num_terms] @ values[:num_terms], design[:, num_terms:] @ values[num_terms:]


def prefill_form(rows: Rows, wave_tokens: int = 1, tile_tokens: int = 1) -> Form:
    """A form with a minimum time, otherwise linear in a prefill's tokens, prompts, context tokens, and pairs of a new
    token and a token that it attends to; graphs use another attention kernel, with its own time per pair. wave_tokens:
    in graphs, pairs with the context count new tokens rounded up to a multiple of this. tile_tokens: without graphs, a
    forward of more than LEAST_TILES tiles counts tokens rounded up to a multiple of this. 1: no rounding.
    """
    computed = partial(_computed, tile_tokens=tile_tokens)
    terms: dict[str, Term] = {"base": _one, "per_token": computed, "per_pair": _pairs}
    if rows.columns["graph"].any():
        pairs = partial(_pairs, wave_tokens=wave_tokens)
        terms["per_pair"] = lambda columns: (columns["graph"] == 0) * pairs(columns)
        terms["graph_per_pair"] = lambda columns: (columns["graph"] > 0) * pairs(columns)
    least: dict[str, Term] = {"least": _one}
    if FOUND_IDLE in rows.columns:
        least["launch"] = lambda columns: columns.get(FOUND_IDLE, _one(columns))
    if np.ptp(rows.columns["prompts"]):
        terms["per_prompt"] = _column("prompts")
        if np.ptp(rows.columns["prompts"][_are_short(rows)]):
            least["least_per_prompt"] = _column("prompts")
    if np.ptp(_continued(rows.columns)):
        terms["per_context_token"] = _column("context_tokens")
        terms["per_continued_pair"] = lambda columns: _continued(columns) * _pairs(columns)
        least["least_per_continued_prompt"] = lambda columns: _continued(columns) * columns["prompts"]
    shape = ("new_tokens", "context_tokens", "prompts", "graph")
    return Form("affine", terms, shape, least, wave_tokens=wave_tokens, tile_tokens=tile_tokens)


def decode_form(rows: Rows, *, has_free_rows: bool = False) -> Form:
    size = _batch if has_free_rows else _padded_batch
    terms = {"base": _one, "per_request": size, "per_context_token": _column("context_tokens"), **_empty_rows(rows)}
    return Form("affine", terms, ("batch", "context_tokens"), has_free_rows=has_free_rows)


def prefill_table(rows: Rows, wave_tokens: int = 1, tile_tokens: int = 1) -> Form:
    """A form like `prefill_form`, but a table replaces the base and the time per token: times at some sizes (knots),
    with straight lines between them. Each measured CUDA graph is a knot: forwards that are padded to its size take its
    time, and from one graph to the next the time may jump (experiments/four-h100).
    """
    computed = partial(_computed, tile_tokens=tile_tokens)
    sizes, in_graphs = computed(rows.columns), rows.columns["graph"] > 0
    knots = tuple(sorted({*sizes[in_graphs].tolist(), *_knots(sizes[~in_graphs])}))
    lines = prefill_form(rows, wave_tokens, tile_tokens)
    beyond = {name: term for name, term in lines.terms.items() if name not in {"base", "per_token"}}
    terms = {"first": _one, **_steps(computed, knots), **beyond}
    return replace(lines, name="table", terms=terms, knots=knots)


def best_wave(rows: Rows) -> int:
    """Returns the number to whose multiples attention rounds a forward's new tokens: the one of WAVES with which
    `prefill_table` fits these rows best (misfit). 1: no rounding fits best, or no forward ran in a CUDA graph.
    """

    def error(wave_tokens: int) -> float:
        return misfit(prefill_table(rows, wave_tokens), rows)

    return min(WAVES, key=error) if rows.columns["graph"].any() else 1


def best_tile(rows: Rows) -> int:
    """Number of tokens per tile of matrix products: the one of TILES with which straight lines fit these rows best. 1:
    no tiles reduce the misfit by more than LEAST_GAIN, or some forwards ran in CUDA graphs.
    """
    if rows.columns["graph"].any():
        return 1
    errors = {tokens: misfit(prefill_form(rows, tile_tokens=tokens), rows) for tokens in TILES}
    best = min(TILES, key=errors.__getitem__)
    return best if errors[best] < (1 - LEAST_GAIN) * errors[1] else 1


def misfit(form: Form, rows: Rows) -> float:
    """Fits the form to all these rows, and returns the mean of its absolute relative errors on the same rows."""
    return float(np.abs(_errors(form, _robust(form, rows.columns), rows.columns)).mean())


def decode_table(rows: Rows, *, has_free_rows: bool = False) -> Form:
    """A form like `decode_form`, but with a table of times by _padded_batch, or by _batch with has_free_rows."""
    lines, size = decode_form(rows, has_free_rows=has_free_rows), _batch if has_free_rows else _padded_batch
    knots = _knots(size(rows.columns))
    beyond = {name: term for name, term in lines.terms.items() if name not in {"base", "per_request"}}
    return replace(lines, name="table", terms={"first": _one, **_steps(size, knots), **beyond}, knots=knots)


def transfer_form(overlap: float, rows: Rows) -> Form:
    """The formula for the time of a transfer, which is one batch of descriptors. overlap: as in Form. If all rows have
    the same number of descriptors, the fixed time of a batch includes the time of posting them.
    """
    differ = bool(np.ptp(rows.columns["num_descriptors"]))
    descriptors: Term = _column("num_descriptors") if differ else lambda columns: 0 * columns["num_descriptors"]
    terms = {"batch": _one, "per_descriptor": descriptors, "per_byte": _column("payload_bytes")}
    return Form("transfer", terms, ("payload_bytes", "num_descriptors"), overlap=overlap)


def staging_form(_: Rows) -> Form:
    return Form("affine", {"base": _one, "per_byte": _column("payload_bytes")}, ("payload_bytes",))


def _one(columns: Columns) -> Floats:
    return np.ones_like(columns["time_ns"])


def _column(name: str) -> Term:
    return lambda columns: columns[name]


def _computed(columns: Columns, tile_tokens: int) -> Floats:
    """Number of tokens that each forward computes, with the padding of its graph or, without a graph, of its tiles."""
    new, graph = columns["new_tokens"], columns["graph"]
    whole = np.where(new > LEAST_TILES * tile_tokens, new + -new % tile_tokens, new)
    return np.where(graph > 0, graph, whole)


def _pairs(columns: Columns, wave_tokens: int = 1) -> Floats:
    """Number of pairs of a new token and a token that it attends to, for each row. In pairs with the context, the row's
    new tokens, over all prompts, are rounded up to a multiple of wave_tokens. Prompts are taken to be equally long,
    because rows lack single lengths.
    """
    new, context = columns["new_tokens"], columns["context_tokens"]
    return np.asarray((new * (context + new / 2) + -new % wave_tokens * context) / columns["prompts"])


def _are_short(rows: Rows) -> NDArray[np.bool_]:
    """True for rows whose times are at most ABOVE_LEAST[0] times the shortest: the minimum time may explain them."""
    times_ns = rows.columns["time_ns"]
    return np.asarray(times_ns <= ABOVE_LEAST[0] * times_ns.min())


def _continued(columns: Columns) -> Floats:
    """1 for forwards with context tokens (KV from before the forward), else 0. The 1 stands for all prompts of the
    forward, because rows do not say which prompts have context.
    """
    return np.asarray(columns["context_tokens"] > 0, float)


def _knots(values: Floats) -> tuple[float, ...]:
    """Measured values that become the knots of a table: all, or, if there are more than MOST_KNOTS, the smallest, the
    largest, and values between them at about even distances on a logarithmic scale.
    """
    known = np.unique(values)
    if len(known) > MOST_KNOTS:
        wanted = np.geomspace(max(known[0], 1), known[-1], MOST_KNOTS)
        known = np.unique([known[np.abs(known - value).argmin()] for value in wanted])
    return tuple(float(value) for value in known)


def _batch(columns: Columns) -> Floats:
    """Number of tokens that each decode step computes: its requests times the tokens that each request verifies."""
    return columns["batch"] * columns.get("verified", 1)


def _padded_batch(columns: Columns) -> Floats:
    """Number of tokens that each step computes, including those of its CUDA graph's rows without a request."""
    return np.maximum(columns["batch"], columns.get("graph", 0)) * columns.get("verified", 1)


def _empty_rows(rows: Rows) -> dict[str, Term]:
    """A term for the time of a CUDA graph's rows without a request: KV tokens that these rows would read if each had as
    much KV as the batch's requests have on average. Empty: all rows of all graphs had requests.
    """

    def tokens(columns: Columns) -> Floats:
        return np.asarray(columns["context_tokens"] * (_padded_batch(columns) / _batch(columns) - 1))

    return {"per_empty_row_token": tokens} if tokens(rows.columns).any() else {}


def _steps(size: Term, knots: Sequence[float]) -> dict[str, Term]:
    def climbed(columns: Columns, low: float, high: float) -> Floats:
        most = np.inf if high == knots[-1] else 1
        return np.clip((size(columns) - low) / (high - low), 0, most)

    return {f"to {high:g}": partial(climbed, low=low, high=high) for low, high in pairwise(knots)}


SOFT = 0.03
"""Relative error above which a residual counts by its size instead of by its square."""
LEAST_RATIO = 1e-6
"""Smallest ratio of a fitted to a measured time. Larger than 0, so that logarithms are finite."""
NUM_FOLDS = 5
NUM_SAMPLES = 100
ROWS_OF_SHAPE = 12
"""Maximum number of rows by which a shape is represented in the bootstrap, evenly spread over all rows of the shape."""
INTERVAL = (2.5, 97.5)
"""Percentiles of the bootstrap's coefficients between which an interval lies."""
SHAPES_PER_DOUBLING = 2
"""Number of size classes between a size and its double. Rows of one class, with nearly equal times, are one shape."""


@dataclass(frozen=True)
class FittedForm:
    """A form with fitted coefficients, and its errors on shapes that were held out of the fit."""

    form: Form
    rows: Rows
    values: dict[str, float]
    """The fitted coefficients in ns, in the order of the form's terms."""
    num_shapes: int
    """Number of groups of measured rows with about equal sizes (Form.shape)."""
    held_out: Floats
    """Relative error of each row in a fit without the row's shape (_held_out). Positive: the fit is too high."""

    @cached_property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """Interval of each coefficient in ns. The bootstrap draws whole shapes and not rows, because repetitions of a
        shape have a common error.
        """
        rng = np.random.default_rng(0)
        shapes, num_shapes = _shapes(self.form, self.rows.columns)
        of_shape = [_spread(np.flatnonzero(shapes == shape)) for shape in range(num_shapes)]
        near = np.array(list(self.values.values()))
        samples = []
        for _ in range(NUM_SAMPLES):
            drawn = np.concatenate([of_shape[shape] for shape in rng.integers(num_shapes, size=num_shapes)])
            samples.append(_robust(self.form, self.rows.where(drawn).columns, near))
        low, high = np.percentile(samples, INTERVAL, axis=0)
        return {name: (float(low[i]), float(high[i])) for i, name in enumerate(self.values)}

    def times_ns(self, columns: Columns) -> Floats:
        """The times in ns that the fit gives for these columns."""
        return self.form.times_ns(np.array(list(self.values.values())), self.form.design(columns))

    @property
    def error(self) -> float:
        """Mean of the absolute relative errors of held-out rows."""
        return float(np.abs(self.held_out).mean())

    @property
    def typical_error(self) -> float:
        """Median of the absolute relative errors of held-out rows. A briefly slow machine does not change it."""
        return float(np.median(np.abs(self.held_out)))

    @property
    def error_p90(self) -> float:
        return float(np.percentile(np.abs(self.held_out), 90))

    @property
    def bias(self) -> float:
        """Median relative error of held-out rows. Positive: the fit is too high."""
        return float(np.median(self.held_out))


def fit(form_of: Callable[[Rows], Form], rows: Rows, *, by_ratio: bool = False) -> FittedForm:
    """Fits the form that form_of makes for rows. Raises ValueError if fewer shapes than coefficients are left when
    one of NUM_FOLDS parts is held out. by_ratio: as in Form.
    """

    def chosen(rows: Rows) -> Form:
        return replace(form_of(rows), by_ratio=by_ratio)

    form = chosen(rows)
    shapes, num_shapes = _shapes(form, rows.columns)
    if num_shapes - ceil(num_shapes / NUM_FOLDS) < len(form.parameters):
        raise ValueError(
            f"{counted(num_shapes, 'shape')}, of which some are held out, "
            f"are too few for {len(form.parameters)} coefficients"
        )
    values = _robust(form, rows.columns)
    return FittedForm(
        form,
        rows,
        dict(zip(form.parameters, values.tolist(), strict=True)),
        num_shapes,
        _held_out(chosen, rows, shapes),
    )


def _robust(form: Form, columns: Columns, near: Floats | None = None) -> Floats:
    """Coefficients of a fit that outliers hardly affect. Internally, each coefficient is scaled by the value with which
    its term alone would explain the mean time. near: coefficients that are known to be close. None: the fit starts from
    those of `_starts`, and the result with the smallest cost is returned.
    """
    from scipy.optimize import least_squares  # noqa: PLC0415  an extra

    design, times_ns = form.design(columns), columns["time_ns"]
    size = 1 / np.maximum((design / times_ns[:, None]).mean(axis=0), 1e-300)

    def errors(units: Floats) -> Floats:
        ratios = form.times_ns(units * size, design) / times_ns
        return np.asarray(np.log(np.maximum(ratios, LEAST_RATIO)) if form.by_ratio else ratios - 1)

    def slopes(units: Floats) -> Floats:
        values = units * size
        fitted_ns = np.maximum(form.times_ns(values, design), LEAST_RATIO * times_ns)
        return np.asarray(form.slopes(values, design) * size / (fitted_ns if form.by_ratio else times_ns)[:, None])

    starts = _starts(form, design, times_ns) if near is None else [near]
    robust = {"bounds": (0, np.inf), "loss": "soft_l1", "f_scale": SOFT, "ftol": 1e-6, "xtol": 1e-6, "max_nfev": 40}
    found = [least_squares(errors, np.maximum(start / size, 1e-4), slopes, **robust) for start in starts]
    present = design.any(axis=0)  # what no row has is nothing
    return np.asarray(min(found, key=lambda one: one.cost).x * np.where(present, size, 0.0))


def _starts(form: Form, design: Floats, times_ns: Floats) -> list[Floats]:
    """Coefficients from which a fit starts, by plain least squares. A form with a minimum time has several starts: the
    minimum explains no times, or all short times. A fit does not get from one of these cases to another.
    """
    if not form.least:
        return [_plain(design, times_ns)]
    work, least = design[:, : len(form.terms)], design[:, len(form.terms) :]
    nearly_nothing = np.append(times_ns.min() / 2, np.zeros(len(form.least) - 1))
    starts = [np.append(_plain(work, times_ns), nearly_nothing)]
    for bound in ABOVE_LEAST:
        above = times_ns > bound * times_ns.min()
        if above.any():
            starts.append(np.append(_plain(work[above], times_ns[above]), _plain(least[~above], times_ns[~above])))
    return starts


def _plain(design: Floats, times_ns: Floats) -> Floats:
    return plain_least_squares(design / times_ns[:, None], np.ones(len(times_ns)))


def plain_least_squares(design: Floats, wanted: Floats) -> Floats:
    """The coefficients of at least 0 for which design x coefficients is nearest to `wanted`, by squared errors."""
    from scipy.optimize import nnls  # noqa: PLC0415  an extra

    size = np.maximum(design.mean(axis=0), 1e-300)
    return np.asarray(nnls(design / size, wanted)[0] / size)


def _errors(form: Form, values: Floats, columns: Columns) -> Floats:
    return np.asarray(form.times_ns(values, form.design(columns)) / columns["time_ns"] - 1)


def _shapes(form: Form, columns: Columns) -> tuple[NDArray[Any], int]:
    """Returns the index of each row's shape (shapes are sorted by size), and how many shapes there are. Rows of nearly
    equal sizes have the same shape, unless they run in different CUDA graphs.
    """
    rounded = [np.round(np.log2(1 + columns[name]) * SHAPES_PER_DOUBLING) for name in form.shape if name != "graph"]
    sizes = [*rounded, *[columns[name] for name in form.shape if name == "graph"]]
    distinct, shapes = np.unique(np.column_stack(sizes), axis=0, return_inverse=True)
    return shapes.ravel(), len(distinct)


def _held_out(form_of: Callable[[Rows], Form], rows: Rows, shapes: NDArray[Any]) -> Floats:
    """Relative error of each row in a fit without the row's shape. Each of NUM_FOLDS fits leaves out every NUM_FOLDS-th
    shape, and takes the knots of a table from the other rows.
    """
    errors = np.empty(len(rows))
    for fold in range(NUM_FOLDS):
        out = shapes % NUM_FOLDS == fold
        if out.any():
            others = rows.where(~out)
            form = form_of(others)
            errors[out] = _errors(form, _robust(form, others.columns), rows.where(out).columns)
    return errors


def _spread(rows: NDArray[Any]) -> NDArray[Any]:
    chosen: NDArray[Any] = rows[np.unique(np.linspace(0, len(rows) - 1, ROWS_OF_SHAPE).astype(int))]
    return chosen
