"""Tiny models for tests, and functions that run them."""

import pytest

pytest.importorskip("torch", reason="real mode needs torch")

from array import array
from dataclasses import replace
from functools import cache
from random import Random

import torch
from pdreal.control.tasks import DecodeBatch, PrefillBatch, PrefillInput, whole_tables
from pdreal.memory.states import StatePool
from pdreal.model.attention import causal_attention
from pdreal.model.delta import convolve, inputs_of, recur
from pdreal.model.transformer import Transformer
from pdreal.model.weights import RandomWeights
from pdreal.rank.runner import ModelRunner
from pdreal.settings.model import ModelConfig, from_catalog

from pdsim.system.llama import LlamaArchitecture, RopeScaling


class WholeSequence:
    """Attention without a cache. All tokens form one sequence from its beginning."""

    def __init__(self, narrow_kv=False):
        """narrow_kv: True: round keys and values as a cache in e4m3 does."""
        self._kept = (lambda kv: kv.to(torch.float8_e4m3fn).to(kv.dtype)) if narrow_kv else lambda kv: kv

    def __call__(self, layer, query, key, value, window=0):
        return causal_attention(query, self._kept(key), self._kept(value), window=window)

    def delta(self, layer, mixed, beta, decay, weights):
        before = mixed.new_zeros(1, mixed.shape[1], weights.conv.shape[1] - 1)
        given = inputs_of(convolve(mixed[None], before, weights.conv)[0], beta, decay, weights)
        state = torch.zeros(weights.num_value_heads, weights.key_dim, weights.value_dim)
        outputs = []
        for i in range(len(mixed)):
            out, (state,) = recur(given.part(slice(i, i + 1)), state[None])
            outputs.append(out)
        return torch.cat(outputs)

    def latent(self, layer, query, latent, heads):
        return causal_attention(query, *heads.expand(self._kept(latent)), heads.scale)


@torch.inference_mode()
def generate(model, prompt, num_tokens, attend=None):
    """Returns the next `num_tokens` likeliest tokens after a prompt, computed by one process without a cache. Tests
    compare other outputs with these. attend: the attention; None: WholeSequence.
    """
    tokens = list(prompt)
    for _ in range(num_tokens):
        sequence = torch.tensor(tokens, device=model.device)
        positions = torch.arange(len(tokens), device=model.device)
        last = torch.tensor([len(tokens) - 1], device=model.device)
        logits = model.logits(sequence, positions, attend or WholeSequence(), last)
        tokens.append(int(model.best_tokens(logits)))
    return tokens[len(prompt) :]


CPU = torch.device("cpu")
GPU_OR_CPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Device for Triton kernels. On a CPU they run in Triton's interpreter."""

LLAMA = ModelConfig(
    name="tiny-llama",
    vocab_size=300,
    hidden_size=96,
    num_layers=2,
    num_query_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_context_tokens=512,
    tied_embeddings=True,
    llama=LlamaArchitecture(
        intermediate_size=128,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        rope_scaling=RopeScaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=64),
    ),
)


@cache
def tiny_model() -> Transformer:
    return load(from_catalog("tiny-qwen3"))


DEEPSEEK = replace(from_catalog("tiny-deepseek-v3"), vocab_size=300, hidden_size=64, max_context_tokens=512)
MOONLIGHT = replace(
    DEEPSEEK,
    name="tiny-moonlight",
    llama=replace(
        DEEPSEEK.llama,
        rms_norm_eps=1e-5,
        yarn=None,
        query_rank=0,
        routing=replace(DEEPSEEK.llama.routing, num_groups=1, num_active_groups=1, num_shared=2),
    ),
)
"""Model whose queries are not made from a latent, with one group of experts and two shared experts."""


WINDOWS = replace(from_catalog("tiny-windows"), vocab_size=300, hidden_size=64, max_context_tokens=512)
MISTRAL = replace(
    LLAMA,
    name="tiny-mistral",
    window_tokens=21,
    llama=replace(LLAMA.llama, rope_scaling=None, window_layers=(0, 1)),
)
"""Model in which all layers have a sliding window."""


HYBRID = replace(from_catalog("tiny-hybrid"), vocab_size=300, hidden_size=64, max_context_tokens=512)


def load(config: ModelConfig, source=None, tp=None, device=CPU) -> Transformer:
    return Transformer.load(config, source or RandomWeights(0, device), dtype=torch.float32, device=device, tp=tp)


def runner(model: Transformer | None = None, num_pages: int = 256, page_size: int = 4, **options) -> ModelRunner:
    return ModelRunner(model or tiny_model(), num_pages=num_pages, page_size=page_size, **options)


def state_pool(model: Transformer, num_slots: int) -> StatePool:
    types = {"dtype": model.dtype, "state_dtype": torch.float32, "device": model.device}
    return StatePool(model.config, 1, num_slots=num_slots, **types)


def tokens(seed: int, num_tokens: int, vocab_size: int = 512) -> array:
    rng = Random(seed)
    return array("i", [rng.randrange(vocab_size) for _ in range(num_tokens)])


def chunk(prompt: array, start: int, stop: int, page_table: list[int], request_id: int = 0) -> PrefillInput:
    return PrefillInput(request_id, prompt[start:stop], start, page_table)


def whole(*prompts_and_tables: tuple[array, list[int]]) -> PrefillBatch:
    return PrefillBatch(tuple(chunk(p, 0, len(p), table, i) for i, (p, table) in enumerate(prompts_and_tables)))


def decode_on(r: ModelRunner, last, num_kv_tokens, tables, num_tokens: int) -> list[list[int]]:
    """Decodes several sequences in one batch. last: last token of each. Returns, for each sequence, its last token and
    the next num_tokens tokens.
    """
    made = [[token] for token in last]
    for step in range(num_tokens):
        lengths = tuple(n + step for n in num_kv_tokens)
        batch = DecodeBatch(tuple(m[-1] for m in made), lengths, () if step else whole_tables(tables))
        for m, token in zip(made, r.decode(batch), strict=True):
            m.append(token)
    return made
