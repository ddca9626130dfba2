"""An image or an audio clip of a prompt."""

from typing import Literal, NamedTuple

Modality = Literal["image", "audio"]

MediaKey = tuple[Modality, int]
"""Modality and media_id of an item. Items with equal keys have equal embeddings."""


class MediaItem(NamedTuple):
    """An image or an audio clip, whose embeddings take the place of some tokens of a prompt."""

    start_token: int
    """Index in the prompt of the item's first token."""
    num_tokens: int
    media_id: int
    """Id of the item's content among items of its modality."""
    modality: Modality = "image"

    @property
    def key(self) -> MediaKey:
        return self.modality, self.media_id

    @property
    def end_token(self) -> int:
        """Index in the prompt of the first token behind the item."""
        return self.start_token + self.num_tokens

    def is_in(self, first_token: int, num_tokens: int) -> bool:
        """True if one of the num_tokens tokens from first_token on belongs to the item."""
        return self.start_token < first_token + num_tokens and first_token < self.end_token
