"""SGLang's own staging kernels and calls, imported from an installed sglang or from a folder with its source.

Only sglang/srt/disaggregation/common/staging_buffer.py is used. A folder may hold that file alone, because with a
folder stand-ins take the place of the four names that the file imports from the rest of SGLang.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton

from pdkernels.bench.cases import Case, Memory
from pdkernels.bench.timing import Call

_FILE = Path("sglang/srt/disaggregation/common/staging_buffer.py")
_BLOCK = 1024  # elements per program, as in its launchers


def load(folder: Path | None) -> ModuleType | None:
    """Imports SGLang's module staging_buffer, which has its staging kernels. folder: folder that holds sglang/; None:
    the installed sglang. Returns None if folder is None and no sglang is installed. Raises FileNotFoundError if the
    folder lacks staging_buffer.py.
    """
    if folder is None:
        if importlib.util.find_spec("sglang") is None:
            return None
        return importlib.import_module("sglang.srt.disaggregation.common.staging_buffer")
    path = folder / _FILE
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no {_FILE}")
    _stand_in("sglang.kernels.ops.memory.ptr_table", make_ptr_table=_make_table)
    _stand_in("sglang.srt.environ", envs=SimpleNamespace(SGLANG_STAGING_USE_TORCH=SimpleNamespace(get=lambda: False)))
    _stand_in("sglang.srt.utils", create_device_stream=torch.cuda.Stream, device_stream_context=torch.cuda.stream)
    spec = importlib.util.spec_from_file_location("sglang_staging_buffer", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _make_table(rows: Any, device: torch.device) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _stand_in(name: str, **members: Any) -> None:
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
    vars(sys.modules[name]).update(members)


def writers_of(case: Case) -> int:
    """Returns the number of source ranks that write to one target rank in SGLang. Ranks with copies of the same KV
    heads all write, so there may be more writers than heads.
    """
    return max(1, case.src_tp // case.dst_tp)


def gather_kernel_calls(module: ModuleType, case: Case, memory: Memory) -> list[Call]:
    """Returns calls that launch only SGLang's gather kernel, one for each page list of `memory`. All tables of
    addresses are made beforehand. module: SGLang's module, as `load` returns it. case: sizes to measure. memory: pages
    and staging.
    """
    return [_kernel_call(module, case, memory, pages, offset, 1, "gather") for pages, offset in memory.rotation()]


def scatter_kernel_calls(module: ModuleType, case: Case, memory: Memory) -> list[Call]:
    """Returns calls that launch only SGLang's scatter kernel, one for each page list of `memory`. All tables of
    addresses are made beforehand. Arguments as of gather_kernel_calls.
    """
    writers = writers_of(case)
    return [
        _kernel_call(module, case, memory, pages, offset, writers, "scatter") for pages, offset in memory.rotation()
    ]


def _kernel_call(
    module: Any, case: Case, memory: Memory, pages: torch.Tensor, offset: int, writers: int, side: str
) -> Call:
    pool = memory.pool
    heads, head_dim = pool.layout.heads, pool.layout.head_dim
    bits = torch.int8 if pool.layout.dtype.itemsize == 1 else torch.int16
    staging = memory.staging[offset:].view(bits)
    pages = pages.long()
    tokens = len(pages) * case.page_size  # it moves the last page whole
    per_token = max(1, heads // writers) * head_dim
    per_layer = tokens * per_token
    planes = len(pool.planes)
    grid = (writers * planes if side == "scatter" else planes, triton.cdiv(per_layer, _BLOCK))
    if side == "gather":
        kernel = module._fused_gather_to_staging_kernel[grid]
        arguments = (
            pool.table,
            pages,
            staging,
            tokens,
            heads * head_dim,
            0,
            per_layer,
            per_token,
            case.page_size,
            _BLOCK,
        )
        return lambda: kernel(*arguments)
    kernel = module._fused_scatter_from_staging_kernel[grid]
    first_heads = [writer * heads // writers * head_dim for writer in range(writers)]  # copies land on the same heads
    offsets = torch.tensor(first_heads, dtype=torch.int64, device=pool.device)
    arguments_of_scatter = (
        pool.table,
        pages,
        staging,
        offsets,
        tokens,
        heads * head_dim,
        per_layer,
        per_token,
        case.page_size,
    )
    return lambda: kernel(*arguments_of_scatter, planes, _BLOCK)


def whole_gather_calls(module: Any, case: Case, memory: Memory, *, use_torch: bool) -> list[Call]:
    """Returns calls of SGLang's own gather function with all its host work, from a page list on the host until the KV
    is in staging. module: SGLang's, from `load`. use_torch: True: SGLang gathers with torch operations; False: with its
    Triton kernel.
    """
    pool = memory.pool
    stream = torch.cuda.Stream()
    gather = module._gather_all_layers_torch if use_torch else module._gather_all_layers_triton

    def call(pages: Any, buffer: SimpleNamespace) -> Call:
        return lambda: gather(pool.keys, pool.values, pages, buffer, 0, pool.layout.heads, case.page_size)

    return [
        call(
            pages.cpu().numpy(),
            SimpleNamespace(
                buffer=memory.staging[offset:],
                device=pool.device,
                device_module=torch.cuda,
                get_gather_stream=lambda: stream,
                producer_stream=torch.cuda.current_stream,
            ),
        )
        for pages, offset in memory.rotation()
    ]


def whole_scatter_calls(module: Any, case: Case, memory: Memory) -> list[Call]:
    """Returns calls of SGLang's function that scatters a staged request into the pages of all layers. A call includes
    the function's host work and its kernel. The page list is on the device. module: SGLang's module with the function,
    as `load` returns it.
    """
    pool = memory.pool
    scatter = module._scatter_staging_to_kv_triton

    def call(pages: torch.Tensor, offset: int) -> Call:
        staging = memory.staging[offset:]
        ranks = case.src_tp, case.dst_tp
        return lambda: scatter(staging, pool.keys, pool.values, pages, case.page_size, *ranks, 0, case.model.kv_heads)

    return [call(pages.long(), offset) for pages, offset in memory.rotation()]
