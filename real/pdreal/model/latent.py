"""Query heads of a rank over latents, one for each token: either keys and values are expanded from the latents, or
queries are turned so that they look at the latents themselves. Both say the same; the first is less work for prompts,
and the second reads less in decode.

A latent is [rank | rotated key], a query [plain | rotated].
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear


@dataclass(frozen=True)
class LatentHeads:
    keys: Tensor
    """[heads, plain, rank]"""
    values: Tensor
    """[heads, value, rank]"""
    scale: float
    """Factor of scores."""

    @property
    def rank(self) -> int:
        return self.keys.shape[2]

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [tokens, heads, dim] of latents [tokens, 1, rank | rotated]."""
        low, rotated = latent[:, 0, : self.rank], latent[..., self.rank :]
        keys, values = (_each_head(low, part.flatten(0, 1), len(part)) for part in (self.keys, self.values))
        return torch.cat((keys, rotated.expand(-1, len(self.keys), -1)), dim=-1), values

    def absorb(self, query: Tensor) -> Tensor:
        """Queries that look at latents, [tokens, heads, rank | rotated]."""
        plain, rotated = query.tensor_split((self.keys.shape[1],), dim=-1)
        low = torch.bmm(plain.transpose(0, 1), self.keys).transpose(0, 1)
        return torch.cat((low, rotated), dim=-1)

    def read_out(self, attended: Tensor) -> Tensor:
        """Outputs of heads, [tokens, heads, value], from the latents that they saw, [tokens, heads, rank]."""
        return torch.bmm(attended.transpose(0, 1), self.values.transpose(1, 2)).transpose(0, 1)


def _each_head(low: Tensor, matrix: Tensor, num_heads: int) -> Tensor:
    return linear(low, matrix).view(len(low), num_heads, -1)
