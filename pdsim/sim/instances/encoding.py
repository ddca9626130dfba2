"""Drives encode instances, and language servers whose images and audio clips are encoded elsewhere."""

from collections.abc import Mapping
from typing import Any

from simpy.events import EventPriority

from pdsim.core import messages as m
from pdsim.core.encode.encode_instance import EncodeInstance
from pdsim.core.vllm.vllm_encode_instance import VllmEncodeInstance
from pdsim.cost.encoding import EncoderTimes
from pdsim.metrics.records import StepRecord
from pdsim.sim.bus import Bus, Driver
from pdsim.sim.instances.actor import Actor
from pdsim.sim.links.embeddings import EmbeddingMoves


class LanguageActor(Actor):
    """Drives a prefill or aggregated instance. Requests with images or audio clips reach the instance's loop only when
    all their embeddings have arrived; until then the server's receiver of embeddings holds them. With vLLM, they wait
    at the proxy until all their media are encoded.
    """

    def post(self, message: m.Message) -> None:
        is_encoded = not (isinstance(message, m.NewRequest) and message.media and not message.encode_ids)
        if not is_encoded or isinstance(message, m.Cancel | m.Abort):
            self._bus.tell_agent(m.embeddings_of(self.instance.instance_id), message)
        if is_encoded:
            super().post(message)


class EncodeActor(Driver):
    """Runs the forwards of one encode instance, one at a time."""

    def __init__(
        self,
        bus: Bus,
        instance: EncodeInstance | VllmEncodeInstance,
        times: Mapping[str, EncoderTimes],
        moves: EmbeddingMoves,
        order: EventPriority,
    ) -> None:
        """times: times of a forward by modality: image, audio. moves: sends the embeddings to the servers that need
        them. order: priority of the instance's choices among events of the same instant.
        """
        super().__init__(bus.recorded(instance))
        self._encoder: Any = self.instance
        self._bus = bus
        self._timeline = bus.timeline
        self._recorder = bus.recorder
        self._times = times
        self._moves = moves
        self._order = order
        self._is_idle = True

    def start(self) -> None:
        pass

    def post(self, message: m.Message) -> None:
        self._bus.carry_out(self.instance.on_message(message, self._timeline.now_ns))
        if self._is_idle:
            self._is_idle = False
            self._timeline.after(0, self._choose, order=self._order)

    def _choose(self, _: None = None) -> None:
        now_ns = self._timeline.now_ns
        step, commands = self._encoder.next_step(now_ns)
        self._send(commands, now_ns)
        if isinstance(step, m.Wait):
            self._is_idle = True
            return
        items = [item for part in step.parts for item in part.items]
        tokens = [item.num_tokens for item in items]
        duration_ns = sum(
            times.ns([item.num_tokens for item in items if item.modality == modality])
            for modality, times in self._times.items()
        )
        sizes = (1, len(step.parts), sum(tokens), 0, 0.0)
        record = StepRecord(self.instance.instance_id, "encode", now_ns, duration_ns, duration_ns, *sizes)
        self._recorder.on_encoded(record)
        self._timeline.after(duration_ns, self._end, (step, now_ns), self._order)

    def _end(self, begun: tuple[m.EncodeStep, int]) -> None:
        step, start_ns = begun
        self._send(self._encoder.on_step_done(step, m.StepResult(), self._timeline.now_ns), start_ns)
        self._choose()

    def _send(self, commands: list[m.Command], start_ns: int) -> None:
        now_ns = self._timeline.now_ns
        for command in commands:
            if isinstance(command, m.SendEmbeddings):
                self._moves.begin(command, start_ns, now_ns)
                continue
            if isinstance(command, m.Send) and isinstance(done := command.message, m.MediaEncoded):
                self._recorder.on_embeddings(done.request_id, self.instance.instance_id, start_ns, now_ns, now_ns)
            self._bus.carry_out([command])
