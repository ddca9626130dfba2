"""Kernels that are tested and measured, and that no path of real mode uses yet: an fp8 wire, captured copies."""

from pdkernels.unused.captured import CapturedCopy
from pdkernels.unused.fp8_wire import fp8_scales, gather_fp8, scatter_fp8

__all__ = ["CapturedCopy", "fp8_scales", "gather_fp8", "scatter_fp8"]
