"""CUDA streams for a rank's forwards and copies. The ranks of instances run no forwards on CUDA's default stream,
because some transfer engines copy on the default stream, or on streams that wait for it: a forward on the default
stream would delay each transfer until the forward's end. The streams of this module do not wait for the default stream
(torch makes all streams so). A thread waits for its stream before it passes results to another thread.
"""

import torch

_BEFORE_FORWARDS = -1
"""Priority of copy streams: higher than that of forwards. torch keeps a pool of streams for each priority, so a copy
stream is never also the compute stream.
"""


def compute_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns a new stream, on which a rank then computes in all threads."""
    return torch.cuda.Stream(device)


def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns a stream for one thread that copies on a GPU."""
    return torch.cuda.Stream(device, priority=_BEFORE_FORWARDS)


def wait_for_engines(device: torch.device) -> None:
    """Makes the current stream wait for copies that transfer engines have queued on the default stream, because an
    engine may report a copy before the copy has ended.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))


def synchronize_engines(device: torch.device) -> None:
    """Makes the calling thread wait for copies that engines have queued on this GPU's default stream, because engines
    may return before copies between GPUs end.
    """
    if device.type == "cuda":
        torch.cuda.default_stream(device).synchronize()


def to_host(computed: torch.Tensor) -> torch.Tensor:
    """Returns a copy of `computed` in host memory, after the current stream has computed it. Returns `computed` itself
    if it is not on a GPU.
    """
    if not computed.is_cuda:
        return computed
    host, done = begin_to_host(computed)
    done.synchronize()
    return host


def begin_to_host(computed: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    """Begins a copy from a GPU to the host. Returns the copy, and an event that happens when it is complete.

    The copy goes through pinned memory. A copy to other memory would make work on the default stream wait, including
    engines' copies (docs/decisions/0019-real-mode.md).
    """
    host = torch.empty_like(computed, device="cpu", pin_memory=True)
    host.copy_(computed, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(computed.device))
    return host, done
