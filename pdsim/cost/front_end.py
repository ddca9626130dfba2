"""What lies between the client and the router: HTTP, tokenizer, gateway."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FrontEndCosts:
    service_ns: int = 0
    """Of each request, one after another: the tokenizer's work."""
    service_per_token_ns: float = 0
    in_ns: int = 0
    """On the way in, of all at once."""
    in_per_token_ns: float = 0
    out_ns: int = 0
    """From decode to the client, of the first token and of the last."""
    waits_for_prefill: bool = False
    """The decode stream is forwarded only after the prefill instance has answered (SGLang's Rust gateway)."""
    stall_ns: int = 0
    """A first token held back on a connection that was used a moment ago: Nagle against delayed acknowledgement."""
    stall_within_ns: int = 0
    """How long ago that moment may be."""

    @property
    def are_none(self) -> bool:
        return self == FrontEndCosts()
