"""CUDA streams of a rank's threads, which are non-blocking as all of torch's: none works on the default stream.

Engines copy on the default stream, or on streams that wait for it: behind a forward there, a transfer would take as
long as the forward. What one thread leaves to another must be waited for: the host synchronises with the stream first.
"""

import torch

_BEFORE_FORWARDS = -1
"""Priority of streams for copies. torch pools streams by priority, so copies never share the computing stream."""


def compute_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which a rank computes, in all threads."""
    return torch.cuda.Stream(device)


def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream for one thread that copies on a GPU."""
    return torch.cuda.Stream(device, priority=_BEFORE_FORWARDS)


def wait_for_engines(device: torch.device) -> None:
    """Makes the current stream wait for copies of engines, which may report a copy before its end."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))


def synchronize_engines(device: torch.device) -> None:
    """The host waits for what engines copy from here: they need not wait for copies between GPUs."""
    if device.type == "cuda":
        torch.cuda.default_stream(device).synchronize()


def to_host(computed: torch.Tensor) -> torch.Tensor:
    """Copy what the current stream computes, when it has."""
    if not computed.is_cuda:
        return computed
    host, done = begin_to_host(computed)
    done.synchronize()
    return host


def begin_to_host(computed: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    """A copy from a GPU, and the event behind which it is there.

    By way of pinned memory: while a copy to any other waits for the stream, what engines do on the default stream waits
    with it (docs/decisions/0019-real-mode.md).
    """
    host = torch.empty_like(computed, device="cpu", pin_memory=True)
    host.copy_(computed, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(computed.device))
    return host, done
