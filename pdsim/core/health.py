"""The health monitor: decides from heartbeats which instances are down, and tells the instances that depend on them.

SGLang's decode ranks ask each prefill server for its health every 5 s, and count a server as down after two failures
(common/conn.py: _start_heartbeat_checker_thread); SGLang's gateway asks all servers. pdsim has one monitor for the
decode ranks and the gateway.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pdsim.core.messages import Command, Heartbeat, Message, PeerDown, PeerUp, Send


class HealthMonitor:
    instance_id: ClassVar[str] = "health"

    def __init__(self, peers: Mapping[str, Sequence[str]], *, max_failures: int, interval_ns: int = 0) -> None:
        """peers: maps each instance to the instances that hear of its failure. max_failures: number of missed
        heartbeats after which an instance is down. interval_ns: time between two heartbeats of an instance.
        """
        self._peers = peers
        self._max_failures = max_failures
        self._failures = dict.fromkeys(peers, 0)
        self._lives = dict.fromkeys(peers, 0)
        self._interval_ns = interval_ns

    def on_message(self, message: Message, now_ns: int) -> list[Command]:
        if not isinstance(message, Heartbeat):
            raise TypeError(f"a health monitor does not take {message}")
        instance_id, life = message.instance_id, message.life
        if life is None:
            self._failures[instance_id] += 1
            is_down = self._failures[instance_id] == self._max_failures
            return self._tell(instance_id, self._down(instance_id, self._max_failures, now_ns)) if is_down else []
        was_down = self._failures[instance_id] >= self._max_failures
        has_restarted = life != self._lives[instance_id]
        num_beats = self._failures[instance_id] + 1
        self._failures[instance_id], self._lives[instance_id] = 0, life
        if was_down:
            return self._tell(instance_id, PeerUp(instance_id))
        down = self._down(instance_id, num_beats, now_ns, has_restarted=True)
        return self._tell(instance_id, down) if has_restarted else []

    def _down(self, instance_id: str, num_beats: int, now_ns: int, *, has_restarted: bool = False) -> PeerDown:
        """Returns the message that an instance has failed. num_beats: number of heartbeats from the last answered
        heartbeat to the present one. has_restarted: True: the instance has restarted already.
        """
        return PeerDown(instance_id, has_restarted, max(0, now_ns - num_beats * self._interval_ns))

    def _tell(self, instance_id: str, news: PeerDown | PeerUp) -> list[Command]:
        return [Send(peer, news) for peer in self._peers[instance_id]]
