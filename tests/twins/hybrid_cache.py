"""A prefix cache with states of linear-attention layers, as a list of cached prefixes and a list of prefixes with a
state. tests/laws/test_hybrid_cache.py compares pdsim with this module.
"""

Prefix = tuple[int, ...]


def begins(short: Prefix, long: Prefix) -> bool:
    return long[: len(short)] == short


class NaiveHybridCache:
    """The cache. Each cached prefix stands for a node of pdsim's tree: the tokens of the node are those behind the
    longest other cached prefix with which this prefix begins.
    """

    def __init__(self, page_size: int, num_slots: int) -> None:
        self.page_size, self.num_free = page_size, num_slots
        self.last_use: dict[Prefix, int] = {}
        """Time of the last use of each cached prefix."""
        self.states: list[Prefix] = []
        """Prefixes with a state, the least recently used first."""
        self.held: list[Prefix] = []
        """Prefixes from which requests continue."""
        self.now = 0

    def whole(self, tokens: Prefix) -> Prefix:
        return tokens[: len(tokens) - len(tokens) % self.page_size]

    def find(self, tokens: Prefix) -> tuple[Prefix, Prefix]:
        """Returns the longest cached prefix of the tokens with a state, and the longest with pages."""
        paged = max((self.common(tokens, prefix) for prefix in self.last_use), key=len, default=())
        return max((state for state in self.states if begins(state, paged)), key=len, default=()), paged

    def common(self, tokens: Prefix, other: Prefix) -> Prefix:
        same = next((i for i, (one, two) in enumerate(zip(tokens, other, strict=False)) if one != two), None)
        return self.whole(tokens[: min(len(tokens), len(other)) if same is None else same])

    def split(self, prefix: Prefix) -> None:
        """Makes this beginning of a cached prefix a cached prefix of its own."""
        longer = [other for other in self.last_use if begins(prefix, other)]
        if prefix and longer and prefix not in self.last_use:
            nearest = min(longer, key=len)
            self.last_use[prefix] = self.last_use[nearest] = self.now + 1

    def use(self, prefix: Prefix) -> None:
        self.now += 2
        for other in self.last_use:
            if begins(other, prefix):
                self.last_use[other] = self.now

    def use_state(self, prefix: Prefix) -> None:
        if prefix in self.states:
            self.states.remove(prefix)
            self.states.append(prefix)

    def match(self, tokens: Prefix) -> tuple[Prefix, Prefix]:
        state, paged = self.find(tokens)
        self.split(paged)
        self.use(state)
        self.use_state(state)
        return state, paged

    def take_slots(self, num_slots: int) -> None:
        while self.num_free < num_slots and (unheld := [state for state in self.states if state not in self.held]):
            self.states.remove(unheld[0])
            self.num_free += 1
            if self.is_leaf(unheld[0]):
                del self.last_use[unheld[0]]
        self.num_free -= num_slots

    def is_leaf(self, prefix: Prefix) -> bool:
        return not any(begins(prefix, other) for other in (*self.held, *(self.last_use.keys() - {prefix})))

    def insert(self, prefix: Prefix) -> bool:
        """Caches a prefix with its state. Returns False if the state was kept before."""
        self.split(self.find(prefix)[1])
        self.last_use.setdefault(prefix, self.now)
        self.use(prefix)
        is_new = bool(prefix) and prefix not in self.states
        if is_new:
            self.states.append(prefix)
        self.use_state(prefix)
        return is_new

    def evict_pages(self, num_pages: int) -> None:
        while num_pages > 0:
            prefix = min(filter(self.is_leaf, self.last_use), key=self.last_use.__getitem__)
            del self.last_use[prefix]
            num_pages -= (len(prefix) - max(len(self.common(prefix, other)) for other in [(), *self.last_use])) // (
                self.page_size
            )
            if prefix in self.states:
                self.states.remove(prefix)
                self.num_free += 1
