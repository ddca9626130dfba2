"""Rules in which engines, and releases of one engine, differ. docs/behaviour has the source of each rule."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class EngineRules:
    """Rules of one release of an engine. The defaults are SGLang 0.5.23's."""

    tries_when_spent: bool = False
    """True: the first waiting prompt is tried even if a begun prompt takes the whole forward. Its cached prefix then
    counts as used, and if it does not fit, no prompt is tried before a request leaves."""
    caps_chunked_prompts: bool = False
    """True: a prompt with more tokens than a forward may still take of max_prefill_tokens is not begun, although it
    could be cut into chunks."""
    expects_fixed_outputs: bool = True
    """True: running requests that ignore EOS are expected to reach their longest output, and a begun one needs a
    further page."""
    resumes_by_tokens: bool = False
    """True: a retracted request asks for its tokens. False: for whole pages."""
    counts_every_insert: bool = False
    """True: each insert of a cached node counts as a use. False: once per request."""
    refreshes_waiting: bool = True
    """Every 32nd choice of prompts uses the cached prefixes of those that wait, unless the policy does so itself."""
    computes_last_token: bool = True
    """Where prompts are ranked by what is cached of them, their last token never is."""
    splits_at_prompt: bool = True
    """A prompt and its outputs are cached as nodes of their own, so that the outputs may be evicted alone."""
    filters_ended: bool = True
    """True: an aggregated instance without overlap does not count ended requests when it chooses its next step."""
    computes_aborted_prompts: bool = False
    """True: a begun prompt that is aborted is computed to its end."""
    keeps_ranks: bool = False
    """A retracted request keeps its rank among those of its priority. Otherwise it has that of its retraction."""
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
