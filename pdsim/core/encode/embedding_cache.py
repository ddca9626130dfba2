"""The embeddings that a server keeps. Keys: one image or audio clip, or a list of several."""

from collections import OrderedDict
from collections.abc import Hashable


class EmbeddingCache:
    """Keeps embeddings up to a number of bytes, and evicts those that were used least recently (SGLang 0.5.23,
    mem_cache/multimodal_cache.py:76, MultiModalStaticCache).
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Hashable, int] = OrderedDict()
        """Bytes of each entry, the least recently used first."""
        self.num_bytes = 0

    def has(self, key: Hashable) -> bool:
        """True if embeddings with this key are kept. Marks them as used."""
        if key not in self._kept:
            return False
        self._kept.move_to_end(key)
        return True

    def add(self, key: Hashable, num_bytes: int) -> None:
        """Keeps embeddings of num_bytes bytes, and evicts others if needed. No effect if num_bytes exceeds the whole
        cache.
        """
        if self.has(key) or num_bytes > self._max_bytes:
            return
        while self.num_bytes + num_bytes > self._max_bytes:
            self.num_bytes -= self._kept.popitem(last=False)[1]
        self._kept[key] = num_bytes
        self.num_bytes += num_bytes

    def clear(self) -> None:
        self._kept.clear()
        self.num_bytes = 0
