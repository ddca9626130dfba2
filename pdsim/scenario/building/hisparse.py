"""Decode servers with HiSparse keep KV in host memory, and a part of the KV in a buffer on the GPU. Checks these
servers, and computes the size of the buffer.
"""

from pdsim.scenario.sections.servers import HiSparseSettings
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.memory import Layout
from pdsim.system.model import LatentAttention

_KV_DTYPES = ("bf16", "fp8")


def resolved_hisparse(settings: HiSparseSettings, layout: Layout, page_size: int, pool_tokens: int) -> HiSparseSettings:
    """The settings, in which the number of tokens of each request's buffer on the GPU is filled in. Raises ConfigError
    if SGLang has no HiSparse for this model, if pdsim does not model it, if the given buffer breaks a rule of SGLang,
    or if the GPU's pool of pool_tokens is smaller than a buffer and a page.
    """
    if wrong := _wrong_model(layout):
        raise ConfigError(f"decode.hisparse: {wrong}")
    chosen = layout.model.attention.window_tokens
    buffer = settings.device_buffer_tokens or 2 * chosen
    where = f"decode.hisparse.device_buffer_tokens: {buffer}"
    if buffer < chosen:
        at = "0.5.23, mem_cache/sparsity/factory.py:86"
        raise ConfigError(f"{where}: attention chooses {chosen} tokens, so SGLang needs at least as many ({at})")
    if buffer % page_size:
        at = "0.5.23, mem_cache/allocator/hisparse.py:161"
        raise ConfigError(f"{where}: SGLang needs a multiple of page_size {page_size} ({at})")
    if pool_tokens < buffer + page_size:
        raise ConfigError(
            f"{where}: the GPU holds {pool_tokens} tokens, fewer than a buffer and a page of {page_size}, so no "
            "request is ever admitted: give decode a larger GPU, tp, mem_fraction or pool_tokens"
        )
    return settings.model_copy(update={"device_buffer_tokens": buffer})


def _wrong_model(layout: Layout) -> str:
    attention, name = layout.model.attention, layout.model.name
    if not isinstance(attention, LatentAttention) or not attention.sparse_tokens or attention.compress_ratios:
        at = "0.5.23, arg_groups/hisparse_hook.py:104"
        return (
            f"pdsim models it for DeepSeek sparse attention only, which {name} lacks (SGLang {at}, also takes "
            "DeepSeek V4 and MiniMax M3); leave it out"
        )
    if layout.kv_dtype not in _KV_DTYPES:
        return f"SGLang needs kv_dtype {' or '.join(_KV_DTYPES)} (0.5.23, arg_groups/hisparse_hook.py:64)"
    return ""
