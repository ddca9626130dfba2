"""The measured shapes (models, parallel layouts, page sizes, lengths), and memory for them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pdkernels.heads import head_moves
from pdkernels.layout import Pool


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes of a model that determine its KV cache."""

    name: str
    layers: int  # that have a KV cache
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def head_bytes(self) -> int:
        return self.head_dim * self.dtype.itemsize

    def heads_of_rank(self, ranks: int) -> int:
        return max(1, self.kv_heads // ranks)


MODELS = (
    Model("qwen3.5-397b-fp8", 15, 2, 256, torch.float8_e4m3fn),
    Model("llama3.1-8b-bf16", 32, 8, 128, torch.bfloat16),
    Model("qwen3-32b-fp8", 64, 8, 128, torch.float8_e4m3fn),
    Model("minimax-m2.5-bf16", 62, 8, 128, torch.bfloat16),
    Model("qwen3-32b-bf16", 64, 8, 128, torch.bfloat16),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A request that moves between two layouts, from the view of a source rank (gather) or a target rank (scatter).
    src_tp, dst_tp: tensor-parallel sizes of the two layouts.
    """

    model: Model
    tokens: int
    page_size: int
    src_tp: int
    dst_tp: int

    @property
    def source_heads(self) -> int:
        return self.model.heads_of_rank(self.src_tp)

    @property
    def target_heads(self) -> int:
        return self.model.heads_of_rank(self.dst_tp)

    @property
    def writers(self) -> int:
        """Number of source ranks that send to one target rank. Several copies of a head are sent once."""
        moves = head_moves(self.model.kv_heads, self.src_tp, self.dst_tp)
        return sum(move.target_rank == 0 for move in moves)

    def payload_bytes(self, heads: int) -> int:
        return 2 * self.model.layers * self.tokens * heads * self.model.head_bytes


class Arena:
    """A buffer of random bytes on the device. The buffer is filled once; each case then takes its memory from the
    buffer, so that no case has to fill new memory.
    """

    def __init__(self, size_bytes: int, device: str = "cuda") -> None:
        self._bytes = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self._bytes.view(torch.int64).random_()
        self._used = 0

    @property
    def device(self) -> torch.device:
        return self._bytes.device

    def reset(self) -> None:
        self._used = 0

    def take(self, size_bytes: int) -> torch.Tensor:
        begin = self._used
        self._used += -(-size_bytes // 512) * 512
        if self._used > len(self._bytes):
            raise MemoryError(f"the case needs {self._used} bytes, the arena has {len(self._bytes)}")
        return self._bytes[begin : begin + size_bytes]


_ROTATED_BYTES = 256 << 20  # several times the L2 cache
_MOST_ROTATED = 64


@dataclass(frozen=True, slots=True)
class Memory:
    """A pool with its staging buffer. pages: several page lists of equal length. offsets: for each page list, where its
    span of staging begins, in bytes. Calls that take turns over all page lists and their spans (`rotation`) do not find
    their data in L2. A payload above 2 GiB has one page list only.
    """

    pool: Pool
    pages: list[torch.Tensor]
    staging: torch.Tensor
    offsets: list[int]

    @classmethod
    def of(cls, arena: Arena, case: Case, heads: int) -> "Memory":
        """Makes the memory in which one rank with `heads` KV heads runs the case. Takes back all memory that the arena
        lent before, so an earlier Memory must not be used any more.
        """
        arena.reset()
        payload = case.payload_bytes(heads)
        count = max(1 if payload > 2 << 30 else 2, min(_MOST_ROTATED, -(-_ROTATED_BYTES // payload)))
        pages_each = -(-case.tokens // case.page_size)
        pages = max(count * pages_each, 4096 // case.page_size)
        shape = (pages * case.page_size, heads, case.model.head_dim)
        plane_bytes = shape[0] * heads * case.model.head_bytes
        planes = [arena.take(plane_bytes).view(case.model.dtype).view(shape) for _ in range(2 * case.model.layers)]
        order = torch.randperm(pages, device=arena.device).to(torch.int32)
        lists = [order[i * pages_each : (i + 1) * pages_each].clone() for i in range(count)]
        span = payload // case.tokens * pages_each * case.page_size  # SGLang moves the last page whole
        staging = arena.take(span * count)
        pool = Pool(planes[: case.model.layers], planes[case.model.layers :], case.page_size)
        return cls(pool, lists, staging, [i * span for i in range(count)])

    def rotation(self) -> Iterator[tuple[torch.Tensor, int]]:
        return zip(self.pages, self.offsets, strict=True)
