"""Embeddings that a vLLM server keeps, and the images and audio clips that its next step encodes.

Source: vLLM 0.33.0, v1/core/encoder_cache_manager.py (EncoderCacheManager) and v1/core/sched/scheduler.py:2018
(_try_schedule_encoder_inputs). A chunk needs the embeddings of all items of which it computes tokens. It ends before an
item whose embeddings are missing if the cache has no room for them. Embeddings in use stay; a request uses those of an
item until it has computed all tokens of the item. Other embeddings stay until room is needed.
"""

from collections import OrderedDict
from typing import NamedTuple

from pdsim.core.encode.media_item import MediaItem, MediaKey
from pdsim.core.instance import Request


class MediaChoice(NamedTuple):
    """Number of tokens that a chunk may compute, and items that the step encodes for the chunk."""

    num_tokens: int
    """Number of tokens that the chunk may compute. 0: the request must wait."""
    new: dict[MediaKey, int]
    """The items that the step encodes for the chunk. Keys: modality and media_id of each item. Values: index of the
    item among the request's items.
    """
    repeated: tuple[int, ...]
    """Indices, among the request's items, of items that have the same content as an item in `new`."""


class EncoderCache:
    def __init__(self, max_tokens: int, *, splits_items: bool = True) -> None:
        """max_tokens: maximum number of tokens of items whose embeddings are kept. vLLM also limits the items that one
        step encodes to this number (compute_mm_encoder_budget). This class need not check that, because the cache keeps
        all items that a step encodes.

        splits_items: False: no chunk ends within an item (disable_chunked_mm_input).
        """
        self.max_tokens = max_tokens
        self._splits_items = splits_items
        self.num_free_tokens = max_tokens
        self.chosen: list[MediaItem] = []
        """Items that the step which is being filled encodes."""
        self._sizes: dict[MediaKey, int] = {}
        """Tokens of each item whose embeddings are kept."""
        self._places: dict[int, dict[int, MediaKey]] = {}
        """Items whose embeddings requests use: by request id, then by index of the item among the request's items."""
        self._users: dict[MediaKey, set[int]] = {}
        self._unused: OrderedDict[MediaKey, int] = OrderedDict()
        """Tokens of items that are kept and that no request uses. The first is evicted first."""

    def begin_step(self) -> None:
        self.chosen = []

    def trial(self) -> "EncoderCache":
        """Returns a copy of this cache on which the caller can try choices; this cache does not change. The copy has no
        items chosen for the step.
        """
        copy = EncoderCache(self.max_tokens, splits_items=self._splits_items)
        copy.num_free_tokens = self.num_free_tokens
        copy._sizes = dict(self._sizes)
        copy._places = {request_id: dict(places) for request_id, places in self._places.items()}
        copy._users = {key: set(users) for key, users in self._users.items()}
        copy._unused = self._unused.copy()
        return copy

    def choose(self, request: Request, num_tokens: int) -> MediaChoice:
        """Returns how many of a request's next num_tokens tokens the step can compute, and which images and audio clips
        of these tokens the step must encode first. Marks embeddings that are kept already as used by the request. If
        the step encodes new items, the caller then calls `take`.
        """
        start = request.num_scheduled_tokens
        new: dict[MediaKey, int] = {}
        repeated: list[int] = []
        num_new = 0
        for place, item in enumerate(request.media):
            if not item.is_in(start, num_tokens):
                continue
            if not self._splits_items and start <= item.start_token and start + num_tokens < item.end_token:
                num_tokens = item.start_token - start
                break
            key = item.key
            if key in new:
                repeated.append(place)
            elif key in self._sizes:
                self._use(request.request_id, place, key)
            elif self._makes_room(item.num_tokens, num_new):
                new[key] = place
                num_new += item.num_tokens
            else:
                num_tokens = max(0, item.start_token - start)
                break
        return MediaChoice(num_tokens, new, tuple(repeated))

    def take(self, request: Request, choice: MediaChoice) -> None:
        """Lets the step encode the new items of a choice, which `choose` returned for this request."""
        for key, place in choice.new.items():
            item = request.media[place]
            self.chosen.append(item)
            self._sizes[key] = item.num_tokens
            self._users[key] = set()
            self.num_free_tokens -= item.num_tokens
            self._use(request.request_id, place, key)
        for place in choice.repeated:
            self._use(request.request_id, place, request.media[place].key)

    def end_chunk(self, request: Request) -> None:
        """Ends the request's use of those images and audio clips whose tokens have all been computed."""
        for place in sorted(self._places.get(request.request_id, ())):
            item = request.media[place]
            if item.end_token <= request.num_computed_tokens:
                self._free(request.request_id, place)

    def drop(self, request_id: int) -> None:
        """Ends all uses of embeddings by a request that was given up or preempted, or that cannot begin for lack of
        pages.
        """
        for place in sorted(self._places.get(request_id, ())):
            self._free(request_id, place)

    @property
    def num_used_tokens(self) -> int:
        """Number of tokens of cached images and audio clips that requests still use."""
        return self.max_tokens - self.num_free_tokens - sum(self._unused.values())

    def _makes_room(self, num_tokens: int, num_new: int) -> bool:
        """Makes room for an item of num_tokens tokens in addition to num_new tokens, which earlier items of the same
        chunk will take. Evicts unused embeddings as needed. Returns False, and evicts none, if embeddings in use leave
        too little room.
        """
        if num_tokens + num_new > self.max_tokens - self.num_used_tokens:
            return False
        while num_tokens + num_new > self.num_free_tokens:
            key, num_evicted = self._unused.popitem(last=False)
            del self._sizes[key], self._users[key]
            self.num_free_tokens += num_evicted
        return True

    def _use(self, request_id: int, place: int, key: MediaKey) -> None:
        self._unused.pop(key, None)
        self._users[key].add(request_id)
        self._places.setdefault(request_id, {})[place] = key

    def _free(self, request_id: int, place: int) -> None:
        places = self._places[request_id]
        key = places.pop(place)
        if not places:
            del self._places[request_id]
        if key in places.values():
            return  # the same item lies in the prompt again
        self._users[key].discard(request_id)
        if not self._users[key]:
            self._unused[key] = self._sizes[key]
