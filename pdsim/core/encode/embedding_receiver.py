"""The part of a language server that gives images and audio clips to encode instances, and keeps a request until all
its embeddings have arrived.

state     meaning                                    left by
waiting   encode instances have the media            EmbeddingsArrived for each part -> the request joins the queue
                                                     Cancel, Abort -> the request is forgotten

Source: SGLang 0.5.23, disaggregation/encoder/receiver.py. A request's images are divided over all encode instances in
equal numbers, in the order of the prompt; images left over go to instances in random order. Then the audio clips are
divided in the same way; clips left over go to the next instances of this order (:2557, _assign_items_by_modality, with
images before audio by :2626). A request joins the scheduler's queue when its last part has arrived (:2314,
_process_waiting_requests), so it may overtake earlier requests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import get_args

from pdsim.core import messages as m
from pdsim.core.encode.media_item import Modality
from pdsim.dataclass import dataclass
from pdsim.policy.draws import Draws

MODALITIES: tuple[Modality, ...] = get_args(Modality)


@dataclass(slots=True)
class _Waiting:
    new: m.NewRequest
    missing: set[int]
    """Indices of the request's parts whose embeddings have not arrived."""


class EmbeddingReceiver:
    def __init__(self, language_id: str, encode_ids: Sequence[str], *, seed: int) -> None:
        """language_id: the prefill or aggregated instance that computes the requests. seed: decides the random order of
        encode instances.
        """
        self.instance_id = m.embeddings_of(language_id)
        self.waiting: dict[int, _Waiting] = {}
        self._language_id = language_id
        self._encode_ids = list(encode_ids)
        self._draws = Draws()
        self._seed = seed

    def on_message(self, message: m.Message, now_ns: int) -> list[m.Command]:
        match message:
            case m.NewRequest():
                return self._divide(message)
            case m.EmbeddingsArrived():
                return self._on_arrived(message, now_ns)
            case m.Cancel() | m.Abort():
                self.waiting.pop(message.request_id, None)
                return []
            case _:
                raise TypeError(f"{self.instance_id} does not take {message}")

    def _divide(self, new: m.NewRequest) -> list[m.Command]:
        commands: list[m.Command] = []
        part = 0
        order = self._order()
        for modality in MODALITIES:
            items = tuple([item for item in new.media if item.modality == modality])
            first = 0
            for encode_id, share in zip(self._encode_ids, self._shares(len(items), order), strict=True):
                if share:
                    own = items[first : first + share]
                    commands.append(m.Send(encode_id, m.EncodeMedia(new.request_id, part, own, self._language_id)))
                    first, part = first + share, part + 1
        self.waiting[new.request_id] = _Waiting(new, set(range(part)))
        return commands

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

    def _on_arrived(self, arrived: m.EmbeddingsArrived, now_ns: int) -> list[m.Command]:
        request = self.waiting.get(arrived.request_id)
        if request is None:
            return []  # it was given up meanwhile
        request.missing.discard(arrived.part)
        if request.missing:
            return []
        del self.waiting[arrived.request_id]
        return [m.Tell(self._language_id, replace(request.new, media=(), arrival_ns=now_ns))]
