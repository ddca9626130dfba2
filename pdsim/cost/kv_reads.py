"""Transfers that read a GPU's KV beside its forwards, which take longer (experiments/transfer-micro).

A forward pays for what was read beside those before it: when it begins, nobody knows what will be read meanwhile.
"""


class KvReads:
    """Reads of one GPU's KV. Those of the same time count once, if they end in the order in which they began."""

    def __init__(self, slows_prefill: float) -> None:
        """slows_prefill: the share of a transfer's time by which it prolongs the forwards beside it."""
        self._share = slows_prefill
        self._busy_since_ns = self._busy_until_ns = 0
        self._counted_ns = 0
        """End of the last transfer."""
        self._owed_ns = 0.0

    def prolonged_ns(self, start_ns: int, duration_ns: int) -> int:
        """Duration of a forward that begins at start_ns, with what is owed. Called once for each, in order."""
        owed_ns = int(self._owed_ns)
        self._owed_ns -= owed_ns
        if start_ns > self._busy_until_ns:
            self._busy_since_ns = start_ns
        self._busy_until_ns = start_ns + duration_ns + owed_ns
        return duration_ns + owed_ns

    def ended(self, since_ns: int, now_ns: int) -> None:
        """A transfer has ended that began at since_ns."""
        beside_since_ns = max(since_ns, self._counted_ns, self._busy_since_ns)
        self._counted_ns = now_ns
        self._owed_ns += self._share * max(0, min(now_ns, self._busy_until_ns) - beside_since_ns)
