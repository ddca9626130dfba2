"""Reads metrics of instances for the router at regular intervals, as a gateway reads their /metrics pages."""

from collections.abc import Callable

from pdsim.core import messages as m
from pdsim.core.instance import Levels
from pdsim.sim.bus import Timeline


class Scraping:
    def __init__(
        self,
        timeline: Timeline,
        interval_ns: int,
        levels: Callable[[], dict[str, Levels] | None],
        send: Callable[[m.MetricsSeen], None],
    ) -> None:
        """interval_ns: time in ns between two readings; 0: no metrics are read. levels: returns the levels (queues
        and pages) of living instances by id, or None if all requests have ended. send: called with the metrics of each
        reading.
        """
        self._timeline = timeline
        self._interval_ns = interval_ns
        self._levels = levels
        self._send = send

    def start(self) -> None:
        if self._interval_ns:
            self._schedule()

    def _schedule(self) -> None:
        self._timeline.num_watches += 1
        self._timeline.after(self._interval_ns, self._look)

    def _look(self, _: None) -> None:
        """Reads the metrics, and schedules the next reading. Stops if all requests have ended, or if no other event is
        due, so that a stalled run ends.
        """
        self._timeline.num_watches -= 1
        levels = self._levels()
        if levels is None or self._timeline.has_ended:
            return
        self._send(m.MetricsSeen(tuple(_metrics(name, one) for name, one in levels.items())))
        self._schedule()


def _metrics(instance_id: str, levels: Levels) -> m.InstanceMetrics:
    num_pages = levels.num_used_pages + levels.num_evictable_pages + levels.num_free_pages
    num_waiting = levels.num_queued + levels.num_retracted
    return m.InstanceMetrics(instance_id, num_waiting, levels.num_used_pages / max(1, num_pages))
