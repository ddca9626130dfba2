"""Speculative decoding: its fields, the defaults of SGLang, and the draft model."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from pdsim.core.decode.running_batch import Drafts
from pdsim.scenario.sections.fields import Duration, Section
from pdsim.system.draft import EAGLE3_VOCABULARY, DraftModel, eagle3_head, eagle_head, nextn_layers, standalone
from pdsim.system.model import ModelSpec
from pdsim.workload.lengths import Acceptance

DEFAULT_RUNNING = 48
"""Default of max_running_requests with speculation (SGLang 0.5.23, arg_groups/speculative_hook.py:1078)."""
DSPARK_TOKENS = 8
"""Number of tokens that a step verifies with SGLang's algorithm DSPARK: a block of 7 drafts, and the last token
(DEFAULT_DSPARK_GAMMA).
"""
NGRAM_TOKENS = 12
_CHAIN, _LLAMA_TREE = (3, 1, 4), (5, 4, 8)
"""SGLang's numbers of draft steps, branches and verified tokens: _LLAMA_TREE for Llama models unless the algorithm is
STANDALONE, _CHAIN for others (_auto_choose_speculative_params).
"""

Algorithm = Literal["EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "DSPARK", "NGRAM"]


class DraftError(ValueError):
    """Raised if a model has no draft of the chosen kind, with the reason as message."""


def named(value: Any) -> Any:
    """The algorithm's name in capital letters; SGLang also takes small letters. MTP, as other engines call it, becomes
    NEXTN.
    """
    name = value.upper() if isinstance(value, str) else value
    return "NEXTN" if name == "MTP" else name


class SpeculativeSettings(Section):
    """Speculative decoding: a step verifies several tokens of each request and keeps one or more."""

    speculative_algorithm: Annotated[Algorithm, BeforeValidator(named)] | None = None
    """Kind of draft (--speculative-algorithm): EAGLE (the checkpoint's own MTP layers, else an EAGLE head), NEXTN or
    MTP (these layers only), EAGLE3, STANDALONE, DSPARK or NGRAM. None, with speculative_draft_tokens: EAGLE."""
    speculative_num_steps: int | None = Field(default=None, ge=1)
    """Number of draft forwards of one decode step (--speculative-num-steps). None: speculative_draft_tokens - 1. If
    speculative_algorithm is given, and neither this field nor speculative_eagle_topk nor speculative_draft_tokens is:
    SGLang's choice for the model."""
    speculative_eagle_topk: int | None = Field(default=None, ge=1)
    """Number of branches that each draft forward follows (--speculative-eagle-topk). None: 1, or SGLang's choice for
    the model, as for speculative_num_steps. With 1, a step verifies speculative_num_steps + 1 tokens."""
    speculative_draft_tokens: int | None = Field(default=None, ge=2)
    """Number of tokens that a step verifies for each request, including its last token
    (--speculative-num-draft-tokens). None, without speculative_algorithm: no speculation."""
    speculative_accept_length: float | None = Field(default=None, ge=1)
    """Mean number of tokens that a speculative step yields for a request."""
    speculative_draft_model: str | None = None
    """Draft model of STANDALONE: its name in the catalog (--speculative-draft-model-path)."""
    speculative_draft_layers: int | None = Field(default=None, ge=0)
    """Number of attention layers of the draft model, whose KV is kept, cached and sent with the model's. None: 1 for
    EAGLE, EAGLE3 and NEXTN, 0 for NGRAM, all of a STANDALONE model. 0: no draft model."""
    speculative_draft_vocabulary: int = Field(default=EAGLE3_VOCABULARY, ge=1)
    """Number of tokens that an EAGLE3 head can propose (draft_vocab_size of its config.json)."""
    speculative_drafting: Duration | None = None
    """Measured time of all draft forwards of one decode step. 0: the measured step times include drafting. If this
    field is set, prefill forwards take no time for drafts. None: pdsim computes the time of the draft's layers on this
    GPU, unless the step times were measured with drafts.
    """

    @model_validator(mode="after")
    def _accepts_what_is_drafted(self) -> Self:
        tokens, length = self.speculative_draft_tokens, self.speculative_accept_length
        if tokens is not None and length is None:
            raise ValueError(
                "speculative_accept_length is missing: the mean number of tokens that a step gives a request"
            )
        if tokens is None and length is not None:
            raise ValueError(
                "speculative_draft_tokens is missing: the number of tokens that a step verifies for each request; or "
                "give speculative_algorithm alone"
            )
        if tokens is not None and length is not None and length > tokens:
            raise ValueError(f"speculative_accept_length {length:g} is more than the {tokens} speculative_draft_tokens")
        if (self.speculative_algorithm == "STANDALONE") != (self.speculative_draft_model is not None):
            raise ValueError("speculative_draft_model and speculative_algorithm STANDALONE: give both or none")
        if self.speculative_algorithm == "DSPARK" and self.speculative_draft_layers is None:
            raise ValueError(
                "speculative_algorithm DSPARK needs speculative_draft_layers, num_hidden_layers of the draft's config"
            )
        return self

    @property
    def acceptance(self) -> Acceptance | None:
        """How many drafted tokens a step accepts. None: each step gives a request one token."""
        if self.speculative_draft_tokens is None or self.speculative_accept_length is None:
            return None
        return Acceptance(draft_tokens=self.speculative_draft_tokens, accept_length=self.speculative_accept_length)

    @property
    def num_verified_tokens(self) -> int:
        """Number of tokens that one decode step computes for each request."""
        return self.speculative_draft_tokens or 1

    @property
    def num_draft_steps(self) -> int:
        """Number of forwards of the draft model per decode step, including the forward that computes the KV of accepted
        tokens. 0: no speculation.
        """
        if self.speculative_draft_tokens is None:
            return 0
        return self.speculative_num_steps or self.speculative_draft_tokens - 1

    def drafts(self, page_size: int) -> Drafts | None:
        """Number of tokens that a step verifies for each request, and number of tokens for which it reserves pages.
        None: no speculation. page_size: tokens of a page.

        If a page holds several tokens, each branch of a tree of drafts begins on a copy of the last page (SGLang
        0.5.23, mem_cache/allocation_sizing.py, get_alloc_len_per_decode).
        """
        verified, branches = self.speculative_draft_tokens, self.speculative_eagle_topk or 1
        if verified is None:
            return None
        steps = self.num_draft_steps
        drafted = steps * branches
        if page_size > 1 and branches > 1:
            drafted = -(-(page_size - 1 + steps) // page_size) * page_size * branches
        return Drafts(verified, max(verified, drafted))

    def num_ahead_tokens(self, page_size: int) -> int:
        """Number of tokens after a request's KV for which the request needs pages before a decode step: 1, or with
        speculation the drafts of two steps. page_size: tokens of a page, which matter only if drafts form a tree (see
        `drafts`).
        """
        drafts = self.drafts(page_size)
        return 1 if drafts is None else 2 * drafts.num_reserved


def with_chosen_drafts(servers: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """The plain settings of one role's servers, in which the numbers of draft steps, branches and verified tokens have
    the values that SGLang chooses where they are missing or where SGLang overrides them (0.5.23,
    arg_groups/speculative_hook.py: _handle_eagle_family, _auto_choose_speculative_params). model: the model's name.
    Wrong values stay as they are.
    """
    given = {name: servers.get(f"speculative_{name}") for name in ("num_steps", "eagle_topk", "draft_tokens")}
    algorithm = named(servers.get("speculative_algorithm"))
    if any(value is not None and (type(value) is not int or value < 1) for value in given.values()):
        return dict(servers)  # which are refused
    if algorithm == "NGRAM":
        chosen = {"draft_tokens": given["draft_tokens"] or NGRAM_TOKENS}
    elif algorithm == "DSPARK":
        chosen = {"draft_tokens": given["draft_tokens"] or DSPARK_TOKENS, "num_steps": 1, "eagle_topk": 1}
    elif algorithm is not None and not any(given.values()):
        # SGLang asks for LlamaForCausalLM, which the catalog does not keep
        is_llama = isinstance(model, str) and model.startswith("llama-3") and algorithm != "STANDALONE"
        chosen = dict(zip(given, _LLAMA_TREE if is_llama else _CHAIN, strict=True))
    elif (steps := given["num_steps"]) and given["eagle_topk"] in (None, 1):
        chosen = {"draft_tokens": steps + 1}
    else:
        return dict(servers)
    return {**servers, **{f"speculative_{name}": value for name, value in chosen.items()}}


def num_draft_layers(settings: SpeculativeSettings, draft: ModelSpec | None) -> int:
    """Number of layers of the draft model that have KV. 0: no speculation, or no such layers. draft: the draft model of
    STANDALONE.
    """
    if settings.acceptance is None:
        return 0
    if settings.speculative_draft_layers is not None:
        return settings.speculative_draft_layers
    if draft is not None:
        return draft.attention.num_layers
    return 0 if settings.speculative_algorithm == "NGRAM" else 1


def draft_model(
    settings: SpeculativeSettings, target: ModelSpec, load: Callable[[str], ModelSpec]
) -> DraftModel | None:
    """The draft model for a target model. None: no speculation, or drafts without a model (NGRAM). Raises DraftError if
    a STANDALONE draft has another vocabulary than the target, or if NEXTN is chosen and the target has no layers for
    drafts. load: reads a model from the catalog by name.
    """
    named_draft = settings.speculative_draft_model
    small = None if named_draft is None else load(named_draft)
    if not (num_layers := num_draft_layers(settings, small)):
        return None
    if small is not None:
        if small.vocab_size != target.vocab_size:
            raise DraftError(
                f"speculative_draft_model: {small.name} has {small.vocab_size} tokens, and {target.name} "
                f"{target.vocab_size}: a STANDALONE draft shares the vocabulary of its target"
            )
        return standalone(small)
    algorithm = settings.speculative_algorithm or "EAGLE"
    if algorithm == "NEXTN" and not target.num_nextn_layers:
        raise DraftError(
            f"speculative_algorithm: NEXTN: the checkpoint of {target.name} has no layers that predict further tokens "
            "(num_nextn_layers of its catalog entry); EAGLE and EAGLE3 take heads of their own"
        )
    if algorithm in ("EAGLE", "NEXTN") and target.num_nextn_layers:
        return nextn_layers(target, num_layers)
    if algorithm == "EAGLE3":
        return eagle3_head(target, num_layers, settings.speculative_draft_vocabulary)
    return eagle_head(target, num_layers)
