"""Append: writes the K and V of new tokens of one layer into their slots, in one launch.

The kernel does the same as reference.append_reference. It reads and writes each new byte once: 2 * tokens * heads *
head_dim elements, far fewer than the attention that follows reads.
"""

import torch
import triton
import triton.language as tl

from pdkernels.addressing import plane_pointer, words
from pdkernels.launch import Launcher, wait_for_earlier
from pdkernels.layout import UNIT_BYTES

_LAUNCHERS: dict[tuple[int, ...], Launcher] = {}


@triton.jit(do_not_specialize=("key_pages", "value_pages", "slots", "keys", "values", "key_stride", "value_stride"))
def append_kernel(
    key_pages: tl.int64,
    value_pages: tl.int64,
    slots: tl.int64,
    keys: tl.int64,
    values: tl.int64,
    key_stride: tl.int64,
    value_stride: tl.int64,
    ROW: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    UNITS: tl.constexpr,
):
    wait_for_earlier()
    token = tl.program_id(0)
    slot = tl.load(slots.to(tl.pointer_type(tl.int32)) + token)
    if slot >= 0:
        unit = tl.arange(0, UNITS)
        live = unit < ROW
        within = (unit // HEAD) * (PAGE * HEAD) + unit % HEAD  # PAGE is 1 for NHD: heads lie side by side
        page = (slot // PAGE).to(tl.int64) * (PAGE * ROW * 16) + (slot % PAGE) * (HEAD * 16)
        source, target = words(unit), words(within)
        key = tl.load(plane_pointer(keys + token * key_stride) + source, mask=live[:, None])
        value = tl.load(plane_pointer(values + token * value_stride) + source, mask=live[:, None])
        tl.store(plane_pointer(key_pages + page) + target, key, mask=live[:, None])
        tl.store(plane_pointer(value_pages + page) + target, value, mask=live[:, None])


def append(
    key_pages: torch.Tensor, value_pages: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Writes new K and V to their slots. A CUDA graph can capture the call.

    Args: key_pages, value_pages: the planes of one layer, NHD [slots, heads, head_dim] or HND [pages, heads, page_size,
    head_dim]. slots: int32 [tokens], page * page_size + position in the page; a negative slot is padding and is
    skipped. keys, values: [tokens, heads, head_dim] in the dtype of the pages, contiguous, except that tokens may have
    gaps between them.

    Raises:
        ValueError: a shape, stride or dtype does not fit.

    """
    tokens, heads, head_dim = keys.shape
    page_size = key_pages.shape[2] if key_pages.dim() == 4 else 1
    head_bytes = head_dim * keys.element_size()
    for new, plane in ((keys, key_pages), (values, value_pages)):
        if (
            new.shape != keys.shape
            or new.dtype != plane.dtype
            or plane.shape[1] != heads
            or plane.shape[-1] != head_dim
        ):
            raise ValueError(f"{list(new.shape)} {new.dtype} does not fit pages {list(plane.shape)} {plane.dtype}")
        if new.stride()[1:] != (head_dim, 1) or head_bytes % UNIT_BYTES or not plane.is_contiguous():
            raise ValueError(
                f"heads must be contiguous, of a multiple of {UNIT_BYTES} bytes, not strides {new.stride()}"
            )
        if (new.data_ptr() | new.stride(0) * new.element_size()) % UNIT_BYTES:
            raise ValueError(f"tokens must begin at multiples of {UNIT_BYTES} bytes")
    if slots.dtype != torch.int32 or slots.shape != (tokens,) or not slots.is_contiguous():
        raise ValueError(f"slots must be contiguous int32 [{tokens}], not {slots.dtype} {list(slots.shape)}")
    if tokens == 0:
        return
    head = head_bytes // UNIT_BYTES
    key = (heads * head, head, page_size)
    launch = _LAUNCHERS.get(key)
    if launch is None:
        constants = {
            "ROW": heads * head,
            "HEAD": head,
            "PAGE": page_size,
            "UNITS": triton.next_power_of_2(heads * head),
        }
        launch = _LAUNCHERS[key] = Launcher(append_kernel, constants, warps=4, early=True)
    pointers = key_pages.data_ptr(), value_pages.data_ptr(), slots.data_ptr(), keys.data_ptr(), values.data_ptr()
    size = keys.element_size()
    launch(key_pages.device, (tokens, 1, 1), *pointers, keys.stride(0) * size, values.stride(0) * size)
