"""vLLM's prefill instance. With NixlConnector, decode pulls KV from prefill.

Decode reads computed KV, and prefill waits for the end of the read. A request that is sending holds pages, but no slot.
Two further states of a request differ from those in prefill_instance.py:

state       meaning                                              left by
parked      computed: holds pages, but no slot                   -> PromptComputed; on_message(KvGranted)
expired     decode did not begin to read in time                 next_step -> Abort to decode; its pages are free
"""

from pdsim.core import messages as m
from pdsim.core.deadlines import Deadlines
from pdsim.core.memory.kv_cache import KvCache
from pdsim.core.prefill.forward_builder import UNLIMITED, Forward
from pdsim.core.prefill.prefill_instance import PrefillInstance
from pdsim.core.prefill.prefill_limits import PrefillLimits
from pdsim.core.transfer.kv_returns import KvTaker, Returning
from pdsim.core.transfer.send_planner import PrefillRequest, SendPlanner
from pdsim.core.vllm.copy_messages import on_copied
from pdsim.core.vllm.embedding_reads import EmbeddingReads
from pdsim.core.vllm.kv_leases import NIXL, KvLeases, LeaseTimes
from pdsim.core.vllm.vllm_forward_builder import TokenBudget, VllmForwardBuilder
from pdsim.policy.protocols import PrefillPolicy


class VllmPrefillInstance(PrefillInstance):
    """vLLM's prefill instance. Any number of computed prompts may wait to be read, as long as the KV pool has room."""

    def __init__(
        self,
        instance_id: str,
        *,
        cache: KvCache,
        limits: PrefillLimits,
        policy: PrefillPolicy,
        planner: SendPlanner,
        taker: KvTaker | None = None,
        budget: TokenBudget,
        hold_timeout_ns: int | None,
        lease: LeaseTimes = NIXL,
        reads: EmbeddingReads | None = None,
    ) -> None:
        """hold_timeout_ns: maximum time in ns from the end of a prompt's last forward until decode begins to read its
        KV; then prefill gives the request up. None: no limit. lease: times for which prefill keeps the unread KV of a
        request whose decode instance has died. reads: reads embeddings from encode instances; None: prefill encodes
        images and audio clips itself.
        """
        super().__init__(instance_id, cache=cache, limits=limits, policy=policy, planner=planner, taker=taker)
        prompts = VllmForwardBuilder[PrefillRequest](cache=cache, policy=policy, budget=budget, reads=reads)
        self._builder = self._prompts = prompts
        cache.evict_as_vllm()
        self._unread = Deadlines(instance_id, hold_timeout_ns, "hold_timeout")
        self._leases = KvLeases(instance_id, lease)
        self._max_prompts_begun = limits.max_running_requests  # also with several pipeline stages
        self._max_first_tokens = UNLIMITED  # a computed prompt holds no buffer for its first token

    @property
    def num_slots_sending(self) -> int:
        return 0

    def on_message(self, message: m.Message, now_ns: int) -> list[m.Command]:
        if on_copied(message, self._prompts, self.cache):
            return []
        if isinstance(message, m.KvGranted):
            self._leases.end(message.request_id)
        return super().on_message(message, now_ns)

    def next_step(self, now_ns: int) -> tuple[m.Step | m.Wait, list[m.Command]]:
        self.cache.begin_step()
        expired = self._expire_unread(now_ns)
        for request_id in self._leases.expired(now_ns):
            expired += self._give_up(request_id)
        step, commands = super().next_step(now_ns)
        return step, [*self.cache.take_connector_copies(), *self._prompts.take_reads(), *expired, *commands]

    def holding(self) -> list[PrefillRequest | Returning]:
        return [*super().holding(), *self._prompts.loads]

    def _fill(self, now_ns: int) -> Forward:
        self._make_room()
        return super()._fill(now_ns)

    def _make_room(self) -> None:
        """Preempts partly computed prompts that no forward under way computes, the last begun first, until the other
        partly computed prompts have pages for the next step. Stops if no such prompt is left.
        """
        prompts = self._prompts
        while prompts.num_opening_pages(0) > self.num_available_pages:
            resting = [partial for partial in prompts.partials if not partial.is_in_forward]
            if not resting:
                break
            prompts.preempt(resting[-1])

    def on_step_done(self, step: m.Step, result: m.Result, now_ns: int) -> list[m.Command]:
        assert isinstance(step, m.PrefillStep)
        commands = super().on_step_done(step, result, now_ns)
        for chunk in step.chunks:
            if chunk.is_last and self._is_unread(chunk.request_id):
                commands += self._unread.add(chunk.request_id, now_ns)
                self._leases.begin(chunk.request_id, now_ns)
        return commands

    def _is_unread(self, request_id: int) -> bool:
        return request_id in self.sending and request_id in self._bootstrap.ungranted

    def _on_decode_down(self, down: m.PeerDown) -> list[m.Command]:
        lost = [one.request_id for one in self.sending.values() if one.decode_id == down.instance_id]
        return [*self._leases.on_decode_down(lost, down.seen_ns), *super()._on_decode_down(down)]

    def _give_up(self, request_id: int) -> list[m.Command]:
        if self._leases.outlives_decode(request_id):
            return []
        self._leases.end(request_id)
        return super()._give_up(request_id)

    def _expire_unread(self, now_ns: int) -> list[m.Command]:
        commands: list[m.Command] = []
        for request_id in self._unread.expired(now_ns, commands, self._is_unread):
            reason = f"no decode instance read the request's KV on {self.instance_id} within {self._unread.limit}"
            decode_id = self.sending[request_id].decode_id
            commands.append(m.Send(decode_id, m.Abort(request_id, reason, retryable=True)))
            commands += self._give_up(request_id)
        return commands
