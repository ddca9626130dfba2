"""Places images in the prompts of a trace. Traces do not say where the images stand. Each prompt is assumed to end with
the images that its row names.
"""

from collections.abc import Sequence
from itertools import count

from pdsim.core.encode.media_item import MediaItem
from pdsim.core.sequence import Spans
from pdsim.workload.request_spec import RequestSpec


class TraceImages:
    """Identifies the images of a trace by numbers, and places them in prompts. Images of equal names, such as URLs,
    have the same number.
    """

    def __init__(self, image_tokens: int) -> None:
        """image_tokens: number of tokens of each image. 0: not known, so that no request gets images."""
        self.num_images = 0
        self._tokens = image_tokens
        self._numbers = count()
        self._known: dict[str, int] = {}
        self._next: list[int] = []
        """Images of the prompt that is being read."""
        self._placed: dict[int, tuple[MediaItem, ...]] = {}
        """Images of each request that has any, by request id."""

    def read(self, names: Sequence[str]) -> int:
        """Notes the images of the next prompt by their names, and returns the number of tokens that they add. Each
        empty name is a new image.
        """
        self.num_images += len(names)
        self._next = [
            self._known.setdefault(name, next(self._numbers)) if name else next(self._numbers) for name in names
        ]
        return self._tokens * len(names)

    def placed(self, spec: RequestSpec, own: Spans) -> RequestSpec:
        """Returns the request with places for its images: the images that the last call of `read` noted, and those of
        the turn before if the prompt continues that turn. Images for which the prompt is too short are left out. own:
        the prompt as the request's row alone gives it. spec.prompt is this same object if the prompt continues no turn.
        """
        own_images, self._next = self._next, []
        before = self._placed.get(spec.after[0], ()) if spec.after and spec.prompt is not own else ()
        if not self._tokens or not (own_images or before):
            return spec
        start = len(spec.prompt) - self._tokens * len(own_images)
        images = [image for image in before if image.start_token + image.num_tokens <= start]
        for number in own_images:
            if start >= 0:
                images.append(MediaItem(start, self._tokens, number))
            start += self._tokens
        self._placed[spec.request_id] = tuple(images)
        return spec._replace(media=tuple(images))
