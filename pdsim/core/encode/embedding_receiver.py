"""The part of a language server that divides a request's images and audio clips into parts, gives each part to an
encode instance, and keeps the request until EmbeddingsArrived has come for each part.

Source: SGLang 0.5.23, disaggregation/encoder/receiver.py. Images come first (:2626). In the order of the prompt, each
encode instance gets an equal number of images; the remainder goes, one image each, to the first instances of a random
order. The audio clips are divided in the same way; their remainder goes to the next instances of that random order
(:2557, _assign_items_by_modality). A request joins the scheduler's queue when its last part has arrived (:2314,
_process_waiting_requests), so it may overtake earlier requests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import get_args

from pdsim.core import messages as m
from pdsim.core.encode.divided_requests import DividedRequests, Part
from pdsim.core.encode.media_item import Modality
from pdsim.policy.draws import Draws

MODALITIES: tuple[Modality, ...] = get_args(Modality)


class EmbeddingReceiver(DividedRequests):
    def __init__(self, language_id: str, encode_ids: Sequence[str], *, seed: int) -> None:
        """language_id: the prefill or aggregated instance that computes the requests. seed: decides the random order of
        encode instances.
        """
        super().__init__(language_id, encode_ids)
        self._draws = Draws()
        self._seed = seed

    def _divide(self, new: m.NewRequest) -> tuple[m.NewRequest, list[Part]]:
        parts: list[Part] = []
        order = self._order()
        for modality in MODALITIES:
            items = tuple([item for item in new.media if item.modality == modality])
            first = 0
            for encode_id, share in zip(self._encode_ids, self._shares(len(items), order), strict=True):
                if share:
                    own = items[first : first + share]
                    parts.append((encode_id, m.EncodeMedia(new.request_id, len(parts), own, self._language_id)))
                    first += share
        return replace(new, media=()), parts

    def _go_on(self, new: m.NewRequest) -> m.Command:
        return m.Tell(self._language_id, new)

    def _order(self) -> Iterator[int]:
        """Yields the indices of all encode instances in a random order, which then repeats without end."""
        order: list[int] = []
        others = list(range(len(self._encode_ids)))
        while others:
            order.append(others.pop(self._draws.below(len(others), self._seed)))
            yield order[-1]
        yield from cycle(order)

    def _shares(self, num_items: int, order: Iterator[int]) -> list[int]:
        """Returns the number of items for each encode instance, by its index. Items that do not divide evenly go one by
        one to the instances whose indices `order` yields next.
        """
        num_encoders = len(self._encode_ids)
        least, rest = divmod(num_items, num_encoders)
        shares = [least] * num_encoders
        for index in islice(order, rest):
            shares[index] += 1
        return shares
