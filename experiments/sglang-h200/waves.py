"""What the straight line of a decode step leaves out: attention runs in waves of thread blocks over the SMs.

FlashAttention-3 cuts a batch of b requests of L tokens into CTAs: one for each request and KV head, split along the
context until the SMs are full. 132 of them run at a time, and the last wave is partly empty. A wave takes the larger
of its bytes over the memory bandwidth and the time of one CTA for its blocks of 128 tokens; splits add a merge. The
rest of a step grows with the batch size that the CUDA graph was captured for, with jumps at 2 and at 8.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from rows import Floats, Steps
from scipy.optimize import least_squares

SMS, BLOCK_TOKENS, LAYERS, KV_HEADS = 132, 128, 36, 8
TOKEN_BYTES = 512
"""Of one KV head in one layer: K and V of 128 dimensions, two bytes each."""
CAPTURED = np.array([1, 2, 4, 8, 12, *range(16, 513, 8)])
START = (4.9, 0.011, 0.08, 0.1, 4.4, 1.0, 4.5)
"""ms, ms per captured request, ms from 2 on, ms from 8 on; TB/s, us per block, us of a merge."""


def attention_us(batch: Floats, length: Floats, bandwidth: float, per_block: float, merge: float) -> Floats:
    """Of one layer."""
    blocks = np.ceil(length / BLOCK_TOKENS)
    blocks_per_sm = np.ceil(1.1 * blocks * batch * KV_HEADS / SMS)
    splits = np.maximum(1, np.ceil(blocks / blocks_per_sm))
    share = length / splits
    full_waves, rest = np.divmod(batch * KV_HEADS * splits, SMS)

    def wave(ctas: Floats | float) -> Floats:
        return np.maximum(ctas * share * TOKEN_BYTES / (bandwidth * 1e6), share / BLOCK_TOKENS * per_block)

    return full_waves * wave(SMS) + np.where(rest > 0, wave(rest), 0) + np.where(splits > 1, merge, 0)


def step_ms(of: Sequence[float], rows: Steps) -> Floats:
    captured = CAPTURED[np.searchsorted(CAPTURED, rows.batch)]
    dense = of[0] + of[1] * captured + of[2] * (captured >= 2) + of[3] * (captured >= 8)  # noqa: PLR2004
    return dense + LAYERS / 1e3 * attention_us(rows.batch, rows.kv_tokens / rows.batch, of[4], of[5], of[6])


def compare(rows: Steps, unseen: Steps, regions_of: Callable[[Steps], list[str]]) -> None:
    """Prints the errors of this form, to be held against those of the line."""
    found = least_squares(
        lambda of: step_ms(of, rows) / rows.gpu_ms - 1, START, loss="soft_l1", f_scale=0.03, x_scale=START
    )
    print(f"\ndecode with attention waves, 8B TP1 (not used): {[round(float(x), 4) for x in found.x]}")
    _print_errors(step_ms(found.x, rows) / rows.gpu_ms - 1, regions_of(rows))
    errors = step_ms(found.x, unseen) / unseen.gpu_ms - 1
    print(f"  aggregated server, not fitted: {np.abs(errors).mean():.2%}, bias {errors.mean():+.2%}")


def _print_errors(errors: Floats, regions: list[str]) -> None:
    for region in sorted(set(regions)):
        chosen: NDArray[np.bool_] = np.array(regions) == region
        share, bias = f"{np.abs(errors[chosen]).mean():6.1%}", f"{np.median(errors[chosen]):+6.1%}"
        print(f"  {region:44} {chosen.sum():6} rows, mean absolute error {share}, median {bias}")
    print(f"  all: {np.abs(errors).mean():.2%}")
