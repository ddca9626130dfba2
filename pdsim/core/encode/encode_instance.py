"""Life of a part of a request's images or audio clips in an encode instance.

state     meaning                                    left by
waiting   EncodeMedia has come                      next_step -> EncodeStep, or SendEmbeddings if the cache has them
encoding  one forward encodes the parts of a batch   on_step_done -> SendEmbeddings for each part

Source: SGLang 0.5.23, disaggregation/encoder/runtime.py:144, EncoderScheduler. A batch takes the parts that wait, up to
a number of parts, as soon as the batch before has ended; it never waits for more. A batch of images and audio clips is
encoded in two forwards (:211, _batch_worker), the modality of its first part first. Embeddings are sent while the next
forward runs.
"""

from collections.abc import Mapping
from itertools import chain

from pdsim.core import messages as m
from pdsim.core.encode.embedding_cache import EmbeddingCache
from pdsim.core.encode.media_item import Modality
from pdsim.core.instance import Levels

_WAIT = m.Wait()


class EncodeInstance:
    max_steps_in_flight = 1

    def __init__(
        self,
        instance_id: str,
        *,
        max_batch_size: int,
        embedding_bytes: Mapping[str, int],
        cache: EmbeddingCache | None,
    ) -> None:
        """max_batch_size: maximum number of EncodeMedia messages (parts of a request's images or clips) in one forward
        (SGLANG_ENCODER_MAX_BATCH_SIZE). embedding_bytes: bytes of the embeddings of one token, by modality.

        cache: embeddings of earlier parts, by the list of their items; None: nothing is kept. Only forwards of a single
        part use the cache (disaggregation/encoder/server.py:1743, use_mm_cache).
        """
        self.instance_id = instance_id
        self.waiting: list[m.EncodeMedia] = []
        self.batched: list[tuple[m.EncodeMedia, ...]] = []
        """Later forwards of the batch: parts of another modality than those that are being encoded."""
        self.encoding: tuple[m.EncodeMedia, ...] = ()
        self._max_batch_size = max_batch_size
        self._embedding_bytes = embedding_bytes
        self._cache = cache
        self._num_steps = 0

    def on_message(self, message: m.Message, now_ns: int) -> list[m.Command]:
        if not isinstance(message, m.EncodeMedia):
            raise TypeError(f"{self.instance_id}: an encode instance does not take {message}")
        self.waiting.append(message)
        return []

    def next_step(self, now_ns: int) -> tuple[m.EncodeStep | m.Wait, list[m.Command]]:
        commands: list[m.Command] = []
        while self.batched or self.waiting:
            if not self.batched:
                self._take_batch()
            parts = self.batched.pop(0)
            if len(parts) == 1 and self._cache is not None and self._cache.has(_key(parts[0])):
                commands.append(self._send(parts[0]))
                continue
            self.encoding = parts
            self._num_steps += 1
            return m.EncodeStep(self._num_steps - 1, parts), commands
        return _WAIT, commands

    def _take_batch(self) -> None:
        groups: dict[str, list[m.EncodeMedia]] = {}
        for part in self.waiting[: self._max_batch_size]:
            groups.setdefault(part.modality, []).append(part)
        del self.waiting[: self._max_batch_size]
        self.batched = [tuple(parts) for parts in groups.values()]

    def on_step_done(self, step: m.EncodeStep, result: m.StepResult, now_ns: int) -> list[m.Command]:
        self.encoding = ()
        if len(step.parts) == 1 and self._cache is not None:
            part = step.parts[0]
            self._cache.add(_key(part), self._num_bytes(part))
        return [self._send(part) for part in step.parts]

    def _send(self, part: m.EncodeMedia) -> m.SendEmbeddings:
        return m.SendEmbeddings(part.request_id, part.part, self.instance_id, part.language_id, self._num_bytes(part))

    def _num_bytes(self, part: m.EncodeMedia) -> int:
        return part.num_tokens * self._embedding_bytes[part.modality]

    def _left(self) -> list[m.EncodeMedia]:
        """Parts of requests' images and audio clips that are not encoded yet."""
        return [*self.encoding, *chain.from_iterable(self.batched), *self.waiting]

    def levels(self) -> Levels:
        return Levels(0, 0, 0, num_queued=len(self._left()) - len(self.encoding), num_running=len(self.encoding))

    def waiting_for(self) -> list[str]:
        """One line for each part that is not encoded."""
        return [f"{self.instance_id}: media of request {part.request_id} wait" for part in self._left()]


def _key(part: m.EncodeMedia) -> tuple[Modality, tuple[int, ...]]:
    return part.modality, tuple([item.media_id for item in part.items])
