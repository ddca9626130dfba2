"""Fingerprints of KV that do not depend on how heads are spread over ranks, to check what arrived."""

import zlib
from collections.abc import Mapping, Sequence

import torch

from pdreal.geometry import slots_of

Digests = Mapping[str, int]
"""By KV head of the model, as text, for they cross as JSON."""


def digest(
    planes: Sequence[torch.Tensor], heads: range, pages: Sequence[int], tokens: range, page_size: int
) -> Digests:
    """CRC-32 over all layers of the KV of some tokens of a page list. heads: those that the rank holds."""
    slots = torch.from_numpy(slots_of(pages, page_size)[tokens.start : tokens.stop]).to(planes[0].device)
    sums = dict.fromkeys(heads, 0)
    for plane in planes:
        by_head = plane.index_select(0, slots).transpose(0, 1).contiguous().view(torch.uint8).cpu().numpy()
        for head, kv in zip(heads, by_head, strict=True):
            sums[head] = zlib.crc32(kv, sums[head])
    return {str(head): value for head, value in sums.items()}
