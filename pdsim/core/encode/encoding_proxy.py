"""The part of a proxy that gives images and audio clips to vLLM's encode instances, and keeps a request until
MediaEncoded has come for each part.

Source: vLLM's examples/disaggregated/disaggregated_encoder/disagg_epd_proxy.py (0134b93), fanout_encoder_primer. Items
go to the encode instances in rotation, and the next request continues the rotation. The images that one encode instance
gets are one part, and each audio clip is a part. In pdsim, each language server has a proxy and a rotation of its own.
"""

from collections.abc import Sequence
from dataclasses import replace

from pdsim.core import messages as m
from pdsim.core.encode.divided_requests import DividedRequests, Part
from pdsim.core.encode.media_item import MediaItem


class EncodingProxy(DividedRequests):
    def __init__(self, language_id: str, encode_ids: Sequence[str]) -> None:
        """language_id: prefill or aggregated instance that computes the requests. encode_ids: the encode instances."""
        super().__init__(language_id, encode_ids)
        self._turn = 0

    def _divide(self, new: m.NewRequest) -> tuple[m.NewRequest, list[Part]]:
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
        return replace(new, encode_ids=encode_ids), [
            (encode_id, m.EncodeMedia(new.request_id, number, tuple(items), self._language_id))
            for number, (encode_id, items) in enumerate(parts)
        ]

    def _go_on(self, new: m.NewRequest) -> m.Command:
        return m.Send(self._language_id, new)
