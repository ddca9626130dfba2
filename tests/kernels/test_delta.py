"""Gated delta nets: Triton's kernels against pdreal's torch functions, which are equal to transformers."""

import pytest
import torch
from pdkernels.delta import Chunks, delta_scan, delta_step
from pdreal.control.tasks import PrefillBatch, PrefillInput, StateUse
from pdreal.model.delta import DeltaDecode, DeltaPrefill, DeltaWeights

from tests.kernels.pools import DEVICE

HEADS, KEY_HEADS, KEY, VALUE, TAPS, SLOTS = 2, 1, 16, 32, 4, 9
CHANNELS = 2 * KEY_HEADS * KEY + HEADS * VALUE


class Pool:
    """States of one layer."""

    def __init__(self):
        self.conv = torch.randn(SLOTS, CHANNELS, TAPS - 1)
        self.ssm = torch.randn(SLOTS, HEADS, KEY, VALUE)

    is_cuda = False

    def layer(self, _):
        return self.conv, self.ssm


@pytest.fixture
def given():
    torch.manual_seed(0)
    shape = {"num_key_heads": KEY_HEADS, "num_value_heads": HEADS, "key_dim": KEY, "value_dim": VALUE}
    parts = {"conv": torch.randn(CHANNELS, TAPS), "rate": -torch.rand(HEADS), "bias": torch.randn(HEADS)}
    on_device = {name: part.to(DEVICE) for name, part in parts.items()}
    none = torch.empty(0)
    return Pool(), *(DeltaWeights(into=none, norm=none, **own, **shape) for own in (parts, on_device))


def inputs(num_tokens):
    """Projections of tokens as one matrix product leaves them."""
    both = torch.randn(num_tokens, CHANNELS + 2 * HEADS)
    return both, [part.split((CHANNELS, HEADS, HEADS), dim=1) for part in (both, both.to(DEVICE, copy=True))]


def check(pool, conv, ssm, found, expected):
    for ours, theirs in ((found, expected), (conv, pool.conv), (ssm, pool.ssm)):
        torch.testing.assert_close(ours[1:].cpu(), theirs[1:], atol=2e-5, rtol=1e-4)


def test_a_step(given):
    pool, weights, layer = given
    _, (theirs, ours) = inputs(3)
    slots, tracked = torch.tensor([4, 1, 6]), torch.tensor([0, 7, 0])
    conv, ssm = (part.to(DEVICE, copy=True) for part in pool.layer(0))
    expected = DeltaDecode(pool, slots, tracked)(0, *theirs, weights)
    found = delta_step(*ours, layer, conv, ssm, *(part.int().to(DEVICE) for part in (slots, tracked)))
    check(pool, conv, ssm, found, expected)


def test_chunks_of_several_sequences(given):
    """They begin, go on from another's state, go on from their own with few tokens, and leave the last state twice."""
    pool, weights, layer = given
    lengths = [70, 66, 2, 64]
    uses = [StateUse(0, 1, 2, 40), StateUse(3, 4, 5, 64), StateUse(6, 6), StateUse(0, 7, 8, 64)]
    _, (theirs, ours) = inputs(sum(lengths))
    conv, ssm = (part.to(DEVICE, copy=True) for part in pool.layer(0))
    pairs = list(zip(lengths, uses, strict=True))
    batch = PrefillBatch(tuple(PrefillInput(0, [0] * n, 0, [], state=use) for n, use in pairs))
    expected = DeltaPrefill(pool, batch)(0, *theirs, weights)
    left = [[*([(use.tracked_tokens, use.tracked)] if use.tracked else []), (n, use.own)] for n, use in pairs]
    chunks = Chunks.of(lengths, left, [use.source for use in uses], torch.device(DEVICE))
    found = delta_scan(*ours, layer, conv, ssm, chunks)
    check(pool, conv, ssm, found, expected)
