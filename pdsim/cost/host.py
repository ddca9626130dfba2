"""What the loop of a prefill instance itself takes, on its CPU."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    start_ns: int = 0
    """From the choice of a forward to its first kernel, on a GPU that waits for it."""
    launch_ns: int = 0
    """The loop launches a forward for so long and sees no result meanwhile."""
    result_ns: int = 0
    """Taking in the result of a forward."""
    send_ns: int = 0
    """Handing one unit to the transfer workers, one after another."""

    @property
    def are_none(self) -> bool:
        return self == HostCosts()
