"""Embeddings that a vLLM server reads from encode instances into its host memory (ECCPUConnector with ec_enable_nixl).

state     meaning                                                     left by
asked     a step looked at a prompt that needs the item               EmbeddingsGranted
granted   the encode instance lets the server read                    the next step -> SendEmbeddings
reading   NIXL reads                                                  EmbeddingsArrived
arrived   host memory has the embeddings                              the next step
ready     prompts that need the item may begin                        never: pdsim does not limit host memory

Source: vLLM 0.33.0, ec_connector/cpu/scheduler/__init__.py:_admit_item and session.py. The scheduler looks at answers
and at ends of reads only when it chooses a step, so these events wait for the end of the step under way. A prompt waits
for all items that have tokens behind its cached prefix, and lets later prompts pass (v1/core/sched/scheduler.py:1247).
"""

from collections.abc import Mapping

from pdsim.core import messages as m
from pdsim.core.encode.media_item import MediaKey
from pdsim.core.instance import Request
from pdsim.dataclass import dataclass


@dataclass(slots=True, eq=False)
class _Read:
    key: MediaKey
    command: m.SendEmbeddings


class EmbeddingReads:
    def __init__(self, instance_id: str, embedding_bytes: Mapping[str, int]) -> None:
        """embedding_bytes: bytes of the embeddings of one token, by modality."""
        self.ready: set[MediaKey] = set()
        """Items whose embeddings prompts may use: host memory had the embeddings at the last `poll`."""
        self._instance_id = instance_id
        self._embedding_bytes = embedding_bytes
        self._under_way: dict[tuple[int, int], _Read] = {}
        """Reads that are asked, granted or reading, by (id of the request that asked, index of the item in its media).
        """
        self._wanted: set[MediaKey] = set()
        """Items that were asked for and are not `ready` yet."""
        self._granted: list[_Read] = []
        self._arrived: list[_Read] = []
        self._commands: list[m.Command] = []

    def on_message(self, message: m.Message) -> bool:
        """Handles an encode instance's answer or the end of a read. Returns False for all other messages."""
        if isinstance(message, m.EmbeddingsGranted):
            self._granted.append(self._under_way[message.request_id, message.item])
        elif isinstance(message, m.EmbeddingsArrived):
            self._arrived.append(self._under_way.pop((message.request_id, message.part)))
        else:
            return False
        return True

    def poll(self) -> None:
        """Begins the reads that encode instances have granted, and makes the embeddings of ended reads usable. Each
        step calls this first.
        """
        self._commands += [read.command for read in self._granted]
        arrived = {read.key for read in self._arrived}
        self.ready |= arrived
        self._wanted -= arrived
        self._granted, self._arrived = [], []

    def must_wait(self, request: Request, num_cached_tokens: int) -> bool:
        """True if an item with tokens behind the prompt's first num_cached_tokens has no embeddings in host memory yet.
        Asks encode instances for such embeddings if no earlier call has asked for them.
        """
        waits = False
        for place, encode_id in enumerate(request.encode_ids):
            item = request.media[place]
            key = item.key
            if item.end_token <= num_cached_tokens or key in self.ready:
                continue
            waits = True
            if key not in self._wanted:
                self._wanted.add(key)
                num_bytes = item.num_tokens * self._embedding_bytes[item.modality]
                move = m.SendEmbeddings(request.request_id, place, encode_id, self._instance_id, num_bytes)
                self._under_way[request.request_id, place] = _Read(key, move)
                ask = m.AskEmbeddings(request.request_id, place, self._instance_id)
                self._commands.append(m.Send(encode_id, ask))
        return waits

    def take_commands(self) -> list[m.Command]:
        """Returns messages and reads that were decided since the last call, and forgets them."""
        commands, self._commands = self._commands, []
        return commands
