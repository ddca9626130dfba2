"""Launches a compiled kernel with as little host time as a C call needs.

Triton's own launch binds, types and specialises the arguments on each call, which takes 12 to 14 us on a host with an
H200. Here all run-time arguments are integers (addresses and counts), and kernels specialise on none of them. So one
compilation fits every call.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait
from triton.language.target_info import cuda_capability_geq
from triton.runtime.interpreter import InterpretedFunction

Grid = tuple[int, int, int]
TYPES: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
    torch.float8_e4m3fn: tl.float8e4nv,
}
"""Triton's names of element types, for kernels that get addresses instead of tensors."""


@triton.jit
def wait_for_earlier():
    """Waits until all earlier kernels have ended. A kernel that is set up early may read their results only after this
    call.
    """
    if cuda_capability_geq(9, 0):
        gdc_wait()


def can_begin_early(device: torch.device) -> bool:
    """True if the device can set up a kernel while the kernel before it ends (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


class Launcher:
    """A kernel with its compile-time constants, compiled at the first call on each device.

    Args:
        kernel: its run-time parameters come first, all integers marked do_not_specialize; then its constants.
        constants: values of the kernel's constexpr parameters, in the order of its signature.
        warps: warps of 32 threads per program.
        stages: loads that a loop has under way while it computes.
        early: the kernel calls wait_for_earlier first, so it may be set up while the kernel before it ends.

    """

    def __init__(
        self, kernel: Any, constants: dict[str, Any], warps: int, stages: int = 3, *, early: bool = False
    ) -> None:
        self._kernel = kernel
        self._constants = constants
        self._options = {"num_warps": warps, "num_stages": stages}
        self._early = early
        self._launches: dict[int, Callable[..., None]] = {}

    def __call__(self, device: torch.device, grid: Grid, *integers: int) -> None:
        """Launches the kernel on the device's current stream, or runs it in Triton's interpreter if the device is a
        CPU. grid: number of programs in each dimension. integers: values of the kernel's run-time parameters, in order.
        Raises RuntimeError if the device is a CPU and the interpreter is off.
        """
        if device.type == "cpu":
            self._interpret(grid, integers)
            return
        launch = self._launches.get(device.index) or self.compile(device, len(integers))
        if torch._C._cuda_getDevice() == device.index:
            launch(grid, integers)
        else:
            with torch.cuda.device(device):
                launch(grid, integers)

    def _interpret(self, grid: Grid, integers: tuple[int, ...]) -> None:
        if not isinstance(self._kernel, InterpretedFunction):
            raise RuntimeError(
                "tensors on the CPU need Triton's interpreter: set TRITON_INTERPRET=1 before Python starts"
            )
        self._kernel[grid](*integers, **self._constants)

    def compile(self, device: torch.device, parameters: int) -> Callable[..., None]:
        """Compiles the kernel for a device, or loads it from Triton's cache. parameters: number of run-time parameters.
        Returns the launch: a function of the grid and of the run-time parameters' values.
        """
        options = {**self._options, "launch_pdl": self._early and can_begin_early(device)}
        with torch.cuda.device(device):
            compiled = self._kernel.warmup(*[0] * parameters, grid=(1,), **options, **self._constants)
            run = compiled.run  # loads the binary
        constants = tuple(self._constants.values())
        index, function, metadata = device.index, compiled.function, compiled.packed_metadata
        raw_stream = torch._C._cuda_getCurrentRawStream

        def launch(grid: Grid, integers: tuple[int, ...]) -> None:
            run(*grid, raw_stream(index), function, metadata, None, None, None, *integers, *constants)

        self._launches[device.index] = launch
        return launch
