"""Does the first call of many kernels at once, in processes of their own, to fill Triton's cache on disk."""

import multiprocessing
import os
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch

from pdkernels.launch import Launcher

Job = tuple[Callable[..., None], tuple[Any, ...]]
"""A function of a module, and its arguments: what to compile."""


def precompile(jobs: Iterable[Job]) -> None:
    """Runs every job. Kernels that the cache has already take little time."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(16, os.cpu_count() or 1)) as workers:
        for _ in workers.imap_unordered(_run, list(jobs), chunksize=4):
            pass


def compile_launcher(module: str, kernel: str, constants: dict[str, Any], warps: int, parameters: int) -> None:
    """Compile a kernel that is launched through a Launcher."""
    Launcher(getattr(import_module(module), kernel), constants, warps).compile(torch.device("cuda", 0), parameters)


def _run(job: Job) -> None:
    function, arguments = job
    function(*arguments)
