"""An image or an audio clip of a prompt."""

from typing import Literal, NamedTuple

Modality = Literal["image", "audio"]


class MediaItem(NamedTuple):
    """An image or an audio clip, whose embeddings take the place of some tokens of a prompt."""

    start_token: int
    """Index in the prompt of the item's first token."""
    num_tokens: int
    media_id: int
    """Id of the item's content. Items of one modality with equal ids have equal embeddings."""
    modality: Modality = "image"

    @property
    def end_token(self) -> int:
        """Index in the prompt of the first token behind the item."""
        return self.start_token + self.num_tokens

    def is_in(self, first_token: int, num_tokens: int) -> bool:
        """True if one of the num_tokens tokens from first_token on belongs to the item."""
        return self.start_token < first_token + num_tokens and first_token < self.end_token
