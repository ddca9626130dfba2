"""Rules that differ between engines and between releases of one engine. docs/behaviour has the source of each rule."""

from dataclasses import replace

from pdsim.dataclass import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineRules:
    """Rules of one release of an engine. The defaults are SGLang 0.5.23's."""

    tries_when_spent: bool = False
    """True: the scheduler tries the first waiting prompt even if a partly computed prompt takes the whole forward. The
    try counts as a use of the waiting prompt's cached prefix. If the waiting prompt does not fit, the scheduler tries
    no prompt until a request leaves. Without a prefix cache, a prompt that ignores EOS begins although the partly
    computed prompt has used up max_prefill_tokens."""
    caps_chunked_prompts: bool = False
    """True: a prompt does not begin if it needs more tokens than max_prefill_tokens leaves in a forward, although the
    prompt could be cut into chunks."""
    expects_fixed_outputs: bool = True
    """True: the scheduler expects running requests that ignore EOS to reach their maximum output, and reserves one
    further page for each request that it begins.
    """
    resumes_by_tokens: bool = False
    """Condition for resuming a retracted request. True: the request's number of tokens must be free. False: the number
    of free tokens must cover all pages of the request.
    """
    counts_every_insert: bool = False
    """Number of uses that a cached node counts. True: one for each insert. False: one for each request."""
    refreshes_waiting: bool = True
    """True: every 32nd time that the scheduler chooses prompts, it marks the cached prefixes of the first 128 prompts
    in the policy's order as used. Without effect if the prefix cache does not evict by last use, or if the policy sorts
    prompts by cached tokens (CacheAwareOrder) and so marks prefixes itself.
    """
    computes_last_token: bool = True
    """True: a policy that sorts prompts by cached tokens counts the last token of each prompt as uncached, because a
    forward computes this token in any case.
    """
    splits_at_prompt: bool = True
    """True: the prefix cache stores a prompt and its outputs as separate nodes, so that it can evict the outputs alone.
    """
    filters_ended: bool = True
    """True: an aggregated instance without overlap scheduling removes ended requests from its batch before it chooses
    its next step.
    """
    computes_aborted_prompts: bool = False
    """True: a prompt that is aborted after its first chunk is still computed completely."""
    keeps_ranks: bool = False
    """Position of a retracted request among the decode requests of equal priority that are ready to run (ReadyQueue).
    True: the request keeps its first position. False: the request moves behind all earlier requests."""
    keeps_aborted_places: bool = False
    """True: an aborted request stays in the decode queue until its turn to get pages comes, or another request arrives.
    """
    runs_aborted_on: bool = True
    """True: a running request that is aborted still gets one more token, and the prefix cache keeps its KV."""
    sorts_at_retraction: bool = True
    """True: a retraction sorts the batch by number of output tokens, highest first; equal requests are sorted by prompt
    length, shortest first."""
    masks_empty_rows: bool = True
    """A CUDA graph may compute more tokens than the batch has; the graph's rows beyond the batch are empty. True: if
    each GPU holds whole experts (expert parallelism), the experts do not compute these empty rows. False: on Blackwell,
    experts compute empty rows, unless tokens are sent to the GPUs of their experts. No effect for vLLM, without a mask.
    """
    num_allocation_kernels: int = 1
    """Number of variants of the page-allocation kernels that a cold server compiles for each number of requests
    (rounded up to a power of two). SGLang 0.5.12 has a variant for each alignment of the list of free pages
    (mem_cache/allocator.py:434); 0.5.23 has one variant (kernels/ops/memory/allocator.py:115).
    """
    caches_unseen: bool = False
    """Outputs are unseen while the scheduler does not know their tokens. True: if a request leaves the batch before its
    end, the prefix cache keeps whole pages of its unseen outputs, and the request finds these pages when it resumes.
    False: the pages are freed."""


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
    masks_empty_rows=False,
    num_allocation_kernels=2,
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
"""Rules of each engine's releases, the newest release first."""
