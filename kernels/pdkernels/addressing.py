"""Places of a unit of payload, in pages and in staging: the arithmetic that all copy kernels share.

A program moves a tile of units, numbered in the order of tokens: unit u belongs to token u // ROW, and within that
token's heads it is unit u % ROW. A unit is 16 bytes, and a tile of them is a [units, 2] tensor of 8-byte words: the
inner dimension makes the 16 bytes contiguous and aligned by construction, so that every access is 128 bits wide
whatever the division above it was.
"""

import triton
import triton.language as tl

RUN_TIME = ("table", "pages", "spans", "staging", "tokens", "first_byte")
"""Run-time parameters of the staging kernels. Triton specialises on none of them, so that no value causes a new
compilation."""


@triton.jit
def aligned(address, TYPE: tl.constexpr):
    """An address as a pointer to elements of a type, the first at a multiple of 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)


@triton.jit
def plane_pointer(address):
    """The address of a plane as a pointer to words, aligned to units."""
    return aligned(address, tl.int64)


@triton.jit
def table_entry(table, plane):
    """Reads one address of a pointer table."""
    return tl.load(table.to(tl.pointer_type(tl.int64)) + plane)


@triton.jit
def words(unit):
    """Offsets of the two 8-byte words of each 16-byte unit: from [n] to [n, 2]."""
    return unit[:, None] * 2 + tl.arange(0, 2)[None, :]


@triton.jit
def unit_in_pool(
    pages, unit, live, ROW: tl.constexpr, HEAD: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, HND: tl.constexpr
):
    """Offset of units in a plane, counted from the first moved head. ROW: units moved per token. HEAD: units per head.
    HEADS: heads of the plane. PAGE: tokens per page.
    """
    token = unit // ROW
    within = unit % ROW
    page = tl.load(pages.to(tl.pointer_type(tl.int32)) + token // PAGE, mask=live, other=0)
    if HND:
        head_in_page = page * HEADS + within // HEAD
        return (head_in_page * PAGE + token % PAGE) * HEAD + within % HEAD
    return (page * PAGE + token % PAGE) * (HEADS * HEAD) + within


@triton.jit
def unit_in_staging(unit, tokens, ROW: tl.constexpr, SLICES: tl.constexpr, PLANES: tl.constexpr):
    """Offset of units in a staging span [slice, plane, token, ROW // SLICES], counted from the plane of slice 0."""
    if SLICES == 1:
        return unit
    SLICE: tl.constexpr = ROW // SLICES
    token = unit // ROW
    within = unit % ROW
    return ((within // SLICE) * PLANES * tokens + token) * SLICE + within % SLICE


@triton.jit
def request_of(spans, pages, staging, tokens, BATCHED: tl.constexpr):
    """Pages, staging address and length of this program's request.

    A batch reads them from row program_id(1) of the spans [first index in pages, tokens, offset in staging, in bytes].
    """
    if BATCHED:
        span = spans.to(tl.pointer_type(tl.int64)) + tl.program_id(1) * 3
        pages += tl.load(span) * 4
        tokens = tl.load(span + 1).to(tl.int32)
        staging += tl.load(span + 2)
    return pages, staging, tokens
