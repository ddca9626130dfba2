"""Copies within one process: what engines are held against."""

import ctypes

import torch

from pdreal.transports.protocol import Addresses


def copy_ranges(sources: Addresses, targets: Addresses, lengths: Addresses) -> None:
    """Memcpy of each range, all of host memory that this process has mapped."""
    for target, source, length in zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True):
        ctypes.memmove(target, source, length)


class RawCopy:
    """From one tensor to another, on the host or between GPUs."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Raises UnavailableError if this CUDA has no batches of copies."""
        self._stream = None
        if source.device.type == "cuda":
            from pdreal.transports.cuda_runtime import CudaRuntime  # noqa: PLC0415

            self._runtime = CudaRuntime()
            self._stream = torch.cuda.Stream(source.device)
            target.copy_(source)  # opens the way between the two GPUs

    def write(self, address: str, local: Addresses, remote: Addresses, lengths: Addresses) -> None:
        """Returns when the bytes are in place. The address is not looked at: there is no peer."""
        if self._stream is None:
            copy_ranges(local, remote, lengths)
        else:
            self._runtime.copy_batch(local, remote, lengths, self._stream)
            self._stream.synchronize()
