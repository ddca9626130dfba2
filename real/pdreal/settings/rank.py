"""Settings with which the process of a rank starts."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from pdreal.control.channel import Network
from pdreal.settings.options import Options
from pdsim.scenario.building.sizing import instance_ids
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.servers import AggregatedSettings, DecodeSettings, PrefillSettings
from pdsim.system.memory import Role


def process_name(instance_id: str, rank: int) -> str:
    """Returns the name of a rank's process. The leader's process has its instance's name."""
    return f"{instance_id}.rank{rank}" if rank else instance_id


def roles_of(scenario: Scenario) -> dict[str, Role]:
    """Returns the role of each instance, by instance id: prefill instances first, then decode, then aggregated."""
    roles: dict[str, Role] = {}
    for role in get_args(Role):
        if (settings := getattr(scenario, role)) is not None:
            roles |= dict.fromkeys(instance_ids(settings, role), role)
    return roles


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    scenario: Scenario
    """Resolved scenario, without its workload."""
    options: Options
    instance_id: str
    """Name of the instance, such as prefill-0."""
    role: Role
    rank: int
    """Index of the rank in its instance. Rank 0 leads."""
    life: int
    """Number of times that the instance was started before this start. 0: this is the first start."""
    slot: int
    """Index of the rank among all ranks of its host. The rank gets the host's GPU with this index, modulo the number of
    GPUs."""
    num_slots: int
    """Number of all ranks that run on the rank's host. Each has a slot, from 0."""
    launcher: str
    """Endpoint at which the launcher receives messages."""
    network: Network | None = field(repr=False)
    """Network settings of the process. None: the run is on one host."""
    sockets: Path
    """Folder on the rank's host for the sockets of the control channel, and for those between an instance's ranks."""
    store: str | None
    """Address of the master of the store behind host caches. None: the scenario has no storage."""
    logs: Path | None
    """Folder on the rank's host for the logbooks in which a process writes its calls and events. None: no
    logbooks are kept."""

    @property
    def settings(self) -> PrefillSettings | DecodeSettings | AggregatedSettings:
        settings: PrefillSettings | DecodeSettings | AggregatedSettings = getattr(self.scenario, self.role)
        return settings

    @property
    def process(self) -> str:
        return process_name(self.instance_id, self.rank)

    @property
    def followers(self) -> list[str]:
        return [process_name(self.instance_id, rank) for rank in range(1, self.settings.tp)]
