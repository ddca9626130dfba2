"""A prefill instance of SGLang in its own loop: decode's grants and the ends of transfers come from the load."""

from typing import Any

import older
from step import Bench, name_of


class Sender:
    """Stands for the transfer of one prompt."""

    def __init__(self, bench: "PrefillBench", granted_at: int, transfer_steps: int) -> None:
        self.bench = bench
        self.granted_at = granted_at
        self.transfer_steps = transfer_steps
        self.sent_at: int | None = None
        self.has_failed = False

    def poll(self) -> Any:
        from sglang.srt.disaggregation.base.conn import KVPoll

        if self.has_failed:
            return KVPoll.Failed
        if self.bench.step < self.granted_at:
            return KVPoll.Bootstrapping
        if self.sent_at is None:
            return KVPoll.WaitingForInput
        return KVPoll.Success if self.bench.step >= self.sent_at else KVPoll.Transferring

    def abort(self) -> None:
        self.has_failed = True

    def pop_decode_prefix_len(self) -> int:
        return 0

    def get_transfer_metric(self) -> Any:
        from sglang.srt.disaggregation.base.conn import KVTransferMetric

        return KVTransferMetric()

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class PrefillBench(Bench):
    instance = "prefill-0"
    mode = "PREFILL"

    def arguments(self) -> dict[str, Any]:
        return {"disaggregation_mode": "prefill"}

    def prepare(self) -> None:
        from sglang.srt.disaggregation import prefill
        from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
        from sglang.srt.disaggregation.utils import ReqToMetadataIdxAllocator

        def polls(pollers: Any, *_: Any) -> list[Any]:
            return [poller.poll() for poller in pollers]

        prefill.poll_and_all_reduce_attn_cp_tp_group = polls
        scheduler, role = self.scheduler, self.load.servers.prefill
        buffers = ReqToMetadataIdxAllocator(2 * role.max_running_requests)
        queue = PrefillBootstrapQueue.__new__(PrefillBootstrapQueue)
        queue.queue, queue.scheduler, queue.scheduler_stage_metrics = [], scheduler, None
        queue.req_to_metadata_buffer_idx_allocator = scheduler.req_to_metadata_buffer_idx_allocator = buffers
        queue.max_input_len, queue.pp_size = role.max_total_tokens, 1
        if self.is_older:
            older.make_senders(queue, self.create_sender, self.load.servers.page_size)
        else:
            from sglang.srt.runtime_context import get_parallel

            get_parallel().override_permanently(tp_rank=0)
            queue.create_sender = self.create_sender
        scheduler.disagg_prefill_bootstrap_queue = queue
        scheduler.disagg_prefill_inflight_queue, scheduler.disagg_prefill_pending_chunk_rids = [], set()
        scheduler.send_kv_chunk = self.send
        scheduler.attn_cp_cpu_group = scheduler.attn_tp_cpu_group = None
        scheduler.enable_staging = False
        scheduler.kv_checksum_computer = None
        scheduler.maybe_send_health_check_signal = lambda: None
        scheduler._deferred_input_requests, scheduler._war_barrier_is_coarse = [], lambda: False
        inflight = scheduler.process_disagg_prefill_inflight_queue

        def look(*args: Any) -> Any:
            if done := inflight(*args):
                self.add("sent", [name_of(request) for request in done])
            return done

        scheduler.process_disagg_prefill_inflight_queue = look

    def loop(self) -> None:
        if self.role.overlap:
            self.scheduler.event_loop_overlap_disagg_prefill()
        else:
            self.scheduler.event_loop_normal_disagg_prefill()

    def create_sender(self, request: Any, _: Any) -> bool:
        drawn = self.drawn(request)
        request.disagg_kv_sender = Sender(self, self.step + drawn.grant_steps, drawn.transfer_steps)
        request.sampling_params.max_new_tokens = 1
        request.pending_bootstrap = True
        return True

    def send(self, request: Any, *, last_chunk: bool = False, **_: Any) -> None:
        if last_chunk:
            sender = request.disagg_kv_sender
            sender.sent_at = self.step + sender.transfer_steps

    def tell_more(self) -> None:
        granted = [
            name_of(request)
            for request in self.live.values()
            if request.disagg_kv_sender is not None and request.disagg_kv_sender.granted_at == self.step
        ]
        if granted:
            self.add("granted", granted)

    def process(self, batch: Any, result: Any) -> None:
        self.scheduler.process_batch_result_disagg_prefill(batch, result)
