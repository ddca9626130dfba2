"""Rules in which engines, and releases of one engine, differ. docs/behaviour has the source of each rule."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class EngineRules:
    """Rules of one release of an engine. The defaults are SGLang 0.5.23's."""

    tries_when_spent: bool = False
    """True: the first waiting prompt is tried even if a begun prompt takes the whole forward. Its cached prefix then
    counts as used. If the prompt does not fit, no prompt is tried before a request leaves. Where nothing is cached, a
    prompt that ignores EOS begins although max_prefill_tokens is spent."""
    caps_chunked_prompts: bool = False
    """True: a prompt that needs more tokens than max_prefill_tokens still allows in a forward is not begun, although it
    could be cut into chunks."""
    expects_fixed_outputs: bool = True
    """True: running requests that ignore EOS are expected to reach their longest output, and a request that is begun
    needs a further page."""
    resumes_by_tokens: bool = False
    """Pages of a retracted request that resumes. True: for its number of tokens. False: for that number, rounded up to
    whole pages."""
    counts_every_insert: bool = False
    """Uses of a cached node. True: each insert counts. False: each request counts once."""
    refreshes_waiting: bool = True
    """True: every 32nd choice of prompts marks the cached prefixes of waiting prompts as used, unless the policy does
    so itself."""
    computes_last_token: bool = True
    """True: policies that rank prompts by cached tokens count the last prompt token as uncached."""
    splits_at_prompt: bool = True
    """True: a prompt and its outputs are cached as separate nodes, so that the outputs may be evicted alone."""
    filters_ended: bool = True
    """True: an aggregated instance without overlap does not count ended requests when it chooses its next step."""
    computes_aborted_prompts: bool = False
    """True: a prompt that is aborted after its first chunk is computed to its end."""
    keeps_ranks: bool = False
    """Rank of a retracted request among those of its priority. True: the request keeps its first rank. False:
    retraction gives a new rank."""
    keeps_aborted_places: bool = False
    """True: an aborted request keeps its place in decode's queue until it would get pages, or another request
    arrives."""
    runs_aborted_on: bool = True
    """True: a running request that is aborted gets one more token, and its KV is cached."""
    sorts_at_retraction: bool = True
    """True: a retraction sorts the batch: requests with the most outputs first, and of these the shortest prompts."""

    caches_unseen: bool = False
    """True: outputs are cached as their pages fill, so that a request that loses its pages finds them again."""


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
    keeps_ranks=True,
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
