"""Drive SGLang's UnifiedRadixCache with its MambaComponent, and keep what it did: python drive.py SITE [SEED ...]

SITE has SGLang 0.5.23 and msgspec, folders separated by colons. Of SGLang, `sglang.srt.mem_cache` is imported, and two
functions of its batch are taken out of their file; other modules, which these paths do not ask, are stood in for by
empty ones.
"""

import ast
import dataclasses
import gzip
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from array import array
from collections.abc import Iterator
from importlib import import_module
from math import lcm
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from cache_operations import MAX_REQUESTS, Load, Operation, Settings, load_of
from replay_cache import BLOCKED, LOG, compare_rows, digest, show

SEEDS = range(40)
"""Loads whose logs are kept."""
MAX_TOKENS = 4096
PACKAGES = {"sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.managers"}
"""Packages without what their __init__ does."""
IMPORTED = ("sglang.srt.mem_cache", "sglang.srt.environ", "sglang.srt.session", "sglang.srt.utils.rank_consensus")
FOREIGN = {"triton", "sgl_kernel", "zmq", "orjson", "transformers", "deep_gemm"}


class _Kind(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls

    def __enter__(cls) -> Any:
        return cls

    def __exit__(cls, *error: object) -> None:
        pass


class _Empty(metaclass=_Kind):
    """Any class or function: false, and gives back its first argument."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __bool__(self) -> bool:
        return False


class _Module(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kind(name, (_Empty,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, site: Path) -> None:
        self.site = site

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        top = name.partition(".")[0]
        is_own = top == "sglang" and not name.startswith(IMPORTED)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_own or top in FOREIGN else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ in PACKAGES:
            module.__path__ = [str(self.site.joinpath(*module.__name__.split(".")))]


@dataclasses.dataclass
class Engine:
    """SGLang's parts that a drive needs."""

    site: Path
    exec: SimpleNamespace = dataclasses.field(default_factory=SimpleNamespace)
    settings: Any = None

    def __post_init__(self) -> None:
        context: Any = import_module("sglang.srt.runtime_context")
        mamba = SimpleNamespace(
            mamba_max_states_per_path=-1, enable_mamba_extra_buffer_lazy=False, enable_int8_mamba_checkpoint=False
        )
        context.get_exec = lambda: SimpleNamespace(mamba=mamba)
        context.get_disagg = lambda: SimpleNamespace(disaggregation_mode="null")
        context.mamba_cache_chunk_size = self.chunk
        context.mamba_checkpoint_grid = lambda page: lcm(self.chunk(), page)
        scope = {
            "Any": Any, "Optional": None, "dataclasses": dataclasses, "dataclass": dataclasses.dataclass,
            "get_exec": context.get_exec, "mamba_cache_chunk_size": self.chunk,
            "mamba_checkpoint_grid": context.mamba_checkpoint_grid,
            "get_parallel": lambda: SimpleNamespace(dcp_enabled=False),
            "_MambaRadixCacheV2TrackEntry": SimpleNamespace,
        }  # fmt: skip
        self.track = self._taken("_mamba_radix_cache_v2_req_prepare_for_extend", scope)

    def chunk(self) -> int:
        """max(chunk of the model, page): arg_groups/overrides.py, mamba_cache_chunk_size."""
        return max(self.settings.chunk_tokens, self.settings.page_size)

    def _taken(self, name: str, scope: dict[str, Any]) -> Any:
        """A function of managers/schedule_batch.py, whose other parts are not imported."""
        path = self.site / "sglang/srt/managers/schedule_batch.py"
        tree = ast.parse(path.read_text())
        (found,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
        found.returns, found.decorator_list = None, []
        for arg in found.args.args:
            arg.annotation = None
        exec(compile(ast.Module([found], []), str(path), "exec"), scope)  # noqa: S102 - SGLang's own
        return scope[name]


class Kv:
    """The fields of SGLang's ReqKvInfo."""

    def __init__(self) -> None:
        self.req_pool_idx = self.mamba_pool_idx = self.mamba_ping_pong_track_buffer = None
        self.mamba_ping_pong_empty = self.mamba_next_track_idx = self.mamba_last_track_idx = None
        self.mamba_last_track_seqlen = self.mamba_prev_track_seqlen = self.mamba_cow_src_index = None
        self.mamba_needs_clear = False
        self.kv_allocated_len = self.kv_committed_len = self.cache_protected_len = self.cache_inserted_len = 0

    holds_kv = property(lambda self: self.req_pool_idx is not None)
    holds_mamba = property(lambda self: self.mamba_pool_idx is not None)
    is_kv_released = property(lambda self: self.kv_allocated_len == 0)

    def mark_kv_released(self) -> None:
        self.kv_allocated_len = 0

    def get_evicted_seqlen(self, component: Any) -> int:
        return 0

    def swa_dead_lo(self, page_size: int) -> int:
        return 0


class Request:
    """The fields of SGLang's Req that the cache reads."""

    session = session_id = extra_key = cache_salt = kv_rotation_base = lock = finished_len = None
    priority, rid, skip_radix_cache_insert, mamba_lazy_checkpoint = 0, "0", False, True

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.origin_input_ids, self.output_ids = array("q", ids), array("q")
        self.kv, self.is_finished = Kv(), False
        self.prefix_len = self.extend_end = self.num_computed = 0
        self.refresh_fill_ids()

    def refresh_fill_ids(self) -> None:
        self.full_untruncated_fill_ids = self.origin_input_ids + self.output_ids

    def finished(self) -> bool:
        return self.is_finished

    def owned_kv_len(self) -> int:
        return len(self.full_untruncated_fill_ids)

    def _compute_max_prefix_len(self, length: int) -> int:
        return length - 1

    @property
    def extend_len(self) -> int:
        return self.extend_end - self.prefix_len


class Drive:
    """SGLang's cache of one load."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        import torch
        from sglang.srt.mem_cache import common, memory_pool, unified_radix_cache
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.engine, self.settings = engine, settings
        engine.settings = settings
        memory_pool.HybridReqToTokenPool.mamba_pool_cls = _States
        memory_pool.async_h2d = lambda rows, **_: rows
        for module in (common, unified_radix_cache):
            module.ceil_align = lambda number, size: -(-number // size) * size
        self.rows = memory_pool.HybridReqToTokenPool(
            size=MAX_REQUESTS + 1,
            mamba_size=settings.num_slots,
            mamba_spec_state_size=0,
            max_context_len=MAX_TOKENS,
            device="cpu",
            enable_memory_saver=False,
            cache_params=SimpleNamespace(dtype=SimpleNamespace(conv=torch.float32)),
            mamba_layer_ids=[0],
            enable_mamba_extra_buffer=settings.has_buffer,
            enable_overlap_schedule=settings.overlap,
        )
        size = settings.num_pages * settings.page_size
        if settings.page_size > 1:
            self.pages: Any = PagedTokenToKVPoolAllocator(size, settings.page_size, torch.int64, "cpu", None, False)
        else:
            self.pages = TokenToKVPoolAllocator(size, torch.int64, "cpu", None, False)
        self.mamba = ComponentType.MAMBA
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.pages,
            page_size=settings.page_size,
            enable_mamba_extra_buffer=settings.has_buffer,
            tree_components=(ComponentType.FULL, ComponentType.MAMBA),
            tree_core_backend="python",
        )
        self.cache = UnifiedRadixCache(params)
        self.live: list[Request] = []

    def step(self, operation: Operation) -> list[int] | None:
        """Does an operation, and returns what it gave: cached tokens, or 0. None: it is not possible now."""
        return getattr(self, f"_{operation.kind}")(operation)

    def _one(self, operation: Operation, *, is_computed: bool | None = None) -> Request | None:
        if not self.live:
            return None
        found = self.live[operation.which % len(self.live)]
        whole = found.num_computed >= len(found.origin_input_ids)
        return found if is_computed is None or whole == is_computed else None

    def _admit(self, operation: Operation) -> list[int] | None:
        from sglang.srt.mem_cache.allocation import alloc_req_slots, ensure_mamba_capacity
        from sglang.srt.mem_cache.common import match_kv_cache

        if len(self.live) == MAX_REQUESTS:
            return None
        request, cache = Request(operation.ids), self.cache
        request.mamba_branching_seqlen = None
        ids = request.full_untruncated_fill_ids
        if self.settings.is_decode and not ensure_mamba_capacity(self.rows, [request], cache):
            return BLOCKED
        most = None if self.settings.is_decode else len(ids) - 1
        match_kv_cache(request, cache, ids, cow_mamba=True, max_prefix_len=most)
        request.kv.cache_protected_len = request.num_computed = num_cached = request.prefix_len
        request.lock = cache.lock(request.last_node)
        alloc_req_slots(self.rows, [request], cache)
        self.rows.write((request.kv.req_pool_idx, slice(0, num_cached)), cache.path_device_indices(request.last_node))
        request.kv.kv_allocated_len = num_cached
        found = [num_cached, request.mamba_branching_seqlen or 0]
        if self._lengthen(request):
            self.live.append(request)
        else:
            cache.unlock(request.lock)
            cache.on_release(request, checkpointed=False)
            self.rows.free(request)
        return found

    def _lengthen(self, request: Request) -> bool:
        """Allocates pages up to the request's last token. False: they are not there."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        page, row = self.settings.page_size, request.kv.req_pool_idx
        start = -(-request.kv.kv_allocated_len // page) * page
        stop = -(-len(request.full_untruncated_fill_ids) // page) * page
        lacking = stop - start - self.pages.available_size()
        if lacking > self.cache.full_evictable_size():
            return False
        if lacking > 0:
            self.cache.evict_for_alloc(EvictParams(num_tokens=lacking))
        if stop > start:
            self.rows.write((row, slice(start, stop)), self.pages.alloc(stop - start))
        request.kv.kv_allocated_len = request.kv.kv_committed_len = len(request.full_untruncated_fill_ids)
        return True

    def _compute(self, operation: Operation) -> list[int] | None:
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        request = self._one(operation, is_computed=False)
        if request is None:
            return None
        left = len(request.origin_input_ids) - request.num_computed
        share = 1.0 if self.settings.is_decode else operation.share
        request.extend_end = request.num_computed = request.num_computed + max(1, int(share * left))
        if self.settings.has_buffer and not self.settings.is_decode:
            config = SimpleNamespace(hf_text_config=SimpleNamespace(mamba_chunk_size=self.settings.chunk_tokens))
            batch = SimpleNamespace(model_config=config, tree_cache=self.cache, req_to_token_pool=self.rows)
            self.engine.track(batch, request)
        checkpoint_kv_cache(request, self.cache)
        return [0, 0]

    def _generate(self, operation: Operation) -> list[int] | None:
        request = self._one(operation, is_computed=True)
        if request is None:
            return None
        before, old = len(request.full_untruncated_fill_ids), request.output_ids
        request.output_ids = old + array("q", operation.ids)
        request.refresh_fill_ids()
        if not self._lengthen(request):
            request.output_ids = old
            request.refresh_fill_ids()
            return None
        if self.settings.has_buffer:
            self._track_steps(request, before)
        return [0, 0]

    def _track_steps(self, request: Request, before: int) -> None:
        """What the scheduler's batch_result_processor does behind decode steps (mamba_track_grid)."""
        grid, kv = lcm(lcm(self.engine.chunk(), self.settings.page_size), self.settings.track_interval), request.kv
        for length in range(before + 1, len(request.full_untruncated_fill_ids) + 1):
            if length % grid == 0:
                kv.mamba_prev_track_seqlen, kv.mamba_last_track_seqlen = kv.mamba_last_track_seqlen, length
                kv.mamba_last_track_idx = kv.mamba_next_track_idx
                kv.mamba_next_track_idx = self.rows.get_mamba_ping_pong_other_idx(kv.mamba_next_track_idx)

    def _finish(self, operation: Operation) -> list[int] | None:
        from sglang.srt.mem_cache.common import release_kv_cache

        request = self._one(operation, is_computed=True)
        if request is None:
            return None
        self.live.remove(request)
        request.is_finished = True
        release_kv_cache(request, self.cache, checkpoint=True)
        return [0, 0]

    def _drop(self, operation: Operation) -> list[int] | None:
        from sglang.srt.mem_cache.common import release_kv_cache

        request = self._one(operation)
        if request is None:
            return None
        self.live.remove(request)
        request.is_finished = True
        release_kv_cache(request, self.cache, checkpoint=False)
        return [0, 0]

    def _look(self, operation: Operation) -> list[int]:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return [
            self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", operation.ids)))).device_prefix_len,
            0,
        ]

    def state(self) -> list[int]:
        """Free pages and slots, evictable pages, and a digest of the tree and of its states, least recent first."""
        page, prefixes, nodes = self.settings.page_size, {}, [(self.cache.root_node, ())]
        for node, prefix in nodes:
            for child in node.children.values():
                prefixes[child] = (*prefix, *child.key)
                nodes.append((child, prefixes[child]))
        lru = self.cache.tree_core.lru_lists[self.mamba]
        kept = [prefixes[node] for node in _least_recent_first(lru)]
        return [
            self.pages.available_size() // page,
            self.rows.mamba_allocator.available_size(),
            self.cache.full_evictable_size() // page,
            digest(prefixes.values(), kept),
        ]


class _States:
    """A pool of states without memory."""

    replayssm_spec_write_pos = replayssm_write_pos = None

    def __init__(self, **settings: Any) -> None:
        self.size = settings["size"]

    def copy_from(self, source: Any, target: Any) -> None:
        pass


def _least_recent_first(lru: Any) -> Iterator[Any]:
    place = lru._pt  # noqa: SLF001 - the list has no public iteration
    node = lru.tail.lru_prev[place]
    while node is not lru.head:
        yield node
        node = node.lru_prev[place]


def record(engine: Engine, load: Load) -> list[list[int] | None]:
    """For each operation what it gave, and the state behind it. None: it was not possible."""
    drive, rows = Drive(engine, load.settings), []
    for operation in load.operations:
        given = drive.step(operation)
        rows.append(None if given is None else given + drive.state())
    return rows


def load_engine(site: str) -> Engine:
    import_module("torch._dynamo")  # before the finder: torch asks for packages that are not there
    paths = site.split(os.pathsep)
    (root,) = (Path(path) for path in paths if (Path(path) / "sglang").is_dir())
    sys.meta_path.insert(0, _Finder(root))
    sys.path += paths
    return Engine(root)


def main() -> None:
    engine = load_engine(sys.argv[1])
    seeds = [int(seed) for seed in sys.argv[2:]]
    if not seeds:
        logs = {str(seed): record(engine, load_of(seed)) for seed in SEEDS}
        LOG.write_bytes(gzip.compress(json.dumps(logs, separators=(",", ":")).encode(), mtime=0))
    else:
        found = {seed: compare_rows(load_of(seed), record(engine, load_of(seed))) for seed in seeds}
        show(found)


if __name__ == "__main__":
    main()
