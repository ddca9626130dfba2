"""What a prefill instance knows of a request."""

from dataclasses import dataclass, field

from pdsim.core.kv_cache import NO_LEASE, Lease
from pdsim.core.transfer_plan import UNGRANTED, SendCursor
from pdsim.policy.views import TokenSequence


@dataclass(slots=True)
class PrefillRequest:
    request_id: int
    arrival_ns: int
    prompt: TokenSequence
    num_prompt_tokens: int
    decode_id: str
    cursor: SendCursor = UNGRANTED
    lease: Lease = field(default_factory=lambda: NO_LEASE)
    num_cached_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_computed_tokens: int = 0
    given_up: bool = False
    gives_way: bool = False
    """As soon as no forward computes it."""
    num_attempts: int = 0
    """To compute it before its grant, this one included."""
    ends_with_first_token: bool = False
    """Known of a parked one."""

    @property
    def is_optimistic(self) -> bool:
        """It may be begun, or was, before its grant."""
        return self.num_attempts > 0

    @property
    def is_granted(self) -> bool:
        return self.cursor is not UNGRANTED

    @property
    def is_in_forward(self) -> bool:
        return self.num_computed_tokens < self.num_scheduled_tokens

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens

    @property
    def num_growth_tokens(self) -> int:
        """The first token: here max_new_tokens is 1."""
        return 1

    @property
    def num_sent_tokens(self) -> int:
        return self.cursor.num_sent_tokens

    @property
    def page_table(self) -> list[int]:
        return self.lease.table
