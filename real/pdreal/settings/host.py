"""Hosts of a run: how the launcher reaches and starts each host, and which instances run there."""

import shlex
import socket
from collections.abc import Sequence
from fnmatch import fnmatchcase
from ipaddress import IPv4Address
from pathlib import Path
from typing import Self

from pydantic import field_validator, model_validator

from pdsim.scenario.loading import read_section
from pdsim.scenario.sections.fields import Section
from pdsim.scenario.yaml_file import ConfigError, did_you_mean

LOOPBACK = "127.0.0.1"
BETWEEN_HOSTS = ("mooncake-rdma", "nixl-rdma", "mooncake-mnnvl", "mooncake-tcp")
"""Transfer engines that work between hosts."""


def free_port() -> int:
    """Returns a port of this host on which nobody listens."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def free_host_bytes() -> int:
    """Bytes of memory that can be allocated without swapping."""
    (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    return 1024 * int(line.split()[1])


class LaunchError(RuntimeError):
    """Raised if an instance or a host did not start."""


class HostEntry(Section):
    address: IPv4Address
    """Address at which other hosts reach this host."""
    instances: tuple[str, ...] = ()
    """Names of the host's instances, or patterns of names such as decode-*."""
    start: str | None = None
    """Command that runs `pdreal host` on the host, and passes its own standard input on. None: this is the launcher's
    own host.
    """

    @field_validator("start")
    @classmethod
    def _is_a_command(cls, start: str | None) -> str | None:
        if start is not None and not shlex.split(start):
            raise ValueError("expected a command that runs `pdreal host` there, found nothing")
        return start


class Hosts(Section):
    hosts: dict[str, HostEntry]
    """Address, instances and start command of each host, by its name."""

    @model_validator(mode="after")
    def _has_one_home(self) -> Self:
        own = [name for name, entry in self.hosts.items() if entry.start is None]
        if len(own) != 1:
            found = f"found {', '.join(own)}" if own else "found none"
            raise ValueError(f"exactly one host, the one where pdreal is called, has no start; {found}")
        return self

    @property
    def home(self) -> str:
        """Name of the launcher's own host."""
        return next(name for name, entry in self.hosts.items() if entry.start is None)

    @property
    def home_address(self) -> str:
        return str(self.hosts[self.home].address)

    @property
    def others(self) -> list[tuple[str, HostEntry]]:
        """All hosts but the launcher's own, by name."""
        return [(name, entry) for name, entry in self.hosts.items() if entry.start is not None]

    def as_pair(self) -> "Hosts":
        """Returns the launcher's own host with a prefill instance, and the first other host with a decode instance.
        Raises ConfigError if there is no other host.
        """
        if not self.others:
            raise ConfigError(f"hosts: transfers between hosts need two hosts, found {self.home} alone")
        home, (name, other) = self.hosts[self.home], self.others[0]
        return Hosts(
            hosts={
                self.home: home.model_copy(update={"instances": ("prefill-0",)}),
                name: other.model_copy(update={"instances": ("decode-0",)}),
            }
        )

    @property
    def are_one_machine(self) -> bool:
        """True if all hosts have the same address."""
        return len({entry.address for entry in self.hosts.values()}) == 1

    def placed(self, instance_ids: Sequence[str]) -> dict[str, str]:
        """Returns the host of each instance. Raises ConfigError if an instance is on no host or on several, or if a
        pattern of a host matches no instance.
        """
        found: dict[str, list[str]] = {instance_id: [] for instance_id in instance_ids}
        for name, entry in self.hosts.items():
            for pattern in entry.instances:
                matching = [i for i in instance_ids if fnmatchcase(i, pattern)]
                if not matching:
                    hint = did_you_mean(pattern, instance_ids)
                    here = ", ".join(instance_ids)
                    raise ConfigError(f"hosts.{name}.instances: no instance {pattern!r}{hint}; here are {here}")
                for instance_id in matching:
                    found[instance_id].append(name)
        for instance_id, names in found.items():
            if len(names) != 1:
                where = f"on {' and '.join(names)}" if names else f"on none of {', '.join(self.hosts)}"
                raise ConfigError(f"hosts: {instance_id} must be on one host, found {where}")
        return {instance_id: name for instance_id, (name,) in found.items()}


def read_hosts(path: Path | None) -> Hosts | None:
    """Reads a file of hosts. None: no file is given. Raises ConfigError if the file cannot be read or has wrong
    fields.
    """
    return None if path is None else read_section(path, Hosts)
