"""Where bytes lie in pages and in staging: the address arithmetic of all copy kernels.

The kernels copy in units of 16 bytes. A program moves a tile of units, numbered in the order of tokens: unit u belongs
to token u // ROW, and is unit u % ROW of that token's heads.

A tile is a [units, 2] tensor of 8-byte words. The inner dimension makes 16 bytes contiguous and aligned, so every
access has 128 bits, whatever division the address came from.
"""

import triton
import triton.language as tl

RUN_TIME = ("table", "pages", "spans", "staging", "tokens", "first_byte")
"""Parameters of the staging kernels that are passed at run time. Triton does not specialise the kernels on their
values, so no value causes a new compilation.
"""


@triton.jit
def aligned(address, TYPE: tl.constexpr):
    """Returns an address as a pointer to elements of a type. The address must be a multiple of 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)


@triton.jit
def plane_pointer(address):
    """Returns the address of a plane as a pointer to 8-byte words, aligned to 16 bytes."""
    return aligned(address, tl.int64)


@triton.jit
def table_entry(table, plane):
    """Returns the address in the entry `plane` of a pointer table."""
    return tl.load(table.to(tl.pointer_type(tl.int64)) + plane)


@triton.jit
def words(unit):
    """Returns the offsets of the two 8-byte words of each unit (16 bytes), [n, 2], as numbers of words. unit: offsets
    of the units, [n], as numbers of units.
    """
    return unit[:, None] * 2 + tl.arange(0, 2)[None, :]


@triton.jit
def unit_in_pool(
    pages, unit, live, ROW: tl.constexpr, HEAD: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, HND: tl.constexpr
):
    """Returns where units of 16 bytes lie in a plane. Each position is a number of units, counted from the plane's
    first head that is moved.

    pages: address of the request's page list. unit: numbers of the units, in the order of tokens. live: mask of the
    units that exist. ROW: units moved per token. HEAD: units per head. HEADS: heads of the plane. PAGE: tokens per
    page. HND: True: pages have order HND; False: NHD.
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
    """Returns where units of a plane lie in a staging span [slice, plane, token, ROW // SLICES], in units from the
    begin of this plane in the first slice. unit: indices of units among those of the plane, token after token. tokens:
    tokens of the request. ROW: units moved per token. SLICES, PLANES: numbers of slices and planes in the span.
    """
    if SLICES == 1:
        return unit
    SLICE: tl.constexpr = ROW // SLICES
    token = unit // ROW
    within = unit % ROW
    return ((within // SLICE) * PLANES * tokens + token) * SLICE + within % SLICE


@triton.jit
def request_of(spans, pages, staging, tokens, BATCHED: tl.constexpr):
    """Returns (address of the page list, staging address, number of tokens) of the request that this program copies.
    Without BATCHED, returns the arguments pages, staging and tokens unchanged. With BATCHED, row program_id(1) of
    `spans` describes the request, relative to `pages` and `staging`: [first index in pages, tokens, offset in staging
    in bytes].
    """
    if BATCHED:
        span = spans.to(tl.pointer_type(tl.int64)) + tl.program_id(1) * 3
        pages += tl.load(span) * 4
        tokens = tl.load(span + 1).to(tl.int32)
        staging += tl.load(span + 2)
    return pages, staging, tokens
