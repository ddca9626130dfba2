"""Which slot of the ranks' memory holds which linear-attention state of an instance.

The core decides which states are kept, and counts them (pdsim.core.memory.hybrid_cache). A lease has one slot for
its request's own state, from the state's first use until the lease ends. A chunk or a decode step writes each state
that the cache may keep into another slot. When the lease is checkpointed or closed, the cache keeps this slot, unless
the cache already has the state.
"""

from typing import Any, NamedTuple

from pdreal.control.tasks import StateUse
from pdsim.core.memory.hybrid_cache import HybridKvCache
from pdsim.core.memory.kv_cache import Lease
from pdsim.core.memory.radix_cache import Node
from pdsim.scenario.building.caches import kv_cache
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.servers import ServerSettings
from pdsim.system.catalog import load_model
from pdsim.system.memory import Role

_SPARE_SLOTS = 2
"""Number of further slots of an instance, besides those for its requests and for cached states. A chunk may begin while
the states of the previous chunk wait for the cache to take them, and then needs slots of its own.
"""
_COUNTED_SLOTS = 3
"""Maximum number of slots that StateSlots takes for one lease. The core's cache may have fewer slots per request
(StateLimits.slots_per_request); then `num_slots` adds the difference for every request.
"""


def num_slots(scenario: Scenario, role: Role) -> int:
    """Returns the number of slots for linear-attention states that each rank of an instance needs. scenario: a scenario
    with all defaults filled in, whose model has linear attention.
    """
    settings: ServerSettings = getattr(scenario, role)
    max_requests = settings.resolved_max_running + (getattr(settings, "extra_slots", None) or 0) + 1
    cache = kv_cache(scenario, role)
    if not isinstance(cache, HybridKvCache):
        return max_requests
    uncounted = max(0, _COUNTED_SLOTS - cache.limits.slots_per_request) * max_requests
    counted = min(cache.states.num_slots, 2 * max_requests + cache.pool.num_pages)  # a kept state has a page of its own
    return counted + uncounted + _SPARE_SLOTS


_MISSING = 0
"""Stands for the slot of a state that the core counts as stored although no chunk or step of this instance has written
it, for example because its request ended before its first step on decode. Decode never continues from a missing state,
because it gets whole states from prefill.
"""


class _Leased(NamedTuple):
    own: int
    """Slot of the request's own state: the state after its last computed token."""
    tracked: dict[int, int]
    """Slots for states that the cache has not taken yet. Keys: number of tokens that a state covers."""


class StateSlots:
    def __init__(self, instance: Any, num_slots: int) -> None:
        """instance: gives the leases of its requests. num_slots: slots 1 to num_slots."""
        self._instance = instance
        self._cache = instance.cache
        self._free = list(range(num_slots, 0, -1))
        self._leased: dict[Lease, _Leased] = {}
        self._kept: dict[Node, int] = {}
        """Slot of each state that the prefix cache keeps, by node. States that the cache has given up stay here until
        no slot is free (`_sweep`)."""
        if isinstance(self._cache, HybridKvCache):
            self._cache.on_state = self._on_state

    @classmethod
    def of(cls, instance: Any, scenario: Scenario, role: Role) -> "StateSlots | None":
        """Returns the slots of an instance. None: the scenario's model has no linear attention. scenario: resolved."""
        has_states = load_model(scenario.model).state is not None
        return cls(instance, num_slots(scenario, role)) if has_states else None

    def own(self, request_id: int) -> int:
        """Returns the slot of a request's own state."""
        return self._of(self._instance.lease(request_id)).own

    def of_chunk(self, request_id: int, start: int, stop: int) -> StateUse:
        """Returns the slots from which a chunk of the tokens [start, stop) reads its state, and to which it writes
        states.
        """
        lease: Lease = self._instance.lease(request_id)
        is_begun = lease in self._leased
        leased = self._of(lease)
        source = leased.own if is_begun else 0
        if not is_begun and start:
            assert lease.node is not None
            source = self._kept[lease.node]
            if source == _MISSING:
                raise RuntimeError(
                    f"request {request_id} continues from a state of {start} tokens that nobody computed"
                )
        tracked = self._cache.tracked_tokens(lease, start, stop) if isinstance(self._cache, HybridKvCache) else 0
        if not tracked:
            return StateUse(source, leased.own)
        leased.tracked[tracked] = slot = self._take()
        return StateUse(source, leased.own, slot, tracked - start)

    def of_step(self, request_id: int, num_tokens: int) -> tuple[int, int]:
        """Returns two slots for a step of a running request: the slot of its own linear-attention state, and the slot
        into which the step copies this state for the prefix cache (0: it copies none). num_tokens: number of tokens
        that the state covers after the step.
        """
        leased = self._of(self._instance.lease(request_id))
        cache = self._cache
        if not isinstance(cache, HybridKvCache) or num_tokens % cache.interval_tokens:
            return leased.own, 0
        slots = [leased.tracked.pop(tokens) for tokens in list(leased.tracked)]
        leased.tracked[num_tokens] = slot = slots[0] if slots else self._take()
        return leased.own, slot

    def _of(self, lease: Lease) -> _Leased:
        if lease not in self._leased:
            slot = self._take()  # before the lease is known here: it may end others
            self._leased[lease] = _Leased(slot, {})
        return self._leased[lease]

    def _on_state(self, lease: Lease, num_tokens: int, node: Node | None) -> None:
        leased = self._leased.get(lease)
        slot = _MISSING if leased is None else leased.tracked.pop(num_tokens, _MISSING)
        if node is None:
            self._free_all(slot)
        else:
            self._free_all(self._kept.get(node, _MISSING))
            self._kept[node] = slot

    def _free_all(self, *slots: int) -> None:
        self._free += [slot for slot in slots if slot != _MISSING]

    def _take(self) -> int:
        if not self._free:
            self._sweep()
        return self._free.pop()

    def _sweep(self) -> None:
        """Frees the slots of leases that have ended, and of states that the cache keeps no longer."""
        held = {request.lease for request in self._instance.holding()}
        for lease in self._leased.keys() - held:
            own, tracked = self._leased.pop(lease)
            self._free_all(own, *tracked.values())
        if isinstance(self._cache, HybridKvCache):
            for node in self._kept.keys() - self._cache.states.kept.keys():
                self._free_all(self._kept.pop(node))
