"""Kernels that are tested and measured, but that real mode does not use: fp8 on the wire, and captured copies."""

from pdkernels.unused.captured import CapturedCopy
from pdkernels.unused.fp8_wire import fp8_scales, gather_fp8, scatter_fp8

__all__ = ["CapturedCopy", "fp8_scales", "gather_fp8", "scatter_fp8"]
