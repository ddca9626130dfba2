"""Two repairs to Triton 3.6's interpreter, so that every kernel of this package runs on a CPU.

The interpreter keeps scalars as arrays of one element and makes loop bounds of them with int(array). numpy 2.4 allows
this only for arrays without dimensions. The interpreter also keeps bf16 as 16-bit integers, and its dot product
multiplies them as integers.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter


def repair_interpreter() -> None:
    """Repairs Triton's interpreter, if it is on (TRITON_INTERPRET=1): the bounds of loops, and the dot product of bf16.
    Compiled kernels are not affected.
    """
    if knobs.runtime.interpret:
        _repair_loop_bounds()
        _repair_bf16_dot()


def _repair_loop_bounds() -> None:
    patch = interpreter._patch_lang_tensor

    def patch_and_repair(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_repair


def _repair_bf16_dot() -> None:
    dot = interpreter.InterpreterBuilder.create_dot

    def dot_of_floats(builder: Any, a: Any, b: Any, *more: Any) -> Any:
        return dot(builder, _widened(a), _widened(b), *more)

    interpreter.InterpreterBuilder.create_dot = dot_of_floats


def _widened(operand: Any) -> Any:
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    upper_half = operand.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(upper_half.view(np.float32), tl.float32)
