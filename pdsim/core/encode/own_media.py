"""Chooses the images and audio clips that a server encodes itself, within the forwards that compute their tokens. A
forward encodes each item of which it computes a token, unless the cache has its embeddings (SGLang 0.5.23,
managers/mm_schedule.py:541, _get_chunked_prefill_embedding). Without a cache, an item that two chunks share is encoded
twice.
"""

from collections.abc import Mapping, Sequence

from pdsim.core.encode.embedding_cache import EmbeddingCache
from pdsim.core.encode.media_item import MediaItem
from pdsim.core.messages import PrefillStep
from pdsim.core.routing.router import request_of


class OwnMedia:
    def __init__(
        self,
        media: Mapping[int, Sequence[MediaItem]],
        embedding_bytes: Mapping[str, int],
        cache: EmbeddingCache,
    ) -> None:
        """media: images and audio clips of each request, by the client's id of the request; requests without images and
        clips are left out. embedding_bytes: bytes of the embeddings of one token, by modality; items of modalities that
        are not listed are not encoded. cache: embeddings that are kept for later requests.
        """
        self._media = media
        self._embedding_bytes = embedding_bytes
        self._cache = cache

    def to_encode(self, step: PrefillStep) -> list[MediaItem]:
        """Returns the items of a forward that the cache lacks, each content once, and adds them to the cache as far as
        they fit.
        """
        found = {
            item.key: item
            for chunk in step.chunks
            for item in self._media.get(request_of(chunk.request_id), ())
            if item.modality in self._embedding_bytes and item.is_in(chunk.num_context_tokens, chunk.num_tokens)
        }
        missing = {key: item for key, item in found.items() if not self._cache.has(key)}
        for key, item in missing.items():
            self._cache.add(key, item.num_tokens * self._embedding_bytes[item.modality])
        return list(missing.values())

    def clear(self) -> None:
        """Empties the cache of embeddings, as a restart of the instance does."""
        self._cache.clear()
