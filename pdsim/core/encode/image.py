"""An image of a prompt."""

from typing import NamedTuple


class Image(NamedTuple):
    """An image whose embeddings take the place of some tokens of a prompt."""

    start_token: int
    """Index in the prompt of the image's first token."""
    num_tokens: int
    image_id: int
    """Number of the image's content. Images with equal numbers have equal embeddings."""

    def is_in(self, first_token: int, num_tokens: int) -> bool:
        """True if one of the num_tokens tokens from first_token on belongs to the image."""
        return self.start_token < first_token + num_tokens and first_token < self.start_token + self.num_tokens
