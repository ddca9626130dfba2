"""A long-lived server does not grow: what state machines keep of requests that have ended goes, if not at once."""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.deadlines import KEPT_NS
from pdsim.core.memory.radix_cache import PagePool, RadixCache
from pdsim.core.messages import LayersComputed, Woken
from pdsim.core.routing.prompt_memory import PromptMemories
from pdsim.core.routing.router import Router
from pdsim.core.transfer.sender import Sender
from pdsim.scenario.building.machines import state_machines
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.schema import Scenario
from tests.strategies import (
    aggregated_scenarios,
    any_scenarios,
    fault_schedules,
    optimistic_scenarios,
    scenarios,
    speculative_scenarios,
)
from tests.support import examples, run

CACHES = PagePool, PromptMemories, RadixCache
TOLD_WITH_THE_NEXT_STEP = "batch._left"
"""Requests that left the batch without an end: at most as many as ran."""
OF_THE_LAST_CHOICE = "._policy._order"
"""The order of lpm's queue, of SGLang and of vLLM, made anew at each choice: as many as waited then."""
ENDS_OF_THE_LAST_CHOICE = "_ends._ends"
"""When running requests end, as the last choice found: at most as many as ran then."""
SESSIONS = "_sessions._sessions", "_sessions._idle", "._policy._places", "._bound.places"
"""The instance of each session: what has been idle for too long goes with the next choice."""
BOUNDED = (TOLD_WITH_THE_NEXT_STEP, OF_THE_LAST_CHOICE, ENDS_OF_THE_LAST_CHOICE, *SESSIONS)


def sizes(machine: Any, names: Collection[str]) -> Counter[str]:
    """What every collection of a machine holds, by its path, but for names of machines: there are only so many."""
    found: Counter[str] = Counter()
    for path, collection in collections_of(machine, "", ()):
        found[path] += sum(not (isinstance(key, str) and key in names) for key in collection)
    return found


def collections_of(thing: Any, path: str, around: tuple[int, ...]) -> Iterator[tuple[str, Collection[Any]]]:
    if id(thing) in around or isinstance(thing, (str, *CACHES)):
        return
    around += (id(thing),)
    if isinstance(thing, Mapping | list | tuple | set | frozenset | deque):
        if not hasattr(thing, "_fields"):  # a record is as large as ever
            yield path, thing
        for inside in thing.values() if isinstance(thing, Mapping) else thing:
            yield from collections_of(inside, path, around)
    elif type(thing).__module__.startswith("pdsim"):
        slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in {**dict.fromkeys(slots), **getattr(thing, "__dict__", {})}:
            if hasattr(thing, name):
                yield from collections_of(getattr(thing, name), f"{path}.{name}" if path else name, around)


def look_again(machine: Any, now_ns: int) -> None:
    """Have it see that time has passed."""
    if isinstance(machine, Sender):
        machine.on_message(LayersComputed(0, 0), now_ns)
    elif getattr(machine, "instance_id", "") != Router.instance_id:
        machine.on_message(Woken(), now_ns)


@given(
    st.one_of(
        any_scenarios(),
        fault_schedules(scenarios()),
        fault_schedules(st.one_of(aggregated_scenarios(), optimistic_scenarios(), speculative_scenarios())),
    )
)
@examples(100)
def test_when_all_requests_have_ended_nothing_is_larger_than_at_its_start(scenario: Scenario):
    """Caches aside; and once no message can come any more that is of a request which has ended."""
    traced = run(scenario)
    end_ns = max(entry.args[-1] for entry in traced.journal)
    fresh = state_machines(resolve(scenario))
    for machine in traced.machines:
        look_again(machine, end_ns + KEPT_NS)
        grown = sizes(machine, fresh) - sizes(fresh[machine.instance_id], fresh)
        grown = Counter({path: n for path, n in grown.items() if not path.endswith(BOUNDED)})
        assert not grown, (machine.instance_id, grown)
