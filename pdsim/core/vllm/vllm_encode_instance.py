"""Life of a part of a request's images or audio clips in one of vLLM's encode instances.

state     meaning                                               left by
waiting   EncodeMedia has come                                  next_step: a step takes tokens of the part
begun     steps take the part's tokens, and encode its items    on_step_done, all tokens taken -> MediaEncoded

Source: vLLM 0.33.0. An encode instance has the scheduler of all servers, without KV and sampling (v1/core/sched/
scheduler.py:2421). A part is a prompt, and has ended when steps have taken all its tokens. A step takes tokens of begun
parts first, then of waiting parts, up to step_tokens, as far as the encoder cache has room. Embeddings are copied to
host memory while the next step runs (ec_connector/cpu/worker/__init__.py, flush_saves). pdsim does not limit the size
of this host memory. Between its steps, the instance answers servers that want to read embeddings
(ec_connector/cpu/session.py, poll_step).
"""

from itertools import chain

from pdsim.core import messages as m
from pdsim.core.instance import Levels, Request
from pdsim.core.sequence import Spans
from pdsim.core.vllm.encoder_cache import EncoderCache
from pdsim.dataclass import dataclass

_WAIT = m.Wait()


@dataclass(slots=True, eq=False)
class _Part:
    asked: m.EncodeMedia
    request: Request
    """The request by which the scheduler handles this part of a client's request. Its prompt consists of the images or
    audio clips in `asked`.
    """


class VllmEncodeInstance:
    max_steps_in_flight = 1

    def __init__(self, instance_id: str, *, step_tokens: int, encoder_tokens: int) -> None:
        """step_tokens: maximum tokens of a step (max_num_batched_tokens). encoder_tokens: maximum tokens of items whose
        embeddings are kept on the GPU.
        """
        self.instance_id = instance_id
        self.waiting: dict[int, _Part] = {}
        self.begun: dict[int, _Part] = {}
        """waiting, begun: parts by serial number, in the order in which they came (waiting) or began (begun)."""
        self._taken: list[tuple[_Part, int]] = []
        """Parts of the step under way, and the number of tokens that it takes of each."""
        self._asks: list[m.AskEmbeddings] = []
        """Questions whether embeddings may be read, which came during the step under way."""
        self._step_tokens = step_tokens
        self._encoder = EncoderCache(encoder_tokens)
        self._num_parts = self._num_steps = 0

    def on_message(self, message: m.Message, now_ns: int) -> list[m.Command]:
        if isinstance(message, m.EncodeMedia):
            self._num_parts += 1
            self.waiting[self._num_parts] = self._part(message)
            return []
        if not isinstance(message, m.AskEmbeddings):
            raise TypeError(f"{self.instance_id}: an encode instance does not take {message}")
        self._asks.append(message)
        return [] if self._taken else self._answers()

    def next_step(self, now_ns: int) -> tuple[m.EncodeStep | m.Wait, list[m.Command]]:
        encoded: list[m.EncodeMedia] = []
        num_left = self._step_tokens
        self._encoder.begin_step()
        for part in chain(self.begun.values(), self.waiting.values()):
            if num_left <= 0:
                break
            request = part.request
            choice = self._encoder.choose(request, min(num_left, request.num_tokens - request.num_scheduled_tokens))
            if choice.num_tokens <= 0:
                continue
            self._encoder.take(request, choice)
            request.num_scheduled_tokens += choice.num_tokens
            num_left -= choice.num_tokens
            self._taken.append((part, choice.num_tokens))
            items = tuple([part.asked.items[place] for place in choice.new.values()])
            encoded.append(m.EncodeMedia(part.asked.request_id, part.asked.part, items, part.asked.language_id))
        if not self._taken:
            return _WAIT, []
        taken = {part.request.request_id: part for part, _ in self._taken}
        self.begun |= taken
        for number in taken:
            self.waiting.pop(number, None)
        self._num_steps += 1
        return m.EncodeStep(self._num_steps - 1, tuple(encoded)), []

    def on_step_done(self, step: m.EncodeStep, result: m.StepResult, now_ns: int) -> list[m.Command]:
        commands: list[m.Command] = []
        for part, num_tokens in self._taken:
            request = part.request
            request.num_computed_tokens += num_tokens
            self._encoder.end_chunk(request)
            if request.num_computed_tokens == request.num_tokens:
                del self.begun[request.request_id]
                done = m.MediaEncoded(part.asked.request_id, part.asked.part)
                commands.append(m.Send(m.embeddings_of(part.asked.language_id), done))
        self._taken = []
        return [*commands, *self._answers()]

    def levels(self) -> Levels:
        return Levels(0, 0, 0, num_queued=len(self.waiting), num_running=len(self.begun))

    def waiting_for(self) -> list[str]:
        """Returns one line of text, with instance and request id, for each part that is not encoded."""
        left = [part.asked.request_id for part in chain(self.begun.values(), self.waiting.values())]
        return [f"{self.instance_id}: media of request {request_id} wait" for request_id in left]

    def _part(self, asked: m.EncodeMedia) -> _Part:
        start, media = 0, []
        for item in asked.items:
            media.append(item._replace(start_token=start))
            start += item.num_tokens
        return _Part(asked, Request(self._num_parts, 0, Spans([]), start, media=tuple(media)))

    def _answers(self) -> list[m.Command]:
        asks, self._asks = self._asks, []
        return [m.Send(ask.language_id, m.EmbeddingsGranted(ask.request_id, ask.item)) for ask in asks]
