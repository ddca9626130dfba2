"""Ranks of one instance that see the end of a transfer one after another."""

from collections.abc import Mapping

from pdsim.core.messages import CellScattered, KvArrived, KvSent, Message, RankSaw
from pdsim.sim.actor import Actor
from pdsim.sim.timeline import Timeline
from pdsim.workload.request_spec import Streams


class Ranks:
    """Delivers messages to instances; what every rank must see for itself, once for each rank."""

    def __init__(
        self, timeline: Timeline, num_ranks: Mapping[str, int], *, agreement_ns: int, skew_ns: int, streams: Streams
    ) -> None:
        self._timeline = timeline
        self._num_ranks = num_ranks
        self._agreement_ns = agreement_ns
        self._skew_ns = skew_ns
        self._streams = streams

    def post(self, actor: Actor, instance_id: str, message: Message) -> None:
        if self._num_ranks[instance_id] == 1:
            actor.post(message)
        elif isinstance(message, KvArrived | KvSent):
            self._post_seen(actor, instance_id, message)
        elif isinstance(message, CellScattered) and message.completes is not None:
            actor.post(message._replace(completes=None))
            self._post_seen(actor, instance_id, message.completes)
        else:
            actor.post(message)

    def _post_seen(self, actor: Actor, instance_id: str, seen: KvArrived | KvSent) -> None:
        """To the instance in the life that it has now."""
        num_ranks = self._num_ranks[instance_id]
        draws = self._streams.named(f"ranks of {instance_id} for {seen.request_id}")
        for rank in range(num_ranks):
            delay_ns = self._agreement_ns + round(draws.random() * self._skew_ns)
            self._timeline.after(delay_ns, actor.post, RankSaw(rank, num_ranks, seen))
