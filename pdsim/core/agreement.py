"""What all tensor-parallel ranks of an instance have seen: SGLang's all-reduce of poll states with MIN.

Each rank sees the end of a transfer for itself, and it counts when the last has. So the ranks take the same requests
out of their queues in the same turn of the loop, which pull request 22234 checks. A failure needs no agreement: that of
one rank is that of all.
"""

from collections import Counter

from pdsim.core.messages import KvArrived, KvSent, RankObserved


class RankAgreement:
    """Of one instance."""

    def __init__(self) -> None:
        self._ranks: dict[KvArrived | KvSent, Counter[int]] = {}
        """How often each rank has seen it, since all had: a sender may say twice that nothing is under way."""

    @property
    def held(self) -> list[int]:
        """Requests that some ranks have seen arrive or leave, and others not."""
        return [seen.request_id for seen in self._ranks]

    def see(self, saw: RankObserved) -> KvArrived | KvSent | None:
        """What was seen, as the last rank sees it."""
        ranks = self._ranks.setdefault(saw.seen, Counter())
        ranks[saw.rank] += 1
        if len(ranks) < saw.num_ranks:
            return None
        self._ranks[saw.seen] = ranks - Counter(range(saw.num_ranks))
        if not self._ranks[saw.seen]:
            del self._ranks[saw.seen]
        return saw.seen
