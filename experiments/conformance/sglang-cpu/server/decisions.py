"""Writes down what a scheduler of SGLang is told and what it decides, a row for each, in order.

[iteration of its loop, seconds, what, ...]:
  new      request, prompt tokens, longest output               taken from its socket
  granted  requests                                             prefill: decode has pages for them
  met      requests                                             decode: prefill has answered, pages may be granted
  admitted [request, cached tokens]                             decode: pages are granted
  arrived  requests                                             decode: all KV is there
  resumed  requests                                             decode: retracted before, pages granted again
  merged   [request, whether it ends with its first token]      decode: joins the batch
  retracted requests
  prefill  [request, context, new tokens], available, evictable chosen, pages taken
  decode   requests, available, evictable                       chosen, pages taken
  ended    [request, output]                                    with this step
  failed   request                                              does not fit
  sent     requests                                             prefill: transfer ended

available: free tokens; evictable: cached ones that nobody uses.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Log:
    def __init__(self, path: str) -> None:
        self.file = Path(path).open("a", buffering=1 << 16)  # noqa: SIM115
        self.iteration = 0
        self.start = time.perf_counter()

    def add(self, what: str, *values: Any) -> None:
        seconds = round(time.perf_counter() - self.start, 6)
        self.file.write(json.dumps([self.iteration, seconds, what, *values], separators=(",", ":")) + "\n")

    def flush(self) -> None:
        self.file.flush()


def _after(cls: Any, name: str, then: Callable[..., None]) -> None:
    """Calls then(result, self, *args) behind a method."""
    method = getattr(cls, name)

    def wrapped(self: Any, *args: Any, **named: Any) -> Any:
        result = method(self, *args, **named)
        then(result, self, *args, **named)
        return result

    setattr(cls, name, wrapped)


def install(module: Any) -> None:
    from sglang.srt.disaggregation import decode, prefill

    log = Log(f"{os.environ['DECISIONS']}.jsonl")
    scheduler = module.Scheduler

    def ids(requests: Any) -> list[str]:
        return [request.rid for request in requests]

    def on_receive(_: Any, self: Any) -> None:
        log.iteration += 1
        if log.iteration % 200 == 0:
            log.flush()

    def on_new(_: Any, self: Any, request: Any, is_retracted: bool = False) -> None:
        if is_retracted:
            log.add("retracted", [request.rid])
        else:
            log.add("new", request.rid, len(request.origin_input_ids), request.sampling_params.max_new_tokens)

    def on_list(what: str) -> Callable[..., None]:
        def then(requests: Any, self: Any, *args: Any, **named: Any) -> None:
            if requests:
                log.add(what, ids(requests))

        return then

    def on_meeting(_: Any, self: Any, *args: Any) -> None:
        met = [entry.req for entry in self.queue if entry.waiting_for_input and not hasattr(entry.req, "met")]
        for request in met:
            request.met = True
        if met:
            log.add("met", ids(met))

    def on_admission(result: Any, self: Any, *args: Any) -> None:
        if admitted := result[0]:
            for entry in admitted:
                entry.req.admitted = log.iteration
            log.add("admitted", [[entry.req.rid, entry.req.cache_protected_len] for entry in admitted])

    def on_merge(result: Any, self: Any, batch: Any) -> None:
        log.add("merged", [[request.rid, int(request.finished())] for request in batch.reqs])
        on_result(None, self, batch, None)

    def levels(self: Any) -> tuple[int, int]:
        return self.token_to_kv_pool_allocator.available_size(), self.tree_cache.evictable_size()

    run = scheduler.run_batch

    def run_batch(self: Any, batch: Any, *args: Any, **named: Any) -> Any:
        if batch.forward_mode.is_extend():
            chunks = [
                [request.rid, context, tokens]
                for request, context, tokens in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
            ]
            log.add("prefill", chunks, *levels(self))
        else:
            log.add("decode", ids(batch.reqs), *levels(self))
        return run(self, batch, *args, **named)

    def on_result(_: Any, self: Any, batch: Any, result: Any) -> None:
        ended = [request for request in batch.reqs if request.finished()]
        if ended:
            log.add("ended", [[request.rid, list(request.output_ids)] for request in ended])

    def on_retraction(result: Any, self: Any, *args: Any) -> None:
        for request in result[2]:
            log.add("failed", request.rid)

    scheduler.run_batch = run_batch
    _after(scheduler, "recv_requests", on_receive)
    _after(scheduler, "_add_request_to_queue", on_new)
    _after(scheduler, "process_batch_result", on_result)
    _after(scheduler, "process_batch_result_prebuilt", on_merge)
    _after(scheduler, "process_disagg_prefill_inflight_queue", on_list("sent"))
    _after(scheduler, "on_idle", lambda *_: None if log.iteration % 50 else log.flush())
    _after(module.ScheduleBatch, "retract_decode", on_retraction)
    _after(prefill.PrefillBootstrapQueue, "pop_bootstrapped", on_list("granted"))
    _after(decode.DecodePreallocQueue, "_update_handshake_waiters", on_meeting)
    _after(decode.DecodePreallocQueue, "pop_preallocated", on_admission)
    _after(decode.DecodePreallocQueue, "resume_retracted_reqs", on_list("resumed"))
    pop_transferred = decode.DecodeTransferQueue.pop_transferred

    def pop_earlier(self: Any) -> Any:
        """KV that has come within the iteration that admitted its request is seen in the next."""
        return pop_transferred(self, [entry.req.rid for entry in self.queue if entry.req.admitted < log.iteration])

    decode.DecodeTransferQueue.pop_transferred = pop_earlier
    _after(decode.DecodeTransferQueue, "pop_transferred", on_list("arrived"))
