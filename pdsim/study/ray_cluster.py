"""Computes tasks on a Ray cluster. Its nodes have pdsim installed, and the scenario's files at the same paths."""

import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.compute import Done, compute, crashed
from pdsim.study.plan import Task

_PATIENCE_S = 5.0
_LET_IN = (
    "a cluster that answers but lets nobody in asks for a token (RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
    "~/.ray/auth_token, as on its head) or has another version of Ray or Python"
)


class RayCluster:
    """A cluster by its address, or Ray's own choice: RAY_ADDRESS, or this machine."""

    def __init__(self, address: str | None) -> None:
        try:
            import ray  # noqa: PLC0415  an extra
        except ImportError:
            raise ConfigError("engine ray needs Ray, which is not installed: pip install 'pdsim[ray]'") from None
        self._ray: Any = ray
        if address is not None:
            _check_listens(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except Exception as wrong:  # noqa: BLE001  Ray has many kinds of them
            where = address or os.environ.get("RAY_ADDRESS") or "this machine"
            raise ConfigError(f"engine ray: {where}: {str(wrong).splitlines()[0]}; {_LET_IN}") from None
        self._compute = ray.remote(max_retries=1, num_cpus=1)(compute)

    def run(self, tasks: Sequence[Task]) -> Iterator[Done]:
        """Yields results as they are done."""
        pending = {self._compute.remote(task): task for task in tasks}
        while pending:
            (ready, *_), _ = self._ray.wait(list(pending), num_returns=1)
            task = pending.pop(ready)
            try:
                yield self._ray.get(ready)
            except self._ray.exceptions.RayError as death:
                yield crashed(task, f"twice: {str(death).splitlines()[0]}")

    def close(self) -> None:
        self._ray.shutdown()


def _check_listens(address: str) -> None:
    """Ray itself takes minutes to say that nobody does. Raises ConfigError."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--engine ray:{address}: expected HOST:PORT or ray://HOST:PORT")
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE_S).close()
    except OSError as wrong:
        raise ConfigError(
            f"--engine ray:{address}: cannot be reached: {wrong}; is it running (ray start --head --port {port})?"
        ) from None
