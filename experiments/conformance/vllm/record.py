"""Drive vLLM's own Scheduler without a model, and keep what it decided: python record.py SITE [SEED ...]

SITE has vLLM 0.33.0 and what its scheduler imports, folders separated by colons. Packages that it imports and does not
call are stood in for by empty ones.
"""

import gzip
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from draws import Load, random_load

LOGS = Path(__file__).parent / "logs"
UNCALLED = {"fastapi", "llguidance", "opentelemetry", "xgrammar"}
MAX_MODEL_LEN = 8192
LONGEST_LOAD_STEPS = 5000


class _Empty(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda *_, **__: None, "__class_getitem__": classmethod(lambda c, _: c)})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_empty = name.partition(".")[0] in UNCALLED
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_empty else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Bench:
    """One Scheduler. A forward computes what it is given, and each complete prompt gets its next drawn token."""

    def __init__(self, load: Load) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler

        self.load, size = load, load.settings.block_size
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(size, sha256)
        self.scheduler = Scheduler(_config(load), _kv_cache(load), _Grammars(), size)

    def run(self) -> Iterator[dict[str, Any]]:
        """A row for each step that anything happens before or in."""
        from vllm.v1.request import RequestStatus

        requests, scheduler = self.load.requests, self.scheduler
        for step in range(LONGEST_LOAD_STEPS):
            row: dict[str, Any] = {"step": step}
            row["new"] = [i for i, request in enumerate(requests) if request.at_step == step]
            row["abort"] = [
                i for i, r in enumerate(requests) if r.abort_at_step == step and str(i) in scheduler.requests
            ]
            for i in row["new"]:
                scheduler.add_request(self._request(i))
            scheduler.finish_requests([str(i) for i in row["abort"]], RequestStatus.FINISHED_ABORTED)
            yield row | self._step()
            if not scheduler.has_unfinished_requests() and all(r.at_step <= step for r in requests):
                return
        raise RuntimeError("the load does not end")

    def _request(self, i: int) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        one = self.load.requests[i]
        sampling = SamplingParams(max_tokens=len(one.output), ignore_eos=True)
        return Request(str(i), one.prompt, sampling, None, arrival_time=float(i), block_hasher=self.hasher)

    def _step(self) -> dict[str, Any]:
        from vllm.v1.outputs import ModelRunnerOutput

        scheduler = self.scheduler
        said = scheduler.schedule()
        num_tokens = said.num_scheduled_tokens
        computed = [[int(i), scheduler.requests[i].num_computed_tokens - n, n] for i, n in num_tokens.items()]
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        sampled = []
        for i in num_tokens:
            request = scheduler.requests[i]
            output = self.load.requests[int(i)].output
            is_complete = request.num_computed_tokens == request.num_tokens
            sampled.append([output[request.num_output_tokens]] if is_complete else [])
        before = set(scheduler.requests)
        index = {i: place for place, i in enumerate(num_tokens)}
        scheduler.update_from_output(said, ModelRunnerOutput(list(num_tokens), index, sampled))
        ended = sorted(int(i) for i in before - set(scheduler.requests))
        preempted = sorted(int(i) for i in said.preempted_req_ids or ())
        return {"computed": computed, "preempted": preempted, "free": free, "ended": ended}


class _Grammars:
    """No request has a grammar."""

    def accept_tokens(self, request: Any, tokens: list[int]) -> bool:
        return True

    def should_advance(self, request: Any) -> bool:
        return False


def _kv_cache(load: Load) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=load.settings.block_size, num_kv_heads=1, head_size=8, dtype=torch.float32)
    return KVCacheConfig(load.settings.num_blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])


def _config(load: Load) -> Any:
    """What the scheduler reads of a VllmConfig, which would want a model."""
    from vllm.config import CacheConfig, ObservabilityConfig, ParallelConfig, SchedulerConfig

    settings = load.settings
    cache = CacheConfig(block_size=settings.block_size, enable_prefix_caching=settings.enable_prefix_caching)
    cache.num_gpu_blocks = settings.num_blocks + 1
    scheduler = SchedulerConfig(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        is_encoder_decoder=False,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        enable_chunked_prefill=True,
    )
    model = SimpleNamespace(
        uses_mrope=False,
        is_encoder_decoder=False,
        max_model_len=MAX_MODEL_LEN,
        runner_type="generate",
        is_diffusion=False,
        supports_multimodal_inputs=False,
        return_sampling_mask=False,
        enable_return_routed_experts=False,
    )
    managers = SimpleNamespace(get_encoder_cache_manager_obj=lambda: None)
    off = SimpleNamespace(enabled=False)
    return SimpleNamespace(
        scheduler_config=scheduler,
        cache_config=cache,
        parallel_config=ParallelConfig(),
        observability_config=ObservabilityConfig(),
        model_config=model,
        ec_manager_config=managers,
        aux_output_config=off,
        lora_config=None,
        kv_events_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        speculative_config=None,
        is_mm_encoder_only=False,
        num_speculative_tokens=0,
        num_lookahead_tokens=0,
        num_prefill_lookahead_tokens=0,
        num_hash_lookahead_tokens=0,
        use_v2_model_runner=False,
        max_in_flight_tokens=scheduler.max_num_batched_tokens,
        max_concurrent_batches=1,
    )


def record(seed: int) -> list[str]:
    return [json.dumps(row, separators=(",", ":")) for row in Bench(random_load(seed)).run()]


def main() -> None:
    import_module("torch._dynamo")  # before the finder: torch asks for packages that are not there
    sys.meta_path.insert(0, _Finder())
    sys.path[:0] = sys.argv[1].split(os.pathsep)
    LOGS.mkdir(exist_ok=True)
    for seed in [int(seed) for seed in sys.argv[2:]] or range(30):
        rows = record(seed)
        (LOGS / f"{seed}.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode(), mtime=0))
        print(f"{seed}: {len(rows)} steps", flush=True)


if __name__ == "__main__":
    main()
