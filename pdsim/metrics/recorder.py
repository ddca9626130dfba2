"""Makes the records of a run from the events that the simulator, or real mode, reports."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from pdsim.core.instance import Levels
from pdsim.core.messages import DecodeStep, Failed, Finished, MicroBatchStep, PrefillStep, TransferUnit, Verified
from pdsim.core.routing.router import num_retries, request_of
from pdsim.core.transfer.send_planner import RankPairLayout
from pdsim.metrics.own_gaps import OwnGaps
from pdsim.metrics.records import (
    HostCopyRecord,
    LevelRows,
    RequestRecord,
    RunRecords,
    StepRecord,
    TokenGap,
    TransferRecord,
)


def transfer_record(
    unit: TransferUnit,
    wire: RankPairLayout,
    worker: int,
    start_ns: int,
    end_ns: int,
    *,
    setup_ns: int = 0,
    line_ns: int = 0,
    posting_ns: int = 0,
) -> TransferRecord:
    """Returns the record of a transfer unit, with bytes and descriptors summed over all ranks by the layout `wire`.
    Other arguments: the fields of TransferRecord.
    """
    return TransferRecord(
        unit.request_id,
        unit.source,
        unit.target,
        wire.total(unit.num_bytes),
        len(unit.target_pages),
        wire.total(unit.num_descriptors),
        unit.is_last,
        unit.planned_ns,
        start_ns,
        end_ns,
        "ring" if unit.cell is not None else "layers" if unit.after_layers is not None else "",
        setup_ns,
        line_ns,
        posting_ns,
        worker,
    )


_ATTEMPT_FIELDS = (
    "admitted_ns",
    "prefill_start_ns",
    "prefill_end_ns",
    "transfer_start_ns",
    "transfer_end_ns",
)
"""Fields of a request's record that are reset when the request is retried."""


class Recorder:
    """Fills the records of a run. A method is called for each event, in the order of the events' times (in real mode
    after the run, from logs).

    Most methods name a request by the id of its present attempt: each retry of a request is an attempt with an id of
    its own. on_arrival, on_media, on_embeddings_read, on_first_token, on_output and on_end get the client's id, which
    is also the id of the first attempt.
    """

    def __init__(self, own_gaps: OwnGaps | None = None) -> None:
        self._levels = LevelRows()
        self.records = RunRecords(levels=self._levels)
        self._own_gaps = own_gaps
        if own_gaps is not None:
            self.records.token_groups = own_gaps.groups
        self._requests: dict[int, RequestRecord] = {}
        self._attempts: dict[int, int] = {}
        """Id of the last attempt of each retried request, by the client's id of the request."""
        self._last_token_ns: dict[int, int] = {}
        """Time of the last token, by id of the attempt, for requests outside a batch (retracted, or with a token from a
        prefill step) and for requests in micro-batches.
        """
        self._decoded_until_ns: dict[str, int] = {}
        """Time of the last token of the requests in a batch, by instance."""

    def on_arrival(
        self,
        request_id: int,
        num_prompt_tokens: int,
        num_output_tokens: int,
        now_ns: int,
        request_class: str = "",
    ) -> None:
        record = RequestRecord(request_id, num_prompt_tokens, num_output_tokens, now_ns, request_class=request_class)
        self._requests[request_id] = record
        self.records.requests.append(record)

    def on_media(self, request_id: int, num_image_tokens: int, num_audio_tokens: int) -> None:
        record = self._requests[request_id]
        record.num_image_tokens, record.num_audio_tokens = num_image_tokens, num_audio_tokens

    def on_routed(self, request_id: int, prefill_id: str, decode_id: str, now_ns: int) -> None:
        record = self._requests[request_id]
        record.routed_ns = now_ns
        record.prefill_id = prefill_id
        record.decode_id = decode_id

    def on_retry(self, attempt: int) -> None:
        """Resets the record of the request for a new attempt. Times of earlier attempts are not kept."""
        request_id = request_of(attempt)
        before = self._attempts.get(request_id, request_id)
        record = self._requests[before]
        if self._own_gaps is not None:
            self._own_gaps.forget(before)
        self._requests[before] = replace(record)
        self._requests[attempt] = record
        self._attempts[request_id] = attempt
        for name in _ATTEMPT_FIELDS:
            setattr(record, name, None)
        record.num_decode_cached_tokens = record.num_prefill_cached_tokens = record.transfer_bytes = 0
        record.num_retries = num_retries(attempt)

    def on_embeddings(self, request_id: int, encode_id: str, start_ns: int, end_ns: int, now_ns: int) -> None:
        """Records that embeddings from one encode instance arrived. If a request has several arrivals, the last one
        stays recorded.

        start_ns, end_ns: begin and end of encoding.
        """
        record = self._requests[request_id]
        record.encode_id = encode_id
        record.encode_start_ns, record.encode_end_ns, record.embeddings_ns = start_ns, end_ns, now_ns

    def on_embeddings_read(self, request_ids: Iterable[int], server_id: str, now_ns: int) -> None:
        """Records that a vLLM server has read embeddings of one item. now_ns becomes the time of embeddings
        (embeddings_ns) of each request with this item that is routed to the server, is encoded and has not begun its
        prefill, because such a request may have waited for the read. request_ids: the client's ids of all requests with
        this item.
        """
        for request_id in request_ids:
            record = self._requests.get(self._attempts.get(request_id, request_id))
            if record is None or record.prefill_id != server_id or record.embeddings_ns is None:
                continue
            if record.prefill_start_ns is None:
                record.embeddings_ns = now_ns

    def on_encoded(self, record: StepRecord) -> None:
        """Records a forward of an encode instance."""
        self.records.steps.append(record)

    def on_admitted(self, request_id: int, num_cached_tokens: int, now_ns: int) -> None:
        record = self._requests[request_id]
        record.admitted_ns = now_ns
        record.num_decode_cached_tokens = num_cached_tokens

    def on_step(self, step: PrefillStep | DecodeStep, record: StepRecord, verified: Verified | None = None) -> None:
        if isinstance(step, PrefillStep):
            self._on_prefill(step, record)
        elif isinstance(step, MicroBatchStep):
            record = self._on_micro_batch(step, record)
        elif verified is not None:
            record = self._on_verified(step, record, verified)
        else:
            record = self._on_decode(step, record)
        self.records.steps.append(record)

    def on_transfer(self, row: TransferRecord) -> None:
        record = self._requests[row.request_id]
        if record.transfer_start_ns is None:
            record.transfer_start_ns = row.start_ns
        record.transfer_bytes += row.num_bytes
        if row.is_last:
            record.transfer_end_ns = row.end_ns
        if row.request_id != record.request_id:
            row.request_id = record.request_id
        self.records.transfers.append(row)

    def on_returned(self, row: TransferRecord) -> None:
        """Records a transfer that returned the KV of an ended request to prefill."""
        self.records.transfers.append(row)

    def on_host_copy(self, row: HostCopyRecord) -> None:
        self.records.host_copies.append(row)

    def on_streamed(self, request_id: int, now_ns: int) -> None:
        self._requests[request_id].streamed_ns = now_ns

    def on_first_token(self, request_id: int, now_ns: int) -> None:
        """Records that the client received the first token. request_id: the client's id of the request, not the
        attempt's.
        """
        self._requests[self._attempts.get(request_id, request_id)].first_token_ns = now_ns

    def on_retracted(self, request_id: int, now_ns: int) -> None:
        record = self._requests[request_id]
        record.num_retractions += 1
        last_ns = max(self._decoded_until_ns.get(record.decode_id, 0), record.streamed_ns or 0)
        self._last_token_ns.setdefault(request_id, last_ns)

    def on_end(self, outcome: Finished | Failed, now_ns: int) -> RequestRecord:
        attempt = self._attempts.get(outcome.request_id, outcome.request_id)
        record = self._requests[attempt]
        record.end_ns = now_ns
        if isinstance(outcome, Failed):  # a step under way may still end a gap of its
            record.outcome = "failed"
            record.reason = outcome.reason
            if self._own_gaps is not None:
                self._own_gaps.forget(attempt)
        else:
            record.outcome = "finished"
            if self._own_gaps is not None:
                record.own_itl_ms = self._own_gaps.finished_ms(attempt, record.num_output_tokens)
            self._last_token_ns.pop(attempt, None)
        return record

    def on_output(self, request_id: int, num_tokens: int) -> None:
        """Sets the number of output tokens of a request whose length is known only at its end. request_id: the client's
        id, which stays the same over all attempts of the request.
        """
        self._requests[self._attempts.get(request_id, request_id)].num_output_tokens = num_tokens

    def on_levels(self, instance_id: str, levels: Levels, now_ns: int) -> None:
        self._levels.add(instance_id, now_ns, levels)

    def _on_prefill(self, step: PrefillStep, row: StepRecord) -> None:
        end_ns = row.start_ns + row.duration_ns
        for chunk in step.chunks:
            record = self._requests[chunk.request_id]
            if record.prefill_start_ns is None:
                record.prefill_start_ns = row.start_ns
                record.num_prefill_cached_tokens = chunk.num_context_tokens
            if chunk.is_last:
                if row.instance_id == record.decode_id:  # aggregated, or preempted and computed again
                    record.prefill_end_ns = record.prefill_end_ns or end_ns
                    self._on_prefill_token(chunk.request_id, end_ns)
                else:
                    record.prefill_end_ns = end_ns  # a prompt that gave way is computed again

    def _on_prefill_token(self, request_id: int, now_ns: int) -> None:
        last_ns = self._last_token_ns.get(request_id)
        if last_ns is not None:
            self.records.token_gaps.append(TokenGap(now_ns - last_ns, 1))
            if self._own_gaps is not None:
                self._own_gaps.on_pause(request_id, now_ns - last_ns)
        self._last_token_ns[request_id] = now_ns

    def _on_decode(self, step: DecodeStep, row: StepRecord) -> StepRecord:
        """Records a gap for each request that has waited since its last token: the token came before the first of these
        decode steps began. Returns `row`, the record of the steps, with the number of these requests in num_resumed.
        """
        start_ns, first_end_ns = row.start_ns, row.start_ns + row.first_ns
        last_tokens = [self._pop_last_token_ns(i) for i in step.joined]
        pauses = [TokenGap(first_end_ns - last_ns, 1) for last_ns in last_tokens if last_ns < start_ns]
        num_others = step.num_requests - len(step.joined)
        until_ns = self._decoded_until_ns.get(row.instance_id, start_ns)
        if num_others and until_ns < start_ns:
            pauses.append(TokenGap(first_end_ns - until_ns, num_others))
        if self._own_gaps is not None:
            joined_ns = [first_end_ns - min(last_ns, start_ns) for last_ns in last_tokens]
            self._own_gaps.on_decode(step, row, joined_ns, first_end_ns - min(until_ns, start_ns))
        self._decoded_until_ns[row.instance_id] = start_ns + row.duration_ns
        if not pauses:
            return row
        self.records.token_gaps += pauses
        row.num_resumed = sum(pause.num_requests for pause in pauses)
        return row

    def _on_micro_batch(self, step: MicroBatchStep, row: StepRecord) -> StepRecord:
        """Records a decode step of one micro-batch. Each gap lasts from the request's last token to the step's end.
        Returns `row`, the record of the step, with the number of requests, which is the number of gaps, in num_resumed.
        """
        end_ns = row.start_ns + row.duration_ns
        gaps_ns = []
        for request_id in step.joined:
            gap_ns = end_ns - self._pop_last_token_ns(request_id)
            gaps_ns.append(gap_ns)
            self._last_token_ns[request_id] = end_ns
            if self._own_gaps is not None:
                self._own_gaps.on_pause(request_id, gap_ns)
        self.records.token_gaps += [TokenGap(gap_ns, count) for gap_ns, count in Counter(gaps_ns).items()]
        row.num_resumed = step.num_requests
        return row

    def _on_verified(self, step: DecodeStep, row: StepRecord, verified: Verified) -> StepRecord:
        """Records a decode step that verified drafts. A request may get several tokens at once, and its ITL divides the
        time since its last token among them. Returns `row`, the record of the step, with the number of requests in
        num_resumed, because token_gaps has the gaps of all of them.
        """
        start_ns, end_ns = row.start_ns, row.start_ns + row.duration_ns
        since = [self._decoded_until_ns.get(row.instance_id, start_ns)] * (step.num_requests - len(step.joined))
        since += [self._pop_last_token_ns(request_id) for request_id in step.joined]
        if self._own_gaps is not None:
            self._own_gaps.on_verified(step, row, [end_ns - last_ns for last_ns in since], verified)
        gaps = Counter(zip(since, verified.num_tokens, strict=True))
        self.records.token_gaps += [
            TokenGap(end_ns - last_ns, count, tokens) for (last_ns, tokens), count in gaps.items()
        ]
        self._decoded_until_ns[row.instance_id] = end_ns
        row.num_resumed = step.num_requests
        return row

    def _pop_last_token_ns(self, request_id: int) -> int:
        """Removes and returns the time in ns of a request's last token before the request joins a batch."""
        last_ns = self._last_token_ns.pop(request_id, None) or self._requests[request_id].streamed_ns
        assert last_ns is not None
        return last_ns
