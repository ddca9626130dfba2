"""The ranks beside the first, for forwards of several: each a process, which does what the first one is told."""

import gc
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import torch

from pdreal.model.config import ModelConfig
from pdreal.model.parallel import TensorParallel
from pdreal.model.transformer import Transformer
from pdreal.model.weights import RandomWeights
from pdreal.runner import ModelRunner
from pdreal.scratch_folder import ScratchFolder
from pdreal.tasks import DecodeBatch, PrefillBatch, Work

_PATIENCE_S = 10
"""Limit for a process that was told to end."""
Told = Work | dict[str, Any] | None
"""A forward, the sizes of a runner, or the end."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A model on several ranks: on GPUs, each on one of its own."""

    config: ModelConfig
    dtype: torch.dtype
    device_type: str
    tp: int

    def load(self, rank: int, rendezvous: str) -> Transformer:
        """A rank's part. Returns when all ranks have met."""
        device = torch.device("cuda", rank) if self.device_type == "cuda" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        ranks = TensorParallel.join(rank, self.tp, rendezvous, device)
        return Transformer.load(self.config, RandomWeights(0, device), dtype=self.dtype, device=device, tp=ranks)


class Followers:
    """A forward is begun on all ranks, as by a leader in a run: sent to the others, and then done."""

    def __init__(self, ranked: Ranked) -> None:
        self._folder = ScratchFolder()
        rendezvous = f"file://{self._folder.path / 'ranks'}"
        self._processes, self._pipes = [], []
        context = get_context("spawn")
        for rank in range(1, ranked.tp):
            ours, theirs = context.Pipe()
            arguments = ranked, rank, rendezvous, torch.get_num_threads(), theirs
            process = context.Process(target=_follow, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self.model = ranked.load(0, rendezvous)
        """The first rank's part."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._tell(None)
        if kind is None:
            gc.collect()  # graphs hold what ranks meet by
            self.model.tp.leave()
        for process in self._processes:
            process.join(_PATIENCE_S if kind is None else 0)
            process.kill()
        self._folder.cleanup()

    def runner(self, sizes: Mapping[str, Any]) -> ModelRunner:
        """The first rank's, whose forwards are everybody's. sizes: of ModelRunner."""
        self._tell(dict(sizes))
        return _LedRunner(self.model, sizes, self._tell)

    def _tell(self, what: Told) -> None:
        for pipe in self._pipes:
            with suppress(BrokenPipeError):
                pipe.send(what)


class _LedRunner(ModelRunner):
    def __init__(self, model: Transformer, sizes: Mapping[str, Any], tell: Callable[[Told], None]) -> None:
        super().__init__(model, **sizes)
        self._tell = tell

    def prefill(self, batch: PrefillBatch, on_layers: Callable[[int], None] | None = None) -> list[int]:
        self._tell(batch)
        return super().prefill(batch, on_layers)

    def decode(self, batch: DecodeBatch) -> list[int]:
        self._tell(batch)
        return super().decode(batch)


def _follow(ranked: Ranked, rank: int, rendezvous: str, num_threads: int, pipe: Connection) -> None:
    """Do what the first rank does until it is told to end, or the first rank is gone."""
    torch.set_num_threads(num_threads)
    model = ranked.load(rank, rendezvous)
    runner: ModelRunner | None = None
    with suppress(EOFError, KeyboardInterrupt):
        while (message := pipe.recv()) is not None:
            if isinstance(message, dict):
                runner = ModelRunner(model, **message)
                with torch.inference_mode():
                    runner.kv.memory.normal_()
            elif runner is not None:
                runner.run(message)
    del runner  # its graphs hold what ranks meet by
    model.tp.leave()
