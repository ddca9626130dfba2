"""Agreement of tensor-parallel ranks on what all have seen: SGLang's all-reduce of poll states with MIN.

Each rank sees the end of a transfer for itself, and it counts when the last has. So the ranks take the same requests
out of their queues in the same turn of the loop, which pull request 22234 checks. A failure needs no agreement: that of
one rank is that of all.
"""

from collections import Counter

from pdsim.core.messages import KvArrived, KvSent, RankObserved


class RankAgreement:
    """The agreement of one instance."""

    def __init__(self) -> None:
        self._ranks: dict[KvArrived | KvSent, Counter[int]] = {}
        """Counts how often each rank has seen it, since all had: a sender may say twice that nothing is under way."""

    @property
    def held(self) -> list[int]:
        """Requests that some ranks have seen arrive or leave, and others not."""
        return [seen.request_id for seen in self._ranks]

    def see(self, observed: RankObserved) -> KvArrived | KvSent | None:
        """Take in what one rank observed; returned as the last rank observes it."""
        ranks = self._ranks.setdefault(observed.seen, Counter())
        ranks[observed.rank] += 1
        if len(ranks) < observed.num_ranks:
            return None
        self._ranks[observed.seen] = ranks - Counter(range(observed.num_ranks))
        if not self._ranks[observed.seen]:
            del self._ranks[observed.seen]
        return observed.seen
