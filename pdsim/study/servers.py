"""The servers of a cluster, and the cluster's name, which lists them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pdsim.scenario.sections.servers import Split


class Server(NamedTuple):
    """GPU and parallel sizes of all servers of one role."""

    gpu: str
    """Name of the GPU in the catalog."""
    split: Split
    """Parallel sizes of each server."""

    @property
    def num_gpus(self) -> int:
        return self.split.num_gpus


def label_of(roles: Sequence[Server], counts: Sequence[int], *, names_gpu: bool) -> str:
    """Name of a cluster, such as "3P1D of TP4 on h100". roles: the servers of each role. counts: number of servers of
    each role; empty: the name has no numbers, and stands for all clusters of these servers. names_gpu: True: the name
    has the GPU. If the roles have different GPUs, the name always has the GPU of each role.
    """
    letters = ("P", "D") if len(roles) == 2 else (" aggregated",)  # noqa: PLR2004
    numbers: Sequence[Any] = counts or ("",) * len(roles)
    counted = [f"{number}{letter}" for number, letter in zip(numbers, letters, strict=True)]
    parts = [f"{number} of {server.split.words}" for number, server in zip(counted, roles, strict=True)]
    gpus = list(dict.fromkeys(server.gpu for server in roles))
    if len(gpus) > 1:
        return ", ".join(f"{part} on {server.gpu}" for part, server in zip(parts, roles, strict=True))
    if len({server.split for server in roles}) == 1:
        parts = [f"{''.join(counted)} of {roles[0].split.words}"]
    return ", ".join(parts) + (f" on {gpus[0]}" if names_gpu else "")
