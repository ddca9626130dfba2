"""Which heads each rank sends to each other rank, between tensor-parallel layouts of different size."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadMove:
    """Heads of one source rank that one target rank needs. Both ranges number heads within their own rank."""

    source_rank: int
    target_rank: int
    source_heads: range
    target_heads: range


def head_moves(kv_heads: int, source_ranks: int, target_ranks: int) -> list[HeadMove]:
    """Returns the fewest moves from `source_ranks` ranks that fill each of `target_ranks` ranks, ordered by target rank
    and its heads. Raises ValueError if neither the heads divide evenly over the ranks nor the ranks over the heads.

    With more ranks than heads, each head has several copies. A target rank gets each head once. If n source ranks hold
    a head, target rank t gets it from the (t mod n)-th of them, so that source ranks share the work.
    """
    held = [_heads_of(rank, source_ranks, kv_heads) for rank in range(source_ranks)]
    moves = []
    for target in range(target_ranks):
        needed = _heads_of(target, target_ranks, kv_heads)
        head = needed.start
        while head < needed.stop:
            holders = [rank for rank, heads in enumerate(held) if head in heads]
            source = holders[target % len(holders)]
            stop = min(needed.stop, held[source].stop)
            moves.append(
                HeadMove(
                    source,
                    target,
                    range(head - held[source].start, stop - held[source].start),
                    range(head - needed.start, stop - needed.start),
                )
            )
            head = stop
    return moves


def _heads_of(rank: int, ranks: int, kv_heads: int) -> range:
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(f"{kv_heads} KV heads do not divide over {ranks} ranks")
    each = max(1, kv_heads // ranks)
    first = rank * each if ranks <= kv_heads else rank // (ranks // kv_heads)
    return range(first, first + each)
