"""Requests whose output tokens an instance asks the driver for. The prefix cache needs the tokens to store the KV of
outputs.

state       meaning                                            when the driver sends the outputs (on_put_out)
retracted   the request lost its pages                         they are cached when the request has its KV again
closing     the request is aborted, and its last step has run  all its KV is cached, and its pages are freed
"""

from collections.abc import Mapping
from typing import Generic

from pdsim.core.decode.running_batch import RequestT, RunningBatch
from pdsim.core.memory.kv_cache import KvCache
from pdsim.core.messages import AskOutput, Command, PutOut


class AskedOutputs(Generic[RequestT]):
    def __init__(self, instance_id: str, batch: RunningBatch[RequestT], cache: KvCache) -> None:
        self.closing: dict[int, RequestT] = {}
        self._instance_id = instance_id
        self._batch = batch
        self._cache = cache

    def ask(self, request: RequestT) -> list[Command]:
        """Asks the driver for the output tokens of a request that left the batch. Returns no command if the instance
        has no prefix cache.
        """
        if self._cache.prefix_cache is None:
            return []
        return [AskOutput(self._instance_id, request.request_id, request.num_output_tokens)]

    def close(self, request: RequestT) -> list[Command]:
        """Puts the KV of an aborted request into the prefix cache as soon as the driver sends its output tokens, and
        returns the command that asks for these tokens. Without a prefix cache, frees the pages at once and returns no
        command.
        """
        if self._cache.prefix_cache is None:
            self._cache.drop(request.lease)
            return []
        self.closing[request.request_id] = request
        return self.ask(request)

    def on_put_out(self, message: PutOut, retracted: Mapping[int, RequestT]) -> None:
        if request := self.closing.pop(message.request_id, None):
            self._batch.close(request, message.output)
        elif waiting := retracted.get(message.request_id):
            waiting.output = message.output
