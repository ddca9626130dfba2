"""The part of a proxy that gives images and audio clips to vLLM's encode instances, and keeps a request until all are
encoded.

state     meaning                                    left by
waiting   encode instances have the media            MediaEncoded for each part -> the language server gets the request
                                                     Cancel, Abort -> the request is forgotten

Source: vLLM's examples/disaggregated/disaggregated_encoder/disagg_epd_proxy.py (0134b93), fanout_encoder_primer. Items
go to the encode instances in rotation, and the next request continues the rotation. The images that one encode instance
gets are one part, and each audio clip is a part. In pdsim, each language server has a proxy and a rotation of its own.
"""

from collections.abc import Sequence
from dataclasses import replace

from pdsim.core import messages as m
from pdsim.core.encode.media_item import MediaItem
from pdsim.dataclass import dataclass


@dataclass(slots=True)
class _Waiting:
    new: m.NewRequest
    missing: set[int]
    """Indices of the request's parts that are not encoded."""


class EncodingProxy:
    def __init__(self, language_id: str, encode_ids: Sequence[str]) -> None:
        """language_id: the prefill or aggregated instance that computes the requests."""
        self.instance_id = m.embeddings_of(language_id)
        self.waiting: dict[int, _Waiting] = {}
        self._language_id = language_id
        self._encode_ids = list(encode_ids)
        self._turn = 0

    def on_message(self, message: m.Message, now_ns: int) -> list[m.Command]:
        match message:
            case m.NewRequest():
                return self._divide(message)
            case m.MediaEncoded():
                return self._on_encoded(message, now_ns)
            case m.Cancel() | m.Abort():
                self.waiting.pop(message.request_id, None)
                return []
            case _:
                raise TypeError(f"{self.instance_id} does not take {message}")

    def _divide(self, new: m.NewRequest) -> list[m.Command]:
        num_encoders = len(self._encode_ids)
        encode_ids = tuple([self._encode_ids[(self._turn + i) % num_encoders] for i in range(len(new.media))])
        self._turn = (self._turn + len(new.media)) % num_encoders
        images: dict[str, list[MediaItem]] = {}
        parts: list[tuple[str, list[MediaItem]]] = []
        for encode_id, item in zip(encode_ids, new.media, strict=True):
            if item.modality != "image":
                parts.append((encode_id, [item]))
            elif encode_id in images:
                images[encode_id].append(item)
            else:
                images[encode_id] = [item]
                parts.append((encode_id, images[encode_id]))
        self.waiting[new.request_id] = _Waiting(replace(new, encode_ids=encode_ids), set(range(len(parts))))
        return [
            m.Send(encode_id, m.EncodeMedia(new.request_id, number, tuple(items), self._language_id))
            for number, (encode_id, items) in enumerate(parts)
        ]

    def _on_encoded(self, encoded: m.MediaEncoded, now_ns: int) -> list[m.Command]:
        request = self.waiting.get(encoded.request_id)
        if request is None:
            return []  # it was given up meanwhile
        request.missing.discard(encoded.part)
        if request.missing:
            return []
        del self.waiting[encoded.request_id]
        return [m.Send(self._language_id, replace(request.new, arrival_ns=now_ns))]
