"""CUDA graphs are captured for some batch sizes; a decode step replays the next larger one, half empty as it may be."""

from bisect import bisect_left
from collections.abc import Sequence

from pdsim.core.messages import PrefillStep
from pdsim.cost.model import CostModel, DecodeLine

_FOREVER = 1 << 30


def captured_batches(max_batch: int, max_running: int, *, speculative: bool = False) -> list[int]:
    """SGLang's sizes up to max_batch, which is always one (0.5.23, generate_decode_cuda_graph_batch_sizes)."""
    ranges = (
        [range(1, 9), range(10, 33, 2), range(40, 65, 4), range(72, 257, 8), range(272, _FOREVER, 16)]
        if speculative
        else [(1, 2, 4, 8, 12), range(16, 257, 8), range(272, 512, 16), range(512, _FOREVER, 32)]
    )
    largest = min(max_batch, max_running)
    sizes = {size for sizes in ranges for size in sizes[: bisect_left(sizes, largest + 1)]}
    return sorted(sizes | {largest})


class GraphReplay:
    """A model whose decode steps run in captured sizes; larger batches have their kernels launched one by one."""

    def __init__(self, model: CostModel, sizes: Sequence[int], launch_ns: float, empty_row_kv: float = 0) -> None:
        """launch_ns: of all kernels of an eager step, which takes no less.

        empty_row_kv: what each empty row takes, as a share of what a row takes to read its KV.
        """
        self._model = model
        self._sizes = sizes
        self._empty_row_kv = empty_row_kv
        self._eager = DecodeLine.of_ns(launch_ns, 0, 0)

    def prefill_ns(self, step: PrefillStep, start_ns: int) -> int:
        return self._model.prefill_ns(step, start_ns)

    def decode_line(self, num_requests: int) -> DecodeLine:
        index = bisect_left(self._sizes, num_requests)
        if index < len(self._sizes):
            size = self._sizes[index]
            line = self._model.decode_line(size)
            empty = 1 + self._empty_row_kv * (size / num_requests - 1)
            return line._replace(per_context_token=round(empty * line.per_context_token))
        line = self._model.decode_line(num_requests)
        return line._replace(base=max(line.base, self._eager.base))
