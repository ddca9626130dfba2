"""Drive vLLM's own Scheduler without a model, and keep what it decided: python record.py SITE LOAD ...

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

from draws import Load, Settings, load_of

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
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        self.load, size = load, load.settings.block_size
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(size, sha256)
        unit = size if _mamba_cache_mode(load.settings) == "align" or not load.settings.mamba_groups else MAX_MODEL_LEN
        make = AsyncScheduler if load.settings.num_stages > 1 else Scheduler
        self.scheduler = make(_config(load), _kv_cache(load), _Grammars(), unit)
        self._due: dict[int, list[int]] = {}
        """Requests whose KV has been read, by the step before which that is seen."""
        self._reads: set[int] = set()
        """Requests whose KV is read, or was."""

    def run(self) -> Iterator[dict[str, Any]]:
        """A row for each step that anything happens before or in."""
        from vllm.v1.request import RequestStatus

        requests, scheduler = self.load.requests, self.scheduler
        for step in range(LONGEST_LOAD_STEPS):
            row: dict[str, Any] = {"step": step}
            row["new"] = [i for i, request in enumerate(requests) if request.at_step == step]
            row["abort"] = [i for i, r in enumerate(requests) if r.abort_at_step == step and self._is_live(i)]
            for i in row["new"]:
                scheduler.add_request(self._request(i))
            scheduler.finish_requests([str(i) for i in row["abort"]], RequestStatus.FINISHED_ABORTED)
            if self.load.settings.kv_role is not None:
                row["read"] = self._tell_read(step)
            yield row | self._step(step)
            if not scheduler.requests and all(r.at_step <= step for r in requests):
                return
        raise RuntimeError("the load does not end")

    def _is_live(self, i: int) -> bool:
        request = self.scheduler.requests.get(str(i))
        return request is not None and not request.is_finished()

    def _tell_read(self, step: int) -> list[int]:
        """Requests whose KV has been read, as a worker says of its last step."""
        from vllm.v1.outputs import KVConnectorOutput

        read = self._due.pop(step, [])
        names = [str(i) for i in read]  # a set has no order, and blocks are freed in it
        on_decode = self.load.settings.kv_role == "kv_consumer"
        found = KVConnectorOutput(finished_recving=names) if on_decode else KVConnectorOutput(finished_sending=names)
        self.scheduler._update_from_kv_xfer_finished(found)  # noqa: SLF001 - a forward's end calls it
        return read

    def _will_be_read(self, step: int, before: set[str]) -> list[int]:
        """Requests whose blocks were allocated in this step, on decode, or that were computed, on prefill."""
        from vllm.v1.request import RequestStatus

        waits, scheduler = RequestStatus.WAITING_FOR_REMOTE_KVS, self.scheduler
        found = []
        for i in sorted(map(int, before & set(scheduler.requests))):
            request = scheduler.requests[str(i)]
            if (request.status == waits or request.is_finished()) and i not in self._reads:
                self._reads.add(i)
                self._due.setdefault(step + self.load.requests[i].read_steps, []).append(i)
                found.append(i)
        return found

    def _request(self, i: int) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        one = self.load.requests[i]
        sampling = SamplingParams(max_tokens=len(one.output), ignore_eos=True)
        request = Request(
            str(i),
            one.prompt,
            sampling,
            None,
            arrival_time=float(i),
            block_hasher=self.hasher,
            priority=one.priority,
        )
        if (role := self.load.settings.kv_role) is not None:
            remote = {"remote_engine_id": "other", "remote_request_id": str(i), "remote_host": "", "remote_port": 0}
            blocks = {"remote_block_ids": [[1]], "tp_size": 1}
            request.kv_transfer_params = (
                {"do_remote_decode": True} if role == "kv_producer" else {"do_remote_prefill": True, **remote, **blocks}
            )
        return request

    def _step(self, step: int) -> dict[str, Any]:
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
        before = {name for name, request in scheduler.requests.items() if not request.is_finished()}
        index = {i: place for place, i in enumerate(num_tokens)}
        scheduler.update_from_output(said, ModelRunnerOutput(list(num_tokens), index, sampled))
        ended = sorted(int(i) for i in before if not self._is_live(int(i)))
        preempted = sorted(int(i) for i in said.preempted_req_ids or ())
        row = {"computed": computed, "preempted": preempted, "free": free, "ended": ended}
        return row if self.load.settings.kv_role is None else row | {"reads": self._will_be_read(step, before)}


class _Grammars:
    """No request has a grammar."""

    def accept_tokens(self, request: Any, tokens: list[int]) -> bool:
        return True

    def should_advance(self, request: Any) -> bool:
        return False


def _kv_cache(load: Load) -> Any:
    import torch
    from vllm.config import CacheConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

    size = load.settings.block_size
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=8, dtype=torch.float32)
    state = MambaSpec(
        shapes=((size, 16),),
        dtypes=(torch.float32,),
        block_size=size if load.settings.enable_prefix_caching else MAX_MODEL_LEN,
        mamba_cache_mode=_mamba_cache_mode(load.settings),
        num_prefill_checkpoint_blocks=1,
        prefill_checkpoint_alignment=1,
    )
    states = [KVCacheGroupSpec([f"linear {i}"], state) for i in range(load.settings.mamba_groups)]
    groups, interval = [*states, KVCacheGroupSpec(["layer"], spec)], CacheConfig.prefix_cache_retention_interval
    return KVCacheConfig(load.settings.num_blocks + 1, [], groups, prefix_cache_retention_interval=interval)


def _mamba_cache_mode(settings: Settings) -> str:
    """As models/config.py:764 chooses it."""
    return "align" if settings.mamba_groups and settings.enable_prefix_caching else "none"


def _config(load: Load) -> Any:
    """What the scheduler reads of a VllmConfig, which would want a model."""
    from vllm.config import CacheConfig, KVTransferConfig, ObservabilityConfig, ParallelConfig, SchedulerConfig

    settings = load.settings
    cache = CacheConfig(block_size=settings.block_size, enable_prefix_caching=settings.enable_prefix_caching)
    cache.num_gpu_blocks = settings.num_blocks + 1
    cache.mamba_cache_mode = _mamba_cache_mode(settings)
    scheduler = SchedulerConfig(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        is_encoder_decoder=False,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive=settings.long_prefill_token_threshold_adaptive,
        enable_chunked_prefill=True,
        policy=settings.policy,
        async_scheduling=settings.num_stages > 1,
    )
    num_batches = settings.num_stages + (settings.num_stages > 1)  # config/vllm.py:588
    transfer = None
    if settings.kv_role is not None:
        transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role=settings.kv_role, engine_id="this")
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
        parallel_config=ParallelConfig(pipeline_parallel_size=settings.num_stages),
        observability_config=ObservabilityConfig(),
        model_config=model,
        ec_manager_config=managers,
        aux_output_config=off,
        lora_config=None,
        kv_events_config=None,
        kv_transfer_config=transfer,
        ec_transfer_config=None,
        speculative_config=None,
        is_mm_encoder_only=False,
        num_speculative_tokens=0,
        num_lookahead_tokens=0,
        num_prefill_lookahead_tokens=0,
        num_hash_lookahead_tokens=0,
        use_v2_model_runner=settings.num_stages > 1,
        max_in_flight_tokens=num_batches * scheduler.max_num_batched_tokens,
        max_concurrent_batches=num_batches,
    )


def record(name: str) -> list[str]:
    from stages import StagedBench

    load = load_of(name)
    bench = StagedBench(load) if load.settings.num_stages > 1 else Bench(load)
    return [json.dumps(row, separators=(",", ":")) for row in bench.run()]


def prepare(site: str) -> None:
    """Make vLLM importable."""
    import_module("torch._dynamo")  # before the finder: torch asks for packages that are not there
    sys.meta_path.insert(0, _Finder())
    sys.path[:0] = site.split(os.pathsep)


def keep(name: str) -> None:
    LOGS.mkdir(exist_ok=True)
    rows = record(name)
    (LOGS / f"{name}.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode(), mtime=0))
    print(f"{name}: {len(rows)} steps", flush=True)


def main() -> None:
    prepare(sys.argv[1])
    for name in sys.argv[2:]:
        keep(name)


if __name__ == "__main__":
    main()
