"""Who computes tasks: this process, others of this machine, or a Ray cluster."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.compute import Done, compute
from pdsim.study.plan import Task
from pdsim.study.pool import Pool


class Engine(Protocol):
    def run(self, tasks: Sequence[Task]) -> Iterator[Done]:
        """Each task once, as they are done, in any order."""

    def close(self) -> None: ...


class Here:
    """This process: nothing to start, but one that dies takes all with it."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Done]:
        return map(compute, tasks)

    def close(self) -> None:
        """There is nothing to end."""


def open_engine(name: str, num_workers: int) -> Engine:
    """pool, here, ray or ray:ADDRESS. Raises ConfigError. num_workers is the pool's; a cluster knows its own."""
    kind, _, address = name.partition(":")
    if kind == "ray":
        from pdsim.study.ray_cluster import RayCluster  # noqa: PLC0415

        return RayCluster(address or None)
    if name == "here":
        return Here()
    if name != "pool":
        raise ConfigError(f"--engine {name}: there are pool, here, ray and ray:ADDRESS")
    if num_workers < 1:
        raise ConfigError(f"--jobs {num_workers}: at least 1")
    return Pool(num_workers)
