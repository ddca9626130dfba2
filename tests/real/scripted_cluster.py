"""A cluster for tests of the front end, in one process and without a model. Each token is computed from the sum of the
prompt and the token's position.
"""

import asyncio
from itertools import count
from typing import Any

from pdreal.control.requests import Request, Sampling
from pdreal.serve.metrics import Metrics
from pdreal.serve.service import Entrance, Service
from pdreal.serve.tokenizer import Tokenizer
from pdreal.settings.scenario import Room

from pdsim.core.instance import Levels
from pdsim.core.sequence import TokenIds

VOCAB_SIZE = 512
END_TOKEN = 0
NUM_CACHED_TOKENS = 2


def true_tokens(prompt: list[int], num_tokens: int) -> list[int]:
    return [1 + (sum(prompt) + 37 * place) % (VOCAB_SIZE - 1) for place in range(num_tokens)]


SCRIPT = {1: "hangs", 2: "fails", 3: "fails later", 4: "ends early", 5: "hangs later"}
"""Fate of a request whose prompt has this token. "later": after two tokens."""


NOTHING = {"num_retracted": 0, "blocked_by": ""}


class ScriptedCluster:
    """Takes the place of the Launcher. Requests whose prompts have a token of SCRIPT fail, hang or end early."""

    def __init__(self) -> None:
        self._ids = count()
        self.under_way: dict[int, asyncio.Task] = {}
        self.submitted: asyncio.Queue[int] = asyncio.Queue()
        self.aborted: asyncio.Queue[int] = asyncio.Queue()
        self.num_flushed = 0
        self.failure: str | None = None
        self.missing_roles: list[str] = []
        self._requests: dict[int, Request] = {}

    def submit(self, prompt_ids: list[int], sampling: Sampling) -> Request:
        request = Request(next(self._ids), TokenIds(prompt_ids), sampling)
        self._requests[request.request_id] = request
        task = asyncio.get_running_loop().create_task(self._run(request, prompt_ids, sampling))
        self.under_way[request.request_id] = task
        self.submitted.put_nowait(request.request_id)
        task.add_done_callback(lambda _: self.under_way.pop(request.request_id, None))
        return request

    def abort(self, request_id: int, reason: str = "aborted by the client") -> None:
        self.under_way.pop(request_id).cancel()
        self._requests[request_id].end(reason)
        self.aborted.put_nowait(request_id)

    def load(self) -> dict[str, Levels]:
        return {
            "prefill-0": Levels(1, 2, 5, num_queued=3, num_transferring=4, num_ready=0, num_running=6, **NOTHING),
            "decode-0": Levels(8, 0, 0, num_queued=3, num_transferring=4, num_ready=5, num_running=6, **NOTHING),
        }

    def flush_cache(self) -> None:
        self.num_flushed += 1

    @property
    def num_live_requests(self) -> int:
        return len(self.under_way)

    async def _run(self, request: Request, prompt: list[int], sampling: Sampling) -> None:
        request.num_cached_tokens = NUM_CACHED_TOKENS
        fate = next((SCRIPT[token] for token in prompt if token in SCRIPT), "")
        for place, token in enumerate(true_tokens(prompt, sampling.max_tokens)):
            await asyncio.sleep(0)
            is_later = place == 2
            if fate == "hangs" or (fate == "hangs later" and is_later):
                await asyncio.Event().wait()
            if fate == "fails" or (fate == "fails later" and is_later):
                request.end("decode-0 is down")
                return
            if fate == "ends early" and is_later and not sampling.ignore_eos:
                request.put(END_TOKEN)
                break
            request.put(token)
        request.end()


def scripted_service(cluster: ScriptedCluster, **entrance: Any) -> Service:
    return Service(
        cluster=cluster,
        model_name="tiny",
        tokenizer=Tokenizer(VOCAB_SIZE),
        room=Room(prompt_tokens=100, total_tokens=150),
        page_size=16,
        metrics=Metrics("tiny"),
        entrance=Entrance(**entrance),
    )
