"""The requests of a prefill instance, and the queue in which requests wait until decode has granted pages.

state       begins when                                     ends when
ungranted   NewRequest came                                 KvGranted comes, after a timeout, or when it is given up
early       KvGranted came before NewRequest                NewRequest comes, or after a timeout
refused     prefill or decode will not serve the request    no late message about it can come, which is ignored
"""

from pdsim.core.deadlines import Deadlines, LateRequests
from pdsim.core.instance import Request
from pdsim.core.messages import Command, KvGranted
from pdsim.core.transfer.transfer_plan import UNGRANTED, SendCursor
from pdsim.dataclass import dataclass


@dataclass(slots=True, kw_only=True)
class PrefillRequest(Request):
    decode_id: str
    cursor: SendCursor = UNGRANTED
    given_up: bool = False
    gives_way: bool = False
    """True: the prompt was begun without a grant, and loses its pages to granted prompts when its present forward
    ends."""
    num_attempts: int = 0
    """Number of attempts to compute the prompt before decode has granted pages, including the current attempt. 0: the
    prompt waits for its grant."""
    ends_with_first_token: bool = False
    """True: the first token of the computed prompt is also its last token. Set while the prompt waits for its grant."""
    has_fixed_output: bool = False

    @property
    def ignores_eos(self) -> bool:
        return self.has_fixed_output

    @property
    def max_output_tokens(self) -> int:
        """Maximum number of output tokens on prefill: 1, the first token."""
        return 1

    @property
    def num_output_tokens(self) -> int:
        return 0

    @property
    def is_optimistic(self) -> bool:
        """True if prefill may begin the prompt, or has begun it, before decode has granted pages."""
        return self.num_attempts > 0

    @property
    def is_granted(self) -> bool:
        return self.cursor is not UNGRANTED

    @property
    def is_in_forward(self) -> bool:
        return self.num_computed_tokens < self.num_scheduled_tokens

    @property
    def num_sent_tokens(self) -> int:
        return self.cursor.num_sent_tokens


class BootstrapQueue:
    """Requests of one prefill instance that wait for a grant of pages, and grants that came before their requests."""

    def __init__(self, prefill_id: str, *, timeout_ns: int | None) -> None:
        """timeout_ns: maximum wait of a request for its grant, and of a grant for its request. None: no limit."""
        self.ungranted: dict[int, PrefillRequest] = {}
        """Requests without a grant. Optimistic requests among them may be computed already."""
        self.early: dict[int, KvGranted] = {}
        self.refused = LateRequests()
        self._times_out = timeout_ns is not None
        self._deadlines = Deadlines(prefill_id, timeout_ns, "bootstrap_timeout")

    @property
    def limit(self) -> str:
        """The bootstrap timeout with its name, such as "bootstrap_timeout 20 s"."""
        return self._deadlines.limit

    @property
    def bootstrapping(self) -> list[PrefillRequest]:
        """Requests that prefill begins only after their grant."""
        return [request for request in self.ungranted.values() if not request.is_optimistic]

    def at(self, now_ns: int) -> None:
        self.refused.now_ns = now_ns
        if self.refused.kept:
            self.refused.forget()

    def expect(self, request: PrefillRequest, now_ns: int) -> list[Command]:
        self.ungranted[request.request_id] = request
        return self._deadlines.add(request.request_id, now_ns) if self._times_out else []

    def keep(self, grant: KvGranted, now_ns: int) -> list[Command]:
        """Keeps a grant until its request arrives, unless the request was refused."""
        if grant.request_id in self.refused.kept:
            return []
        self.early[grant.request_id] = grant
        return self._deadlines.add(grant.request_id, now_ns)

    def refuse(self, request_id: int) -> PrefillRequest | None:
        """Refuses a request. Returns the request if it has no grant yet; else None."""
        self.refused.add(request_id)
        self.early.pop(request_id, None)
        return self.ungranted.pop(request_id, None)

    def expired(self, now_ns: int, commands: list[Command]) -> list[PrefillRequest]:
        """Refuses and returns requests whose grant did not come within the timeout. Drops grants whose request did not
        come within the timeout.
        """
        overdue = self._deadlines.expired(now_ns, commands, self._is_live)
        return [request for request_id in overdue if (request := self.refuse(request_id))]

    def _is_live(self, request_id: int) -> bool:
        return request_id in self.ungranted or request_id in self.early
