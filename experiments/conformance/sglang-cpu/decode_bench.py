"""A decode instance of SGLang in its own loop: prefill's answers and the ends of transfers come from the load."""

from types import SimpleNamespace
from typing import Any

import older
from step import FEW, LONGEST_LOAD_STEPS, MAX_REQUEST_TOKENS, Bench, Silent, name_of


class Receiver:
    """Stands for the transfer of one prompt."""

    def __init__(self, bench: "DecodeBench", met_at: int, transfer_steps: int) -> None:
        self.bench = bench
        self.met_at = met_at
        self.transfer_steps = transfer_steps
        self.arrives_at: int | None = None
        self.conclude_state = None
        self.has_failed = False
        self.abort_notified = False
        self.bootstrap_infos: list[Any] = []
        self.stops_at: int | None = None
        """Of an aborted transfer: the iteration in which prefill confirms that nothing is written any more."""
        self.kv_mgr = SimpleNamespace(
            enable_deferred_decode_kv_release=True,
            is_abort_release_safe=lambda *_: self.has_stopped,
            clear_deferred_abort_state=lambda _: None,
        )

    def abort(self) -> None:
        if not self.has_failed:
            self.has_failed = self.abort_notified = True
            self.stops_at = self.bench.step + 1 + self.transfer_steps

    @property
    def has_stopped(self) -> bool:
        return self.stops_at is not None and self.bench.step >= self.stops_at

    def send_metadata(self, *_: Any, **__: Any) -> None:
        self.arrives_at = self.bench.step + 1 + self.transfer_steps

    def poll(self) -> Any:
        from sglang.srt.disaggregation.base.conn import KVPoll

        if self.has_failed:
            return KVPoll.Failed
        if self.bench.step < self.met_at:
            return KVPoll.Bootstrapping
        if self.arrives_at is None:
            return KVPoll.WaitingForInput
        return KVPoll.Success if self.bench.step >= self.arrives_at else KVPoll.Transferring

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class DecodeBench(Bench):
    instance = "decode-0"
    mode = "DECODE"

    def slots(self) -> Any:
        from sglang.srt.disaggregation.decode import DecodeReqToTokenPool

        num = self.role.max_running_requests
        extra = 2 * num if num <= FEW else 0
        return DecodeReqToTokenPool(num, MAX_REQUEST_TOKENS, "cpu", enable_memory_saver=False, pre_alloc_size=extra)

    def arguments(self) -> dict[str, Any]:
        return {
            "disaggregation_mode": "decode",
            "disaggregation_decode_enable_radix_cache": self.role.radix,
            "disaggregation_decode_retraction_backup": "cpu_tensor",
        }

    def prepare(self) -> None:
        from sglang.srt.disaggregation import decode
        from sglang.srt.disaggregation.utils import ReqToMetadataIdxAllocator

        decode.poll_and_all_reduce = lambda pollers, *_, **__: [poller.poll() for poller in pollers]
        decode.all_reduce_flags = lambda *, flags, **_: flags
        scheduler = self.scheduler
        buffers = ReqToMetadataIdxAllocator(2 * self.role.max_running_requests)
        scheduler.req_to_metadata_buffer_idx_allocator = buffers
        common = {
            "req_to_metadata_buffer_idx_allocator": buffers,
            "scheduler": scheduler,
            "tree_cache": scheduler.tree_cache,
            "gloo_group": None,
            "metadata_buffers": Silent(),
            "enable_staging": False,
            "queue": [],
        }
        transfers = decode.DecodeTransferQueue.__new__(decode.DecodeTransferQueue)
        transfers.__dict__.update({**common, "queue": []})
        transfers._commit_transfer_to_req = self.commit
        transfers.enable_deferred_kv_release, transfers.deferred_kv_release_timeout = True, LONGEST_LOAD_STEPS
        transfers._deferred_releases, transfers.tp_rank = [], 0
        queue = decode.DecodePreallocQueue.__new__(decode.DecodePreallocQueue)
        queue.__dict__.update(common)
        queue.__dict__.update(
            req_to_token_pool=scheduler.req_to_token_pool,
            token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
            token_to_kv_pool=Silent(),
            draft_token_to_kv_pool=None,
            transfer_queue=transfers,
            num_reserved_decode_tokens=self.role.num_reserved_decode_tokens,
            max_total_num_tokens=self.role.max_total_tokens,
            _num_published_destinations=0,
            pp_size=1,
            tp_rank=0,
            retracted_queue=[],
            pending_reqs=[],
            held_rebootstrap_reqs=[],
        )
        queue.kv_manager = Silent()
        queue.kv_manager.kv_args = Silent()
        queue.kv_manager.kv_args.state_types = []
        queue._create_receiver_and_enqueue = self.enqueue_receiver
        queue._resolve_prefill_dp_rank = lambda _: 0
        queue._resolve_pending_reqs = queue.prefetch_prefill_dp_rank_queries = lambda: None
        queue._send_kv_metadata = self.send_metadata
        scheduler.disagg_decode_prealloc_queue, scheduler.disagg_decode_transfer_queue = queue, transfers
        scheduler.enable_decode_hicache = False
        scheduler.kv_checksum_computer = None
        scheduler.future_map = Silent()
        scheduler.attn_tp_cpu_group = None
        scheduler.send_abort_output = lambda _, request: self.add("failed", name_of(request))
        scheduler.send_to_tokenizer = SimpleNamespace(send_output=scheduler.send_abort_output)
        self.watch(queue, "pop_preallocated", self.on_admission)
        self.watch(queue, "resume_retracted_reqs", self.on_list("resumed"))
        self.watch(transfers, "pop_transferred", self.on_list("arrived"))
        if self.is_older:
            self.processor = older.split_processor(scheduler, self.merge)
        else:
            self.processor = scheduler.batch_result_processor
            scheduler.batch_result_processor = SimpleNamespace(process_batch_result_prebuilt=self.merge)

    def loop(self) -> None:
        try:
            self.scheduler.event_loop_normal_disagg_decode()
        except AttributeError as error:
            if error.name != "lock_ref":
                raise
            print(f"0.5.12 crashes in iteration {self.step}, as a retracted request resumes", flush=True)
            self.rows = [row for row in self.rows if row[1] < self.step]

    @staticmethod
    def watch(owner: Any, name: str, then: Any) -> None:
        method = getattr(owner, name)

        def wrapped(*args: Any, **named: Any) -> Any:
            result = method(*args, **named)
            then(result, *args)
            return result

        setattr(owner, name, wrapped)

    def on_admission(self, result: Any, *_: Any) -> None:
        if admitted := result[0]:
            requests = [entry.req for entry in admitted]
            kvs = requests if self.is_older else [request.kv for request in requests]
            rows = zip(requests, kvs, strict=True)
            self.add("admitted", [[name_of(request), kv.cache_protected_len] for request, kv in rows])

    def on_list(self, what: str) -> Any:
        def then(requests: Any, *_: Any) -> None:
            if requests:
                self.add(what, [name_of(request) for request in requests])

        return then

    def merge(self, batch: Any) -> None:
        self.processor.process_batch_result_prebuilt(batch)
        self.add("merged", [[name_of(request), int(request.finished())] for request in batch.reqs])
        self.note_ended(batch)

    def enqueue_receiver(self, request: Any, **_: Any) -> Any:
        from sglang.srt.disaggregation.decode import DecodeRequest

        drawn = self.drawn(request)
        entry = DecodeRequest(request, Receiver(self, self.step + drawn.grant_steps, drawn.transfer_steps))
        self.scheduler.disagg_decode_prealloc_queue.queue.append(entry)
        return entry

    def send_metadata(self, entry: Any, *_: Any, **__: Any) -> None:
        entry.metadata_buffer_index = self.scheduler.req_to_metadata_buffer_idx_allocator.alloc()
        entry.kv_receiver.send_metadata()

    def commit(self, entry: Any) -> bool:
        entry.req.output_ids.append(self.next_token(entry.req))
        entry.kv_receiver = None
        entry.req.time_stats.set_wait_queue_entry_time()
        return True

    def tell_more(self) -> None:
        queue = self.scheduler.disagg_decode_prealloc_queue.queue
        if met := [name_of(entry.req) for entry in queue if entry.kv_receiver.met_at == self.step]:
            self.add("met", met)
        held = [entry for entry, *_ in self.scheduler.disagg_decode_transfer_queue._deferred_releases]
        if stopped := [name_of(entry.req) for entry in held if entry.kv_receiver.has_stopped]:
            self.add("stopped", stopped)

    def process(self, batch: Any, result: Any) -> None:
        self.processor.process_batch_result_decode(batch, result)
        self.note_ended(batch)
