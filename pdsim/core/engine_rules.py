"""Rules in which engines, and releases of one engine, decide differently: docs/behaviour has the source of each."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class EngineRules:
    """Rules of one release of an engine. The defaults are SGLang 0.5.23's."""

    tries_when_spent: bool = False
    """The first waiting prompt is looked at though a begun one takes the whole forward: that counts as a use of its
    cached prefix, and if it does not fit, none is tried before a request leaves."""
    caps_chunked_prompts: bool = False
    """A prompt of more than what a forward may still take of max_prefill_tokens does not begin in it, though it would
    be cut into chunks."""
    expects_fixed_outputs: bool = True
    """Running requests that ignore the end of sequence are expected to reach their longest output, and one that is
    begun needs a page more."""
    resumes_by_tokens: bool = False
    """A retracted request asks for its tokens, not for whole pages."""
    counts_every_insert: bool = False
    """A cached node is used once more whenever a request inserts it again, not once for each request."""
    refreshes_waiting: bool = True
    """Every 32nd choice of prompts uses the cached prefixes of those that wait, unless the policy does so itself."""
    computes_last_token: bool = True
    """Where prompts are ranked by what is cached of them, their last token never is."""
    splits_at_prompt: bool = True
    """A prompt and its outputs are cached as nodes of their own, so that the outputs may be evicted alone."""
    filters_ended: bool = True
    """An aggregated instance without overlap counts no request that has ended when it chooses its next step."""
    computes_aborted_prompts: bool = False
    """A begun prompt that is given up is computed to its end."""
    keeps_aborted_places: bool = False
    """A request that is given up keeps its place in decode's queue until it would get pages, or another comes."""
    runs_aborted_on: bool = True
    """A running request that is given up gets one more token, and its KV is cached."""
    sorts_at_retraction: bool = True
    """A retraction leaves the batch sorted: those with the most outputs come first, of these the shortest prompts."""

    caches_unseen: bool = False
    """Outputs are cached as their pages fill: a request that loses its pages finds them again."""


SGLANG_0_5_23 = EngineRules()
SGLANG_0_5_12 = EngineRules(
    tries_when_spent=True,
    caps_chunked_prompts=True,
    expects_fixed_outputs=False,
    resumes_by_tokens=True,
    counts_every_insert=True,
    refreshes_waiting=False,
    computes_last_token=False,
    splits_at_prompt=False,
    filters_ended=False,
    computes_aborted_prompts=True,
    keeps_aborted_places=True,
)
VLLM_0_33 = replace(
    SGLANG_0_5_23,
    refreshes_waiting=False,
    splits_at_prompt=False,
    runs_aborted_on=False,
    sorts_at_retraction=False,
    caches_unseen=True,
)

RELEASES: dict[str, dict[str, EngineRules]] = {
    "sglang": {"0.5.23": SGLANG_0_5_23, "0.5.12": SGLANG_0_5_12},
    "vllm": {"0.33.0": VLLM_0_33},
}
"""Releases of each engine, the newest first."""
