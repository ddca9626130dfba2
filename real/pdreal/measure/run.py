"""Measures this machine, one kind of rows after another, and writes all rows into one file."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from pdreal.measure.forwards import Case, Followers, RankedModel, forward_rows
from pdreal.measure.plan import Plan
from pdreal.measure.rows import KINDS, Kind, Provenance, Row, RowFile, describe
from pdreal.measure.serving import message_row, serving_rows
from pdreal.measure.storage import storage_rows
from pdreal.measure.transfers import copy_rows, transfer_rows
from pdreal.model.parallel import TensorParallel
from pdreal.settings.host import LaunchError
from pdreal.settings.model import MOST_VERIFIED_TOKENS, ModelConfig, ModelError, from_catalog
from pdreal.settings.options import Options, RealA2a
from pdreal.transports.protocol import UnavailableError
from pdsim.scenario.yaml_file import ConfigError, did_you_mean
from pdsim.system.catalog import CatalogError

_OF_RANKS: tuple[Kind, ...] = ("prefill", "decode", "host")
"""Kinds of rows that can be measured with several ranks per instance."""
_RANKS = 2
"""Number of instances in a run: one for prefill, one for decode. Each has `tp` ranks. Forwards and copies are measured
with the CPU threads that a rank of a run gets."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    model: ModelConfig
    options: Options
    page_size: int
    """Number of tokens of a page."""
    tp: int
    """Number of ranks of an instance."""
    ep: int
    """Expert-parallel size: tp if each rank holds whole experts, otherwise 1."""
    moe_a2a_backend: RealA2a
    """deepep: ranks send tokens to the ranks of their experts. none: every rank has all tokens."""
    kinds: tuple[Kind, ...]
    """Kinds of rows to measure."""
    plan: Plan
    """Shapes to measure."""
    rounds: int
    """Number of rounds. Each round measures every shape, with repeats, and gives one row or more for the shape."""
    draft_tokens: int = 1
    """Number of tokens of each request that decode steps verify. 1: there are no drafts."""

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.options.dtype)
        return dtype

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.options.device == "cuda" else torch.device("cpu")

    def rows(self, left_out: Callable[[str], None]) -> Iterator[Row]:
        """Yields rows as they are measured. left_out: called with a text for each shape, kind or transfer engine that
        cannot be measured here, and the reason.

        Each round repeats all measurements. If the machine is slow for a while, only a few shapes of one round are
        slow, and the fit of `pdsim calibrate` follows the other rounds.
        """
        torch.set_num_threads(self.options.threads_of_rank(_RANKS * self.tp))
        for _ in range(self.rounds):
            yield from self._round(left_out)

    def _round(self, left_out: Callable[[str], None]) -> Iterator[Row]:
        yield from self._forward_rows(left_out)
        copies = [kind for kind in self.kinds if kind in {"gather", "scatter"}]
        if copies and self.model.latent is not None:
            left_out(f"{', '.join(copies)}: models with latent KV are not staged")
        elif copies:
            yield from copy_rows(
                copies,
                self.model,
                self.device,
                self.dtype,
                self.page_size,
                self.plan.copied_pages,
                self.plan.seconds,
            )
            _release_memory(self.device)
        if "transfer" in self.kinds:
            sizes, descriptors = self.plan.transferred_bytes, self.plan.descriptors
            yield from transfer_rows(self.device, sizes, descriptors, self.plan.seconds, left_out, self.options.hosts)
        if "storage" in self.kinds:
            yield from self._storage_rows(left_out)
        if "host" in self.kinds:
            yield message_row(self.options.hosts)
            yield from serving_rows(
                self.model.name,
                self.options,
                self.page_size,
                self.tp,
                self.ep,
                self.plan,
                left_out,
                moe_a2a_backend=self.moe_a2a_backend,
                draft_tokens=self.draft_tokens,
            )

    def _storage_rows(self, left_out: Callable[[str], None]) -> Iterator[Row]:
        counts, seconds = self.plan.stored_pages, self.plan.seconds
        try:
            yield from storage_rows(self.model, self.device, self.dtype, self.page_size, counts, seconds, left_out)
        except (UnavailableError, LaunchError) as missing:
            left_out(f"storage: {missing}")

    def _forward_rows(self, left_out: Callable[[str], None]) -> Iterator[Row]:
        cases: list[Case] = []
        if "prefill" in self.kinds:
            cases += self.plan.prefill
            if self.device.type == "cuda":
                cases += self.plan.sustained
        if "decode" in self.kinds:
            cases += self.plan.decode
        if not cases:
            return
        ranked = RankedModel(
            config=self.model,
            dtype=self.dtype,
            device_type=self.device.type,
            tp=self.tp,
            has_whole_experts=self.ep > 1,
            sends_to_experts=self.moe_a2a_backend != "none",
        )
        with Followers(ranked) as followers:
            model = followers.model
            seconds, num_verified = self.plan.seconds, self.draft_tokens
            yield from forward_rows(model, self.page_size, cases, seconds, left_out, followers, num_verified)
        del followers, model
        _release_memory(self.device)


def _release_memory(device: torch.device) -> None:
    """Gives the GPU memory that torch's allocator keeps unused back to the GPU, for other processes and for allocations
    outside torch.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measurement(
    model: str,
    options: Options,
    page_size: int,
    tp: int,
    ep: int,
    only: str | None,
    plan: Plan,
    rounds: int,
    draft_tokens: int = 1,
    moe_a2a_backend: RealA2a = "none",
) -> Measurement:
    """Makes a measurement from flags. model: name in the catalog. only: kinds, separated by commas; None: as for
    `_kinds`. Raises ConfigError for wrong flags, or LaunchError if this machine has too few GPUs. The other arguments
    are the fields of Measurement.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise LaunchError("--device cuda: torch sees no GPU here")
    kinds = _kinds(only, KINDS if tp == 1 else _OF_RANKS)
    if options.device == "cuda" and tp > 1:
        needed, found = tp * (_RANKS if "host" in kinds else 1), torch.cuda.device_count()
        if needed > found:
            raise LaunchError(f"--tp {tp}: each rank needs a GPU, so {', '.join(kinds)} need {needed}, found {found}")
    if page_size < 1:
        raise ConfigError(f"--page-size: expected at least 1 token, found {page_size}")
    try:
        config = from_catalog(model)
    except (ModelError, CatalogError) as wrong:
        raise ConfigError(f"--model: {wrong}") from None
    if draft_tokens > MOST_VERIFIED_TOKENS:
        raise ConfigError(f"--draft-tokens: at most {MOST_VERIFIED_TOKENS}, found {draft_tokens}")
    if draft_tokens > 1 and (config.llama.window_layers or (config.latent and options.device == "cuda")):
        raise ConfigError(f"--draft-tokens: {config.name} has sliding windows or latent KV, beside which none draft")
    if ep not in (1, tp):
        raise ConfigError(f"--ep: expected 1 or all {tp} ranks of an instance, found {ep}")
    if moe_a2a_backend != "none" and ep == 1:
        sizes = f"--ep {tp}" if tp > 1 else "--tp 2 --ep 2"
        where = f"{config.name} has none" if config.experts is None else f"give {sizes}"
        raise ConfigError(f"--moe-a2a-backend {moe_a2a_backend}: tokens are sent to whole experts only; {where}")
    try:
        TensorParallel(0, tp, has_whole_experts=ep > 1).check(config)
    except ModelError as wrong:
        raise ConfigError(f"{'--ep' if ep > 1 else '--tp'}: {wrong}") from None
    return Measurement(
        model=config,
        options=options,
        page_size=page_size,
        tp=tp,
        ep=ep,
        moe_a2a_backend=moe_a2a_backend,
        kinds=kinds,
        plan=plan,
        rounds=rounds,
        draft_tokens=draft_tokens,
    )


def _kinds(only: str | None, possible: tuple[Kind, ...]) -> tuple[Kind, ...]:
    """Returns the kinds of measurements that `only` names, a text such as "prefill,decode". If `only` is None: all
    possible kinds except storage. possible: kinds that the number of ranks allows. Raises ConfigError if `only` names
    another kind.
    """
    if only is None:
        return tuple(kind for kind in possible if kind != "storage")
    asked = [word.strip() for word in only.split(",")]
    for word in asked:
        if word not in KINDS:
            raise ConfigError(f"--only: no kind {word!r}{did_you_mean(word, KINDS)}; there are {', '.join(KINDS)}")
        if word not in possible:
            raise ConfigError(f"--only: {word} is measured with one rank only; --tp allows {', '.join(possible)}")
    return tuple(kind for kind in possible if kind in asked)


def measure(measurement: Measurement, out: Path, tell: Callable[[str], None]) -> int:
    """Makes all measurements. Each row is written when it is measured. tell: called with a line of text about each row
    and each shape left out. Returns the number of rows. Raises ConfigError if the file cannot be written.
    """
    provenance = Provenance.here(
        measurement.model.name,
        measurement.device,
        measurement.options.dtype,
        measurement.page_size,
        measurement.tp,
        measurement.ep,
        measurement.moe_a2a_backend,
    )
    try:
        file = RowFile(out, provenance)
    except OSError as error:
        raise ConfigError(f"--out: {out}: {error.strerror}") from None
    with closing(file):
        for row in measurement.rows(lambda what: tell(f"left out: {what}")):
            file.write(row)
            tell(describe(row))
        return file.num_rows
