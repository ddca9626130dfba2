"""What step.py needs for SGLang 0.5.12.post1, whose Scheduler has no parts for policies, results and ratios."""

import importlib.util
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from step import Bench

CHANGES = Path(__file__).parent / "server" / "sitecustomize.py"
NOTHING = [
    *("_abort_on_waiting_timeout", "_abort_on_running_timeout", "_prefetch_kvcache", "log_batch_result_stats"),
    *("stream_output", "report_decode_stats", "report_prefill_stats", "maybe_collect_routed_experts"),
    *("process_input_requests", "self_check_during_busy", "maybe_collect_indexer_topk"),
]
"""Methods that decide nothing here."""
OFF = ["enable_hisparse", "enable_metrics", "enable_dynamic_chunking", "_engine_paused", "is_hybrid_ssm"]


def prepare() -> None:
    """Give the release what that of the recorded servers has (README: how the server differs)."""
    import transformers  # noqa: PLC0415

    transformers.AutoImageProcessor = SimpleNamespace(register=lambda *_, **__: None)
    spec = importlib.util.spec_from_file_location("changes", CHANGES)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def configure(arguments: dict[str, Any]) -> Any:
    """The global arguments: defaults but for these."""
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler  # noqa: PLC0415

    server_args = ServerArgs.__new__(ServerArgs)
    for one in fields(ServerArgs):
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        server_args.__dict__[one.name] = None if default is MISSING else default
    server_args.__dict__.update(attention_backend="torch_native", enable_metrics=False, **arguments)
    set_global_server_args_for_scheduler(server_args)
    return server_args


def tree(params: Any) -> Any:
    from sglang.srt.mem_cache.chunk_cache import ChunkCache  # noqa: PLC0415
    from sglang.srt.mem_cache.radix_cache import RadixCache  # noqa: PLC0415

    return ChunkCache(params) if params.disable else RadixCache(params)


def finish(bench: "Bench", scheduler: Any, server_args: Any) -> None:
    """Stand in for what only this release's Scheduler asks for."""
    for name in NOTHING:
        setattr(scheduler, name, lambda *_, **__: None)
    for name in OFF:
        setattr(scheduler, name, False)
    scheduler.server_args = server_args
    scheduler.maybe_prepare_mlp_sync_batch = lambda batch, **_: batch
    scheduler._maybe_prepare_ngram_embedding = lambda batch: batch  # noqa: SLF001
    scheduler._get_num_pending_tokens = lambda **_: 0  # noqa: SLF001
    scheduler.send_to_tokenizer = scheduler.ipc_channels.send_to_tokenizer
    scheduler.dp_size = scheduler.attn_tp_size = scheduler.pp_size = 1
    scheduler.num_generated_tokens = scheduler.forward_ct_decode = scheduler.attn_tp_rank = scheduler.tp_rank = 0
    scheduler.init_running_status()
    scheduler._chunked_req_scheduled_last_iter = False  # noqa: SLF001
    scheduler.init_schedule_policy()
    scheduler.batch_result_processor = scheduler
    scheduler.new_token_ratio_tracker = SimpleNamespace(
        reset=lambda: setattr(scheduler, "new_token_ratio", scheduler.init_new_token_ratio)
    )
    scheduler.recv_requests = bench.ingest


def make_senders(queue: Any, create_sender: Callable[[Any, Any], bool], page_size: int) -> None:
    """Prefill's queue, which makes senders as it is told of requests."""
    queue.token_to_kv_pool = SimpleNamespace(page_size=page_size)
    queue.tp_rank = 0

    def add(request: Any, num_kv_heads: int) -> None:
        create_sender(request, num_kv_heads)
        queue.queue.append(request)

    queue.add = add


def split_processor(scheduler: Any, merge: Callable[[Any], None]) -> Any:
    """The Scheduler's handling of results, but for that of requests that join, which is merge."""
    processor = SimpleNamespace(
        process_batch_result_prebuilt=scheduler.process_batch_result_prebuilt,
        process_batch_result_decode=scheduler.process_batch_result_decode,
    )
    scheduler.process_batch_result_prebuilt = merge
    return processor
