"""All that a rank's process is told as it is started."""

from dataclasses import dataclass
from pathlib import Path

from pdreal.options import Options
from pdsim.scenario.schema import AggregatedSettings, DecodeSettings, PrefillSettings, Scenario
from pdsim.system.memory import Role


def process_name(instance_id: str, rank: int) -> str:
    """The leader goes by its instance's name."""
    return f"{instance_id}.rank{rank}" if rank else instance_id


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    scenario: Scenario
    """Resolved, without its workload."""
    options: Options
    instance_id: str
    role: Role
    rank: int
    life: int
    """Starts of this instance before this one."""
    sockets: Path
    """The folder of the control channel's sockets, and where the ranks of an instance meet."""
    logs: Path | None
    """The folder of logbooks, if any are kept."""
    device_index: int
    """Which GPU, if there are any: ranks are dealt to them in turn."""
    num_threads: int
    """For torch on the CPU."""
    cores: tuple[int, ...]
    """Where all its threads run."""

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
