"""Which tokens a rank has between attention and experts, and how ranks exchange them.

Without an all-to-all every rank has all tokens. With an all-to-all each rank keeps its share of a forward's tokens, as
in SGLang with --moe-a2a-backend deepep and tensor-parallel attention (0.5.23, layers/layer_boundary/factories.py:262):

attention's parts -> reduce-scatter -> norm and router of own tokens -> dispatch -> experts -> combine -> norm ->
all-gather -> attention

Tokens are padded to a multiple of the number of ranks. SGLang sums dense layers by all-reduces. Here they divide their
tokens, too: a reduce-scatter and an all-gather move the bytes of an all-reduce.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from pdreal.model.experts import mix, route, run_experts
from pdreal.model.parallel import TensorParallel
from pdreal.model.weights import ExpertWeights

MOST_FIXED_TOKENS = 2048
"""Maximum number of tokens of a forward, over all ranks, in which ranks exchange messages of a fixed size. Each message
has room for all tokens of one rank. This maximum is the size of the largest CUDA graph of a prefill forward. In longer
forwards ranks first tell each other how many tokens they will send, and send a token only to ranks that hold an expert
of the token.
"""


class Tokens(Protocol):
    """The tokens that one rank computes in the layers' parts other than attention (all tokens of a forward, or the
    rank's share of them), and how ranks exchange tokens.
    """

    def own(self, x: Tensor) -> Tensor:
        """Returns this rank's rows of x, [all tokens, hidden]."""
        ...

    def all(self, x: Tensor, num_tokens: int) -> Tensor:
        """Returns all tokens, [num_tokens, columns]. x: this rank's tokens, [own tokens, columns]."""
        ...

    def summed(self, x: Tensor) -> Tensor:
        """Adds up x, [all tokens, hidden], over all ranks. Returns the sums of this rank's tokens. May overwrite x."""
        ...

    def mixed(self, x: Tensor, weights: ExpertWeights, shared: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the output of a layer of experts for this rank's tokens, [own tokens, hidden], and the experts that
        the tokens chose, [own tokens, experts per token]. x: this rank's tokens, [own tokens, hidden]. shared: output
        of the shared experts. If tokens are divided among ranks, `shared` is complete; otherwise it is this rank's
        part. None: there are no shared experts.
        """
        ...


class AllTokens:
    """Every rank has all tokens; the all-reduce of tensor parallelism adds up what the ranks' experts compute."""

    def __init__(self, ranks: TensorParallel) -> None:
        self._ranks = ranks

    def own(self, x: Tensor) -> Tensor:
        return x

    def all(self, x: Tensor, num_tokens: int) -> Tensor:
        return x

    def summed(self, x: Tensor) -> Tensor:
        return self._ranks.sum_(x)

    def mixed(self, x: Tensor, weights: ExpertWeights, shared: Tensor | None) -> tuple[Tensor, Tensor]:
        mixed, chosen = run_experts(x, weights)
        return self._ranks.sum_(mixed if shared is None else mixed + shared), chosen


class DividedTokens:
    """Each rank has an equal share of the tokens, and sends them to the ranks of their experts."""

    def __init__(self, ranks: TensorParallel) -> None:
        self._ranks = ranks

    def own(self, x: Tensor) -> Tensor:
        return self._padded(x)[self._ranks.part(len(x) + -len(x) % self._ranks.size)]

    def all(self, x: Tensor, num_tokens: int) -> Tensor:
        return self._ranks.gather(x)[:num_tokens]

    def summed(self, x: Tensor) -> Tensor:
        return self._ranks.sum_scatter(self._padded(x))

    def mixed(self, x: Tensor, weights: ExpertWeights, shared: Tensor | None) -> tuple[Tensor, Tensor]:
        shares, chosen = route(x, weights)
        padding = self._ranks.size - 1  # at most
        is_fixed = len(x) * self._ranks.size <= MOST_FIXED_TOKENS + padding
        rows = packed(x, shares, chosen)
        mixed = self._with_fixed_sizes(rows, weights) if is_fixed else self._with_counts(rows, chosen, weights)
        return mixed if shared is None else mixed + shared, chosen

    def _padded(self, x: Tensor) -> Tensor:
        return pad(x, (0, 0, 0, missing)) if (missing := -len(x) % self._ranks.size) else x

    def _with_fixed_sizes(self, rows: Tensor, weights: ExpertWeights) -> Tensor:
        """Returns the output of experts for this rank's tokens, [rows, hidden]. Sends every token to every rank, so the
        size of the exchange is fixed, and a CUDA graph can capture it. rows: hidden states of this rank's tokens with
        their experts, as the function `packed` returns them.
        """
        size = self._ranks.size
        computed = _computed(self._ranks.exchange(rows.repeat(size, 1)), weights)
        return self._ranks.exchange(computed).view(size, len(rows), -1).sum(0)

    def _with_counts(self, rows: Tensor, chosen: Tensor, weights: ExpertWeights) -> Tensor:
        """Returns the output of experts for this rank's tokens, [rows, hidden]. Ranks first tell each other how many
        rows they will send. Then each token is sent once to each rank that holds at least one of the token's experts,
        and the results of these ranks are added up. rows: hidden states of this rank's tokens with their experts, as
        the function `packed` returns them. chosen: indices of the tokens' experts.
        """
        size, num_tokens = self._ranks.size, len(rows)
        holder = chosen // (len(weights.router) // size)
        needed = (holder == torch.arange(size, device=rows.device)[:, None, None]).any(dim=2)
        to, token = needed.nonzero(as_tuple=True)
        num_sent = needed.sum(dim=1)
        sent, got = torch.stack((num_sent, self._ranks.exchange(num_sent))).tolist()
        received = self._ranks.exchange(rows[token], sent, got)
        parts = rows.new_zeros(size * num_tokens, weights.router.shape[1])
        parts[to * num_tokens + token] = self._ranks.exchange(_computed(received, weights), got, sent)
        return parts.view(size, num_tokens, -1).sum(0)


def packed(x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    """Returns one row for each token: its hidden state, and the weights and indices of its experts in 4 bytes each. x:
    hidden states, [tokens, hidden]. shares, chosen: weights and indices of the experts, [tokens, experts per token].
    """
    return torch.cat((x, shares.float().view(x.dtype), chosen.int().view(x.dtype)), dim=1)


def unpacked(rows: Tensor, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns views of the parts of packed rows: hidden states, and weights and indices of each token's experts.
    hidden: size of a hidden state.
    """
    width = (rows.shape[1] - hidden) // 2
    x, shares, chosen = rows.split((hidden, width, width), dim=1)
    return x, shares.view(torch.float32), chosen.view(torch.int32)


def _computed(rows: Tensor, weights: ExpertWeights) -> Tensor:
    """Returns the weighted sum of the outputs of this rank's experts for packed rows, [rows, hidden]."""
    return mix(*unpacked(rows, weights.router.shape[1]), weights)


def tokens_of(ranks: TensorParallel, *, has_experts: bool) -> Tokens:
    """Returns an object that knows which tokens this rank computes outside of attention: its share of them if the model
    has experts and ranks send tokens to experts, else all tokens.
    """
    return DividedTokens(ranks) if ranks.sends_to_experts and has_experts else AllTokens(ranks)
