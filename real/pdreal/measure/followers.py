"""The ranks beside the first, for forwards of several: each a process, which does what the first one is told."""

from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import torch

from pdreal.batches import DecodeBatch, PrefillBatch, Work
from pdreal.model.config import ModelConfig
from pdreal.model.parallel import TensorParallel
from pdreal.model.transformer import Transformer
from pdreal.model.weights import RandomWeights
from pdreal.runner import ModelRunner

_PATIENCE_S = 10
"""For a process that was told to end."""


class Followers:
    """Of one model. A forward is begun on all ranks, as by a leader in a run: told to the others, and then done."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, tp: int) -> None:
        """device: of the first rank; on GPUs each has one of its own."""
        self._folder = TemporaryDirectory()
        self._loading = config, dtype, device.type, tp, f"file://{Path(self._folder.name) / 'ranks'}"
        self._processes, self._pipes = [], []
        context = get_context("spawn")
        for rank in range(1, tp):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_follow, args=(*self._loading, rank, torch.get_num_threads(), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._tell(None)
        if kind is None:
            self._ranks.leave()
        for process in self._processes:
            process.join(_PATIENCE_S if kind is None else 0)
            process.kill()
        self._folder.cleanup()

    def load(self) -> Transformer:
        """The first rank's part of the model. Returns when all ranks have met."""
        model = _load(*self._loading, rank=0)
        self._ranks = model.tp
        return model

    def runner(self, model: Transformer, sizes: Mapping[str, Any]) -> "LedRunner":
        """sizes: of ModelRunner, on every rank."""
        self._tell(dict(sizes))
        return LedRunner(model, sizes, self._tell)

    def _tell(self, what: Work | dict[str, Any] | None) -> None:
        for pipe in self._pipes:
            with suppress(BrokenPipeError):
                pipe.send(what)


class LedRunner(ModelRunner):
    """The first rank's."""

    def __init__(self, model: Transformer, sizes: Mapping[str, Any], tell: Any) -> None:
        super().__init__(model, **sizes)
        self._tell = tell

    def prefill(self, batch: PrefillBatch, on_layers: Any = None) -> list[int]:
        self._tell(batch)
        return super().prefill(batch, on_layers)

    def decode(self, batch: DecodeBatch) -> list[int]:
        self._tell(batch)
        return super().decode(batch)


def _load(
    config: ModelConfig, dtype: torch.dtype, device_type: str, tp: int, rendezvous: str, *, rank: int
) -> Transformer:
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = TensorParallel.join(rank, tp, rendezvous, device)
    return Transformer.load(config, RandomWeights(0, device), dtype=dtype, device=device, tp=ranks)


def _follow(
    config: ModelConfig,
    dtype: torch.dtype,
    device_type: str,
    tp: int,
    rendezvous: str,
    rank: int,
    num_threads: int,
    pipe: Connection,
) -> None:
    """Until it is told to end, or the first rank is gone."""
    torch.set_num_threads(num_threads)
    model = _load(config, dtype, device_type, tp, rendezvous, rank=rank)
    runner: ModelRunner | None = None
    with suppress(EOFError, KeyboardInterrupt):
        while (told := pipe.recv()) is not None:
            if isinstance(told, dict):
                runner = ModelRunner(model, **told)
                with torch.inference_mode():
                    runner.kv.memory.normal_()
            elif runner is not None:
                runner.run(told)
    del runner  # its graphs hold what ranks meet by
    model.tp.leave()
