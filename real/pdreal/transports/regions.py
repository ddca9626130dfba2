"""Registered memory of a process, and where it is mapped in another."""

from collections.abc import Iterable

import numpy as np

from pdreal.transports.protocol import Addresses, TransferError


class Regions:
    def __init__(self, rows: Iterable[tuple[int, int, int]]) -> None:
        """Address, bytes and address of the mapping of each."""
        begins, sizes, mapped = np.array(sorted(rows), np.int64).reshape(-1, 3).T
        self._begins, self._ends, self._mapped = begins, begins + sizes, mapped

    def translate(self, addresses: Addresses, lengths: Addresses) -> Addresses:
        """Where these ranges are mapped. Raises TransferError if one is not within a region."""
        region = np.searchsorted(self._begins, addresses, "right") - 1
        if (region < 0).any() or (addresses + lengths > self._ends[region]).any():
            raise TransferError("a range is not within registered memory")
        return self._mapped[region] + addresses - self._begins[region]
