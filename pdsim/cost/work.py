"""How much a forward has to do, whatever it runs on."""

from pdsim.core.messages import PrefillChunk


def attended_pairs(chunk: PrefillChunk) -> float:
    """Pairs of a new token and a token it attends to: the context, and half of the chunk itself."""
    return chunk.num_tokens * (chunk.num_context_tokens + chunk.num_tokens / 2)
