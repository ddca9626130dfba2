"""Which heads go from which rank to which, between tensor-parallel layouts of different size."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadMove:
    """Heads of a source rank that a target rank needs, as ranges of each rank's own heads."""

    source_rank: int
    target_rank: int
    source_heads: range
    target_heads: range


def head_moves(kv_heads: int, source_ranks: int, target_ranks: int) -> list[HeadMove]:
    """The fewest moves that fill every target rank, in the order of target ranks and their heads.

    With more ranks than heads, each head has several copies. A source copy is sent once per target: from the first rank
    that holds it, or, where several targets need it, from copies in turn.
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
