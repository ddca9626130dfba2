"""Requests whose images and audio clips are divided into parts. One encode instance encodes all items of a part. An
encode instance may get several parts of a request.

state     meaning                                    left by
waiting   encode instances have the parts            the last part is done -> the request goes on to the language server
                                                     Cancel, Abort -> the request is forgotten
"""

from collections.abc import Sequence
from dataclasses import replace

from pdsim.core import messages as m
from pdsim.dataclass import dataclass

Part = tuple[str, m.EncodeMedia]
"""Id of an encode instance, and the message with the items that it encodes."""


@dataclass(slots=True)
class _Waiting:
    new: m.NewRequest
    missing: set[int]
    """Indices of the request's parts that are not done."""


class DividedRequests:
    """Divides the images and audio clips of each request into parts for encode instances, and keeps the request until
    all its parts are done. A part is done when MediaEncoded (for EncodingProxy) or EmbeddingsArrived (for
    EmbeddingReceiver) has come for it.
    """

    def __init__(self, language_id: str, encode_ids: Sequence[str]) -> None:
        """language_id: the prefill or aggregated instance that computes requests. encode_ids: its encode instances."""
        self.instance_id = m.embeddings_of(language_id)
        self.waiting: dict[int, _Waiting] = {}
        self._language_id = language_id
        self._encode_ids = list(encode_ids)

    def on_message(self, message: m.Message, now_ns: int) -> list[m.Command]:
        match message:
            case m.NewRequest():
                new, parts = self._divide(message)
                self.waiting[new.request_id] = _Waiting(new, {part.part for _, part in parts})
                return [m.Send(encode_id, part) for encode_id, part in parts]
            case m.EmbeddingsArrived() | m.MediaEncoded():
                return self._on_done(message, now_ns)
            case m.Cancel() | m.Abort():
                self.waiting.pop(message.request_id, None)
                return []
            case _:
                raise TypeError(f"{self.instance_id} does not take {message}")

    def _divide(self, new: m.NewRequest) -> tuple[m.NewRequest, list[Part]]:
        """Returns (the request that goes on when all parts are done, its parts)."""
        raise NotImplementedError

    def _go_on(self, new: m.NewRequest) -> m.Command:
        """Returns the command that gives `new` to the language server, when all its parts are done."""
        raise NotImplementedError

    def _on_done(self, done: m.EmbeddingsArrived | m.MediaEncoded, now_ns: int) -> list[m.Command]:
        request = self.waiting.get(done.request_id)
        if request is None:
            return []  # it was given up meanwhile
        request.missing.discard(done.part)
        if request.missing:
            return []
        del self.waiting[done.request_id]
        return [self._go_on(replace(request.new, arrival_ns=now_ns))]
