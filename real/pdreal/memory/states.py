"""States of linear-attention layers of one rank, in slots. The leader says which slot holds what (state_slots.py)."""

import zlib
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from pdreal.memory.paged_kv import Digests
from pdreal.settings.model import ModelConfig


class StatePool:
    """The convolution's last inputs and the recurrent state of every linear-attention layer, by slot.

    planes[2 * layer] holds inputs [slots, channels, conv_tokens - 1] of a layer and planes[2 * layer + 1] recurrent
    states [slots, value heads, key_dim, value_dim]. Slot 0 belongs to no state: padding of a batch writes there.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: int,
        *,
        num_slots: int,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        device: torch.device,
        allocate: Callable[[int], Tensor] | None = None,
    ) -> None:
        """config: the model, which must have linear-attention layers. tp: number of ranks that share the layers' heads.
        num_slots: number of slots for states; slot 0 is kept in addition. dtype: type of the convolution's inputs.
        state_dtype: type of recurrent states. allocate: makes memory of the given number of bytes; None: torch
        allocates the memory.
        """
        delta = config.llama.delta
        assert delta is not None
        slots = config.num_state_layers, num_slots + 1
        conv = *slots, delta.num_channels // tp, delta.conv_tokens - 1
        ssm = *slots, delta.num_value_heads // tp, delta.key_dim, delta.value_dim

        def make(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            if allocate is None:
                return torch.zeros(shape, dtype=dtype, device=device)
            return allocate(prod(shape) * dtype.itemsize).view(dtype).view(shape)

        self._conv, self._ssm = make(conv, dtype), make(ssm, state_dtype)
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        """States of retracted requests in host memory, by request."""
        self.planes = [plane for layer in zip(self._conv, self._ssm, strict=True) for plane in layer]

    @property
    def is_cuda(self) -> bool:
        return self._conv.is_cuda

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns the two planes of a layer: the convolution's last inputs, and the recurrent states. layer: index
        among the layers with linear attention.
        """
        return self._conv[layer], self._ssm[layer]

    def save(self, request_id: int, slot: int) -> None:
        self._saved[request_id] = self._conv[:, slot].to("cpu", copy=True), self._ssm[:, slot].to("cpu", copy=True)

    def restore(self, request_id: int, slot: int) -> None:
        """Copies the saved state of a request into a slot, and drops the saved copy."""
        conv, ssm = self._saved.pop(request_id)
        self._conv[:, slot].copy_(conv)
        self._ssm[:, slot].copy_(ssm)

    def forget(self, request_id: int) -> None:
        self._saved.pop(request_id, None)


def digest_of_state(planes: Sequence[Tensor], slot: int, rank: int) -> Digests:
    """Returns the CRC-32 of a rank's part of a state, over all planes (inputs or recurrent states of one layer). Empty:
    there is no state, or slot is 0.
    """
    value = 0
    for plane in planes if slot else ():
        value = zlib.crc32(plane[slot].contiguous().view(torch.uint8).cpu().numpy().data, value)
    return {f"state of rank {rank}": value} if planes and slot else {}
