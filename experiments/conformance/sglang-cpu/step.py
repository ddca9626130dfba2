"""Drive SGLang's own Scheduler without a model, and keep what it decided: python step.py RELEASE SITE LOAD ...

RELEASE is 0.5.23 or 0.5.12. SITE has it and what its scheduler imports, folders separated by colons. Packages that it
imports and does not call are stood in for by empty ones.
"""

import gzip
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from array import array
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import older
from loads import Load, Role
from random_loads import BEYOND, VOCABULARY, DrawnRequest, drawn_load

LOGS = Path(__file__).parent / "logs"
UNCALLED = {"sgl_kernel", "torchvision", "tvm_ffi", "uvicorn"}
MAX_REQUEST_TOKENS = 4096
LONGEST_LOAD_STEPS = 5000
FEW = 32
"""With so few running requests, decode has slots for twice as many more."""
END = "."
"""Of ids: the Scheduler aborts all whose ids begin with the given one."""
OFF = [
    *("abort_on_priority_when_disabled", "attn_dp_enabled", "enable_fpm", "enable_hicache_storage", "enable_hisparse"),
    *("enable_hierarchical_cache", "enable_lmcache", "enable_lora", "enable_overlap_mlx"),
    *("enable_pdmux", "enable_unified_cache_external_linker", "enable_unified_memory", "gracefully_exit"),
    *("is_hybrid_swa", "require_mlp_sync", "schedule_low_priority_values_first"),
]
ABSENT = [
    *("chunked_req", "_pending_chunked_abort_req", "decode_offload_manager", "dllm_config", "draft_worker"),
    *("dynamic_chunk_sizer", "future_map", "hisparse_coordinator", "lora_drainer", "max_queued_requests"),
    *("metrics_collector", "min_free_slots_delayer", "mm_receiver", "rust_server", "scheduler_stage_metrics"),
    *("scripted_scheduler_hook", "truncation_align_size"),
]
SILENT = ["ipc_channels", "load_inquirer", "load_publisher", "metrics_reporter", "output_streamer"]


class _Attributes(type):
    def __getattr__(cls, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Empty(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Attributes(
            name, (), {"__init__": lambda *_, **__: None, "__class_getitem__": classmethod(lambda c, _: c)}
        )


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_empty = name.partition(".")[0] in UNCALLED
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_empty else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Silent:
    """Stands for parts of a server that decide nothing: whatever is called does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class _EndError(Exception):
    pass


class EndlessError(Exception):
    """The instance waits for ever."""


class Bench:
    """One Scheduler in its own loop. A forward computes nothing, and each complete prompt gets its next drawn token."""

    instance = "aggregated-0"
    mode = "NULL"

    def __init__(self, load: Load) -> None:
        self.load = load
        self.requests: list[Any] = load.requests(None)  # type: ignore[arg-type]
        self.rows: list[list[Any]] = []
        self.step = 0
        self.live: dict[int, Any] = {}
        self.ended: set[str] = set()
        self.scheduler = _scheduler(self)
        self.prepare()

    def arguments(self) -> dict[str, Any]:
        """Server arguments of this role."""
        return {}

    def prepare(self) -> None:
        """Add what an instance of this role has."""

    def slots(self) -> Any:
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        return ReqToTokenPool(self.role.max_running_requests, MAX_REQUEST_TOKENS, "cpu", enable_memory_saver=False)

    @property
    def is_older(self) -> bool:
        return self.load.servers.release == "0.5.12"

    @property
    def role(self) -> Role:
        servers = self.load.servers
        return servers.decode if self.instance == "decode-0" and servers.decode is not None else servers.prefill

    def loop(self) -> None:
        if self.role.overlap:
            self.scheduler.event_loop_overlap()
        else:
            self.scheduler.event_loop_normal()

    def tell_more(self) -> None:
        """Tell the loop what comes beside requests."""

    def add(self, what: str, *values: Any) -> None:
        self.rows.append([self.instance, self.step, self.step * 1e-3, what, *values])

    def run(self) -> list[list[Any]]:
        with suppress(_EndError):
            self.loop()
        return self.rows

    def ingest(self, *, stop_at_pause: bool = False) -> None:
        """What the loop is told before it chooses a step."""
        from sglang.srt.managers.io_struct import AbortReq

        self.step += 1
        if self.step > LONGEST_LOAD_STEPS:
            raise EndlessError
        for i, drawn in enumerate(self.requests):
            if drawn.at_s == self.step:
                self.live[i] = request = self._request(i, drawn)
                self.enqueue(request)
            elif drawn.abort_at == self.step and not self.live[i].finished():
                self.add("abort", [f"r{i}"])
                self.scheduler.abort_request(AbortReq(rid=self.live[i].rid))
        self.tell_more()
        last = max(max(drawn.at_s, drawn.abort_at or 0) for drawn in self.requests)
        if self.step > last and self.scheduler.is_fully_idle():
            raise _EndError

    def _request(self, i: int, drawn: DrawnRequest) -> Any:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        stops = None if drawn.ignore_eos else drawn.stop_token_ids
        sampling = SamplingParams(
            max_new_tokens=drawn.max_new_tokens, ignore_eos=drawn.ignore_eos, stop_token_ids=stops, temperature=0
        )
        sampling.normalize(None)
        prompt = drawn.prompt[:] if self.is_older else array("q", drawn.prompt)
        request = Req(f"r{i:04}{END}", "", prompt, sampling, priority=drawn.priority, vocab_size=VOCABULARY)
        request.time_stats.wait_queue_entry_time = 0
        return request

    def forward(self, batch: Any, *_: Any) -> Any:
        from sglang.srt.managers.utils import GenerationBatchResult

        scheduler = self.scheduler
        scheduler.forward_ct += 1
        levels = scheduler.token_to_kv_pool_allocator.available_size(), scheduler.tree_cache.evictable_size()
        if batch.forward_mode.is_extend():
            scheduler.processed_tokens_counter += batch.extend_num_tokens
            rows = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
            self.add("prefill", [[name_of(request), context, tokens] for request, context, tokens in rows], *levels)
        else:
            self.add("decode", [name_of(request) for request in batch.reqs], *levels)
        tokens = self.tokens(batch)
        if self.is_older:
            batch.output_ids = tokens
        return GenerationBatchResult(next_token_ids=tokens)

    def tokens(self, batch: Any) -> Any:
        import torch

        return torch.tensor([self.next_token(request) for request in batch.reqs])

    def drawn(self, request: Any) -> DrawnRequest:
        drawn = self.requests[int(name_of(request)[1:])]
        assert isinstance(drawn, DrawnRequest)
        return drawn

    def next_token(self, request: Any) -> int:
        output, num_tokens = self.drawn(request).output, len(request.output_ids)
        return output[num_tokens] if num_tokens < len(output) else BEYOND

    def process(self, batch: Any, result: Any) -> None:
        processor = self.scheduler.batch_result_processor
        if self.role.overlap:  # only now are the tokens of the step before known
            result.next_token_ids = self.tokens(batch)
        if batch.forward_mode.is_decode():
            processor.process_batch_result_decode(batch, result)
        else:
            processor.process_batch_result_prefill(batch, result)
        self.note_ended(batch)

    def note_ended(self, batch: Any) -> None:
        ended = [request for request in batch.reqs if request.finished() and request.rid not in self.ended]
        self.ended |= {request.rid for request in ended}
        if ended:
            self.add("ended", [[name_of(request), list(request.output_ids)] for request in ended])

    def be_idle(self) -> None:
        """As Scheduler.on_idle, without checks and metrics."""
        if self.scheduler.is_fully_idle():
            self.scheduler.new_token_ratio_tracker.reset()

    def enqueue(self, request: Any, *, is_retracted: bool = False) -> None:
        if is_retracted:
            self.add("retracted", [name_of(request)])
        else:
            self.add("new", name_of(request), len(request.origin_input_ids), request.sampling_params.max_new_tokens)
        type(self.scheduler)._add_request_to_queue(self.scheduler, request, is_retracted)  # noqa: SLF001


def name_of(request: Any) -> str:
    return f"r{int(str(request.rid).removesuffix(END)[1:])}"


def _parts(bench: "Bench") -> tuple[Any, Any, Any]:
    """Slots, pages, and the prefix cache."""
    import torch
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    role, page_size, slots = bench.role, bench.load.servers.page_size, bench.slots()
    size = role.max_total_tokens // page_size * page_size
    common = {"dtype": torch.bfloat16, "device": "cpu", "kvcache": Silent(), "need_sort": False}
    if page_size == 1:
        pages: Any = TokenToKVPoolAllocator(size, **common)
    else:
        pages = PagedTokenToKVPoolAllocator(size, page_size, **common)
    params = CacheInitParams(
        disable=not role.radix,
        req_to_token_pool=slots,
        token_to_kv_pool_allocator=pages,
        page_size=page_size,
        chunked_prefill_size=role.chunked_prefill_size,
    )
    return slots, pages, older.tree(params) if bench.is_older else _tree(params, role)


def _tree(params: Any, role: Role) -> Any:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_tree_cache

    context = TreeCacheBuildContext(
        server_args=None,
        params=params,
        is_hybrid_swa=False,
        is_hybrid_ssm=False,
        enable_hierarchical_cache=False,
        disable_radix_cache=not role.radix,
        tp_worker=SimpleNamespace(model_runner=Silent()),
        model_config=None,
        tp_size=1,
        tp_rank=0,
        tp_group=None,
    )
    return create_tree_cache(context)


def _configure(bench: "Bench") -> Any:
    load, role = bench.load, bench.role
    arguments = dict(
        device="cpu",
        page_size=load.servers.page_size,
        chunked_prefill_size=role.chunked_prefill_size,
        max_prefill_tokens=role.max_prefill_tokens,
        max_running_requests=role.max_running_requests,
        pp_max_micro_batch_size=role.max_running_requests,
        disable_radix_cache=not role.radix,
        enable_mixed_chunk=role.mixed,
        schedule_policy=role.policy,
        enable_priority_scheduling=role.preempts,
        disable_priority_preemption=not role.preempts,
        disable_overlap_schedule=not role.overlap,
        **bench.arguments(),
    )
    if bench.is_older:
        return older.configure(arguments)
    from sglang.srt.runtime_context import get_context

    get_context().override_server_args(**arguments).install()
    return None


def _settings(bench: "Bench") -> dict[str, Any]:
    """Attributes of a Scheduler, which would want a model to set them."""
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    load, role, (slots, pages, tree) = bench.load, bench.role, _parts(bench)
    unthinking = {"self_opened_think_start_ids": None, "think_end_ids": None, "think_end_id": None}
    plain = {"is_encoder_decoder": False, "is_multimodal": False, "is_matryoshka": False}
    settings = {
        "req_to_token_pool": slots,
        "token_to_kv_pool_allocator": pages,
        "tree_cache": tree,
        "page_size": load.servers.page_size,
        "schedule_policy": role.policy,
        "enable_priority_scheduling": role.preempts,
        "priority_scheduling_preemption_threshold": 10,
        "disaggregation_mode": DisaggregationMode[bench.mode],
        "spec_algorithm": SpeculativeAlgorithm.NONE,
        "max_prefill_tokens": role.max_prefill_tokens,
        "max_running_requests": role.max_running_requests,
        "max_req_len": MAX_REQUEST_TOKENS,
        "model_config": SimpleNamespace(vocab_size=VOCABULARY, num_key_value_heads=1, **plain, **unthinking),
        "is_generation": True,
        "is_mixed_chunk": role.mixed,
        "enable_overlap": role.overlap,
        "_war_barrier_enabled": False,
        "device": "cpu",
        "processed_tokens_counter": 0,
    }
    return {**dict.fromkeys(OFF, False), **dict.fromkeys(ABSENT), **settings}


def _scheduler(bench: "Bench") -> Any:
    """SGLang's Scheduler, whose parts for messages, metrics and models do nothing."""
    from sglang.srt.managers.scheduler import Scheduler

    server_args = _configure(bench)
    scheduler = Scheduler.__new__(Scheduler)
    scheduler.__dict__.update(_settings(bench))
    for name in SILENT:
        setattr(scheduler, name, Silent())
    scheduler.ipc_channels.send_to_tokenizer = Silent()
    scheduler.metrics_reporter.num_generated_tokens = scheduler.metrics_reporter.forward_ct_decode = 0
    scheduler.metrics_reporter.enable_metrics = False
    scheduler.load_inquirer._get_num_pending_tokens = lambda **_: 0  # noqa: SLF001
    scheduler.dllm_manager = SimpleNamespace(any_staging_reqs=lambda: False)
    scheduler.dp_attn_adapter = SimpleNamespace(
        maybe_prepare_mlp_sync_batch=lambda batch, **_: batch, maybe_convert_decode_to_extend=lambda batch: batch
    )
    scheduler.ngram_embedding_manager = SimpleNamespace(prepare_for_forward=lambda batch, **_: batch)
    scheduler.grammar_manager = SimpleNamespace(
        has_waiting_grammars=lambda: False, abort_requests=lambda _: None, grammar_queue=[]
    )
    runner = SimpleNamespace(attn_backend=None, prefill_aware_swa=False)
    scheduler.tp_worker = scheduler.model_worker = SimpleNamespace(model_runner=runner, is_hybrid_swa=False)
    scheduler.chunked_prefill_size = bench.role.chunked_prefill_size
    if bench.is_older:
        older.finish(bench, scheduler, server_args)
    else:
        scheduler.init_running_status()
        scheduler.prefill_decode_interval = scheduler._prefill_decode_interval_remaining = 0  # noqa: SLF001
        scheduler.init_schedule_policy()
        scheduler.init_batch_result_processor()
        scheduler.ingest_requests = bench.ingest
    scheduler.run_batch = bench.forward
    scheduler.process_batch_result = bench.process
    scheduler.on_idle = bench.be_idle
    scheduler.launch_batch_sample_if_needed = lambda *_: None
    scheduler._add_request_to_queue = bench.enqueue  # noqa: SLF001
    return scheduler


def bench_of(name: str) -> type[Bench]:
    if "-prefill-" in name:
        from prefill_bench import PrefillBench

        return PrefillBench
    if "-decode-" in name:
        from decode_bench import DecodeBench

        return DecodeBench
    return Bench


def prepare(release: str, site: str) -> None:
    """Make SGLang importable."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import_module("torch._dynamo")  # before the finder: torch asks for packages that are not there
    sys.path[1:1] = site.split(os.pathsep)
    for name in ("transformers.image_utils", "transformers.models.llama.modeling_llama", "pycountry", "gguf"):
        import_module(name)
    if release == "0.5.12":
        older.prepare()
    sys.meta_path.insert(0, _Finder())


def record(names: list[str]) -> None:
    LOGS.mkdir(exist_ok=True)
    for name in names:
        try:
            rows = bench_of(name)(drawn_load(name)).run()
        except EndlessError:
            print(f"{name}: does not end", flush=True)
            continue
        text = "\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        (LOGS / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        print(f"{name}: {len(rows)} rows", flush=True)


def main() -> None:
    release, site, *names = sys.argv[1:]
    prepare(release, site)
    record([name if release == "0.5.23" else name.replace("drawn", f"drawn_{release}") for name in names])


if __name__ == "__main__":
    import_module("step").main()  # or the other files would have classes of their own
