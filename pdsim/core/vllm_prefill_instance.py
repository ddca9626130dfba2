"""A prefill instance as vLLM's with a NixlConnector that pulls: decode reads what is computed, prefill waits for it.

parked      computed: pages are held, a slot is not               -> PromptComputed; on_message(KvGranted): decode reads
expired     nobody began to read it in time                       next_step -> Abort to decode; its pages are free
"""

from pdsim.core.deadlines import Deadlines
from pdsim.core.forward_builder import VllmForwardBuilder
from pdsim.core.kv_cache import KvCache
from pdsim.core.kv_returns import KvTaker
from pdsim.core.messages import Abort, Command, PrefillStep, Result, Send, Step, Wait
from pdsim.core.prefill_instance import PrefillInstance, PrefillLimits
from pdsim.core.send_planner import SendPlanner
from pdsim.policy.protocols import PrefillPolicy


class VllmPrefillInstance(PrefillInstance):
    """Its pool alone limits how many computed prompts wait to be read."""

    def __init__(
        self,
        instance_id: str,
        *,
        cache: KvCache,
        limits: PrefillLimits,
        policy: PrefillPolicy,
        planner: SendPlanner,
        taker: KvTaker | None = None,
        prompt_tokens: int | None = None,
        hold_timeout_ns: int | None,
    ) -> None:
        """prompt_tokens: of one prompt in a step, if they are limited.

        hold_timeout_ns: from the end of a prompt's last forward until decode must have begun to read it, if ever
        """
        super().__init__(instance_id, cache=cache, limits=limits, policy=policy, planner=planner, taker=taker)
        self._builder = VllmForwardBuilder(
            cache=cache, policy=policy, budget_tokens=limits.chunked_prefill_tokens, prompt_tokens=prompt_tokens
        )
        cache.evict_as_vllm()
        self._unread = Deadlines(instance_id, hold_timeout_ns)

    @property
    def num_slots_sending(self) -> int:
        return 0

    def next_step(self, now_ns: int) -> tuple[Step | Wait, list[Command]]:
        expired = self._expire_unread(now_ns)
        step, commands = super().next_step(now_ns)
        return step, [*expired, *commands]

    def on_step_done(self, step: Step, result: Result, now_ns: int) -> list[Command]:
        assert isinstance(step, PrefillStep)
        commands = super().on_step_done(step, result, now_ns)
        for chunk in step.chunks:
            if chunk.is_last and self._is_unread(chunk.request_id):
                commands += self._unread.add(chunk.request_id, now_ns)
        return commands

    def _is_unread(self, request_id: int) -> bool:
        return request_id in self.sending and request_id in self._bootstrap.ungranted

    def _expire_unread(self, now_ns: int) -> list[Command]:
        commands: list[Command] = []
        for request_id in self._unread.expired(now_ns, commands, self._is_unread):
            reason = f"its KV expired on {self.instance_id}: nobody read it in time"
            decode_id = self.sending[request_id].decode_id
            commands.append(Send(decode_id, Abort(request_id, reason, retryable=True)))
            commands += self._give_up(request_id)
        return commands
