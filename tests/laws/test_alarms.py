"""A timeline rings its alarms as SimPy itself would: by time, then by order, then as they were set."""

import simpy
from hypothesis import given
from hypothesis import strategies as st

from pdsim.sim.bus import CHOICES, FIRST, Timeline
from pdsim.sim.scraping import Scraping


class SimPyTimeline:
    """The naive twin: SimPy's own events in SimPy's own loop."""

    def __init__(self):
        self._simpy = simpy.Environment()

    @property
    def now_ns(self):
        return self._simpy.now

    def after(self, delay_ns, callback, payload=None, order=FIRST):
        event = simpy.Event(self._simpy)
        event._ok, event._value = True, None
        event.callbacks.append(lambda _: callback(payload))
        self._simpy.schedule(event, order, delay_ns)
        return event

    def run_all(self):
        self._simpy.run()


class Bell:
    """Sets alarms, some of them as others ring, and cancels some."""

    def __init__(self, timeline, plan):
        self._timeline = timeline
        self._plan = iter(plan)
        self._alarms = []
        self.rung = []

    def set_next(self):
        delay_ns, order, cancels = next(self._plan, (None, None, None))
        if delay_ns is None:
            return
        if cancels and self._alarms:
            alarm = self._alarms[len(self.rung) % len(self._alarms)]
            if isinstance(alarm, simpy.Event):
                if alarm.callbacks is not None:
                    alarm.callbacks.clear()
            else:
                alarm.cancel()
        number = len(self._alarms)
        self._alarms.append(self._timeline.after(delay_ns, self._ring, number, order))

    def _ring(self, number):
        self.rung.append((self._timeline.now_ns, number))
        self.set_next()
        self.set_next()


orders = st.sampled_from([FIRST, CHOICES, CHOICES + 1])
plans = st.lists(st.tuples(st.integers(0, 3), orders, st.booleans()), min_size=1, max_size=60)


@given(plans)
def test_alarms_ring_as_simpy_rings_them(plan):
    rung = []
    for timeline in (Timeline(), SimPyTimeline()):
        bell = Bell(timeline, plan)
        for _ in range(3):
            bell.set_next()
        timeline.run_all()
        rung.append(bell.rung)
    assert rung[0] == rung[1]


def test_readings_of_metrics_and_an_autoscaler_do_not_keep_each_other_going():
    timeline, looks = Timeline(), []

    def look(_):
        looks.append(timeline.now_ns)
        if not timeline.has_ended and len(looks) < 9:
            timeline.after(30, look)

    Scraping(timeline, 10, dict, lambda _: None).start()
    timeline.after(30, look)
    timeline.run_all()
    assert (looks, timeline.now_ns) == ([30], 30)
