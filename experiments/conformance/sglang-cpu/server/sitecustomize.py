"""Loaded by every process of a server: prepares SGLang 0.5.12.post1 for a CPU, and logs what it decides."""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

NEWER = {
    "sglang.srt.mem_cache.common": [
        ("tree_cache.evict(EvictParams(num_tokens=num_tokens))",
         "tree_cache.evict(EvictParams(num_tokens=num_tokens - allocator.available_size()))"),
    ],
    "sglang.srt.disaggregation.decode": [
        ("required_alloc_tokens = origin_input_len\n",
         "required_alloc_tokens = self._required_alloc_tokens(fill_len=origin_input_len, prefix_len=0)\n"),
        ("full_allocatable_tokens -= full_required\n",
         "full_allocatable_tokens = self._allocatable_token_budgets("
         "count_retracted=False, extra_reserved_reqs=len(resumed_reqs))\n"),
    ],
    "sglang.srt.managers.scheduler": [
        ("if len(adder.can_run_list) >= self.get_num_allocatable_reqs(running_bs):",
         "held = sum(r.req_pool_idx is not None for r in adder.can_run_list)\n"
         "            if len(adder.can_run_list) >= min(get_global_server_args().pp_max_micro_batch_size - running_bs,"
         " self.req_to_token_pool.available_size() + held):"),
        ("if len(adder.can_run_list) >= self.req_to_token_pool.available_size():",
         "if len(adder.can_run_list) >= self.req_to_token_pool.available_size() + held:"),
    ],
}  # fmt: skip
"""Rules that SGLang 0.5.23 has in place of those of 0.5.12: what lacks is evicted, not as much as is asked for; decode
rounds a prompt up to pages without radix cache, too; each resumed request sees what the one before it left; a partly
computed prompt needs no second slot."""
HOST_MEMORY = {
    "sglang.srt.disaggregation.nixl.conn": [('"VRAM"', '"DRAM"')],
    "sglang.srt.mem_cache.memory_pool": [("torch.cuda.synchronize()", "None")],
}


def _log(module: Any) -> None:
    import decisions

    decisions.install(module)


class _Kernel:
    """Stands in for one that only a GPU runs."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.run


def _page_kernels(module: Any) -> None:
    def extend(prefixes: Any, lengths: Any, last: Any, free: Any, out: Any, _: int, page_size: int) -> None:
        module.alloc_extend_naive(prefixes, lengths, last, free, out, page_size, "cpu")

    def decode(lengths: Any, last: Any, free: Any, out: Any, _: int, page_size: int) -> None:
        module.alloc_extend_naive(lengths - 1, lengths, last, free, out, page_size, "cpu")

    module.alloc_extend_kernel, module.alloc_decode_kernel = _Kernel(extend), _Kernel(decode)


class _Finder(importlib.abc.MetaPathFinder):
    """Changes the source of modules, and calls a function with those that have been imported."""

    def __init__(self, edits: dict[str, list[tuple[str, str]]], hooks: dict[str, Callable[[Any], None]]) -> None:
        self.edits = edits
        self.hooks = hooks

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        edits, hook = self.edits.pop(name, None), self.hooks.pop(name, None)
        if edits is None and hook is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: Any) -> None:
            if edits is None:
                load(module)
            else:
                source = loader.get_source(name)
                for old, new in edits:
                    assert old in source, f"{name} has no {old}"
                    source = source.replace(old, new)
                exec(compile(source, spec.origin, "exec"), module.__dict__)
            if hook is not None:
                hook(module)

        loader.exec_module = exec_module
        return spec


hooks: dict[str, Callable[[Any], None]] = {"sglang.srt.mem_cache.allocator": _page_kernels}
if os.environ.get("DECISIONS"):
    hooks["sglang.srt.managers.scheduler"] = _log
sys.meta_path.insert(0, _Finder({**NEWER, **HOST_MEMORY}, hooks))
