"""Two network namespaces of this machine, which are two hosts for pdreal. The link between them can be slowed and cut.
Needs root, and the commands `ip` and `tc`.
"""

import os
import shutil
import subprocess
import time
from typing import Self

WIRE = "wire"
HOME, AWAY = "10.77.0.1", "10.77.0.2"


def missing() -> str:
    """The reason why this machine cannot have such namespaces. Empty: it can."""
    if os.geteuid():
        return "network namespaces need root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "needs ip and tc: apt-get install iproute2"
    name = f"pdreal-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"ip netns: {tried.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


class Namespaces:
    def __init__(self, name: str) -> None:
        self.home, self.away = f"{name}-home", f"{name}-away"

    def __enter__(self) -> Self:
        for name in (self.home, self.away):
            _ip("netns", "add", name)
        _ip("link", "add", WIRE, "netns", self.home, "type", "veth", "peer", "name", WIRE, "netns", self.away)
        for name, address in ((self.home, HOME), (self.away, AWAY)):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", WIRE)
            for device in ("lo", WIRE):
                _ip("-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in (self.home, self.away):
            _ip("netns", "del", name)

    def processes(self) -> int:
        """Number of processes that are left in the namespaces. Waits up to 2 s for processes to end."""
        for _ in range(20):
            inside = ["ip", "netns", "pids"]
            pids = [subprocess.check_output([*inside, name]).split() for name in (self.home, self.away)]
            if not any(pids):
                break
            time.sleep(0.1)
        return sum(map(len, pids))

    def cut(self) -> None:
        _ip("-n", self.home, "link", "set", WIRE, "down")

    def join(self) -> None:
        """Restores the link, at full speed."""
        _ip("-n", self.home, "link", "set", WIRE, "up")
        for name in (self.home, self.away):
            subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", WIRE, "root"], capture_output=True, check=False)

    def slow(self, mbits_per_s: float) -> None:
        """Limits the link to this rate in Mbit/s, in both directions."""
        for name in (self.home, self.away):
            rate = ["tbf", "rate", f"{round(mbits_per_s * 1e6)}bit", "burst", "16kb", "latency", "200ms"]
            subprocess.run(["tc", "-n", name, "qdisc", "replace", "dev", WIRE, "root", *rate], check=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
