"""Life of a part of a request's images in an encode instance.

state     meaning                                    left by
waiting   EncodeImages has come                      next_step -> EncodeStep, or SendEmbeddings if the cache has them
encoding  one forward encodes the parts of a batch   on_step_done -> SendEmbeddings for each part

Source: SGLang 0.5.23, disaggregation/encoder/runtime.py:144, EncoderScheduler. A batch takes the parts that wait, up to
a number of parts, as soon as the batch before has ended; it never waits for more. Embeddings are sent beside the next
batch.
"""

from pdsim.core import messages as m
from pdsim.core.encode.embedding_cache import EmbeddingCache
from pdsim.core.instance import Levels

_WAIT = m.Wait()


class EncodeInstance:
    max_steps_in_flight = 1

    def __init__(
        self, instance_id: str, *, max_batch_size: int, embedding_bytes: int, cache: EmbeddingCache | None
    ) -> None:
        """max_batch_size: maximum number of parts of one forward (SGLANG_ENCODER_MAX_BATCH_SIZE). embedding_bytes:
        bytes of the embeddings of one token.

        cache: embeddings of earlier parts, by the list of their images; None: nothing is kept. Only batches of a single
        part use the cache (disaggregation/encoder/server.py:1743, use_mm_cache).
        """
        self.instance_id = instance_id
        self.waiting: list[m.EncodeImages] = []
        self.encoding: tuple[m.EncodeImages, ...] = ()
        self._max_batch_size = max_batch_size
        self._embedding_bytes = embedding_bytes
        self._cache = cache
        self._num_steps = 0

    def on_message(self, message: m.Message, now_ns: int) -> list[m.Command]:
        if not isinstance(message, m.EncodeImages):
            raise TypeError(f"{self.instance_id}: an encode instance does not take {message}")
        self.waiting.append(message)
        return []

    def next_step(self, now_ns: int) -> tuple[m.EncodeStep | m.Wait, list[m.Command]]:
        commands: list[m.Command] = []
        while self.waiting:
            batch = tuple(self.waiting[: self._max_batch_size])
            del self.waiting[: self._max_batch_size]
            if len(batch) == 1 and self._cache is not None and self._cache.has(_key(batch[0])):
                commands.append(self._send(batch[0]))
                continue
            self.encoding = batch
            self._num_steps += 1
            return m.EncodeStep(self._num_steps - 1, batch), commands
        return _WAIT, commands

    def on_step_done(self, step: m.EncodeStep, result: m.StepResult, now_ns: int) -> list[m.Command]:
        self.encoding = ()
        if len(step.parts) == 1 and self._cache is not None:
            part = step.parts[0]
            self._cache.add(_key(part), part.num_tokens * self._embedding_bytes)
        return [self._send(part) for part in step.parts]

    def _send(self, part: m.EncodeImages) -> m.SendEmbeddings:
        num_bytes = part.num_tokens * self._embedding_bytes
        return m.SendEmbeddings(part.request_id, part.part, self.instance_id, part.language_id, num_bytes)

    def levels(self) -> Levels:
        return Levels(0, 0, 0, num_queued=len(self.waiting), num_running=len(self.encoding))

    def waiting_for(self) -> list[str]:
        """One line for each part that is not encoded."""
        return [f"{self.instance_id}: images of request {p.request_id} wait" for p in (*self.encoding, *self.waiting)]


def _key(part: m.EncodeImages) -> tuple[int, ...]:
    return tuple([image.image_id for image in part.images])
