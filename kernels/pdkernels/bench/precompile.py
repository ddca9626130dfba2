"""Compiles many kernels at once, in several processes, so that Triton's cache on disk has them."""

import multiprocessing
import os
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch

from pdkernels.launch import Launcher

Job = tuple[Callable[..., None], tuple[Any, ...]]
"""A function of a module that compiles a kernel, and its arguments."""


def precompile(jobs: Iterable[Job]) -> None:
    """Runs every job once, in several processes, which compiles the job's kernels. Kernels in Triton's cache on disk
    are not compiled again.
    """
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(16, os.cpu_count() or 1)) as workers:
        for _ in workers.imap_unordered(_run, list(jobs), chunksize=4):
            pass


def compile_launcher(module: str, kernel: str, constants: dict[str, Any], warps: int, parameters: int) -> None:
    """Compiles a kernel that is launched through a Launcher. module: name of the kernel's module. kernel: name of the
    kernel. constants, warps: as for Launcher. parameters: number of run-time parameters.
    """
    Launcher(getattr(import_module(module), kernel), constants, warps).compile(torch.device("cuda", 0), parameters)


def _run(job: Job) -> None:
    function, arguments = job
    function(*arguments)
