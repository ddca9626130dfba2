"""Turns what the driver sees into rows."""

from dataclasses import replace

from pdsim.core.attempts import num_retries, request_of
from pdsim.core.instance import Instance
from pdsim.core.messages import DecodeStep, Failed, Finished, PrefillStep
from pdsim.core.wire import Wire
from pdsim.metrics.records import LevelRecord, RequestRecord, RunRecords, StepRecord, TransferRecord
from pdsim.sim.network import Transfer
from pdsim.workload.request_spec import RequestSpec


def transfer_record(transfer: Transfer, wire: Wire, end_ns: int) -> TransferRecord:
    """Of a unit, all ranks together."""
    unit = transfer.unit
    return TransferRecord(
        unit.request_id,
        unit.source,
        unit.target,
        unit.num_bytes * wire.num_pairs,
        len(unit.target_pages),
        unit.num_descriptors * wire.num_pairs,
        unit.is_last,
        unit.planned_ns,
        transfer.start_ns,
        end_ns,
    )


_OF_AN_ATTEMPT = (
    "admitted_ns",
    "prefill_start_ns",
    "prefill_end_ns",
    "transfer_start_ns",
    "transfer_end_ns",
)
"""Fields that a retry fills again."""


class Recorder:
    """Fills RunRecords. Called at the times of the events that it records. Requests go by the ids of their attempts."""

    def __init__(self) -> None:
        self.records = RunRecords()
        self._requests: dict[int, RequestRecord] = {}
        self._attempts: dict[int, int] = {}
        """The last attempt of each request that was retried."""
        self._last_token_ns: dict[int, int] = {}
        """Of retracted requests."""

    def on_arrival(self, spec: RequestSpec, now_ns: int) -> None:
        record = RequestRecord(spec.request_id, len(spec.prompt), len(spec.output), now_ns)
        self._requests[spec.request_id] = record
        self.records.requests.append(record)

    def on_routed(self, request_id: int, prefill_id: str, decode_id: str, now_ns: int) -> None:
        record = self._requests[request_id]
        record.routed_ns = now_ns
        record.prefill_id = prefill_id
        record.decode_id = decode_id

    def on_retry(self, attempt: int) -> None:
        """What an earlier attempt still does goes into a row that nobody keeps."""
        request_id = request_of(attempt)
        before = self._attempts.get(request_id, request_id)
        record = self._requests[before]
        self._requests[before] = replace(record)
        self._requests[attempt] = record
        self._attempts[request_id] = attempt
        for name in _OF_AN_ATTEMPT:
            setattr(record, name, None)
        record.num_decode_cached_tokens = record.num_prefill_cached_tokens = record.transfer_bytes = 0
        record.num_retries = num_retries(attempt)

    def on_admitted(self, request_id: int, num_cached_tokens: int, now_ns: int) -> None:
        record = self._requests[request_id]
        record.admitted_ns = now_ns
        record.num_decode_cached_tokens = num_cached_tokens

    def on_step(self, step: PrefillStep | DecodeStep, record: StepRecord) -> None:
        if isinstance(step, PrefillStep):
            self._on_prefill(step, record)
        elif step.joined and self._last_token_ns:
            record = self._on_joined(step, record)
        self.records.steps.append(record)

    def on_transfer(self, row: TransferRecord) -> None:
        record = self._requests[row.request_id]
        if record.transfer_start_ns is None:
            record.transfer_start_ns = row.start_ns
        record.transfer_bytes += row.num_bytes
        if row.is_last:
            record.transfer_end_ns = row.end_ns
        if row.request_id != record.request_id:
            row = row._replace(request_id=record.request_id)
        self.records.transfers.append(row)

    def on_streamed(self, request_id: int, now_ns: int) -> None:
        self._requests[request_id].streamed_ns = now_ns

    def on_first_token(self, request_id: int, now_ns: int) -> None:
        """By the client's id, as the end."""
        self._requests[self._attempts.get(request_id, request_id)].first_token_ns = now_ns

    def on_retracted(self, request_id: int, now_ns: int) -> None:
        self._requests[request_id].num_retractions += 1
        self._last_token_ns[request_id] = now_ns

    def on_end(self, outcome: Finished | Failed, now_ns: int) -> None:
        record = self._requests[self._attempts.get(outcome.request_id, outcome.request_id)]
        record.end_ns = now_ns
        record.outcome = "finished"
        if isinstance(outcome, Failed):
            record.outcome = "failed"
            record.reason = outcome.reason

    def on_choice(self, instance: Instance, now_ns: int) -> None:
        self.records.levels.append(LevelRecord(instance.instance_id, now_ns, instance.levels()))

    def _on_prefill(self, step: PrefillStep, row: StepRecord) -> None:
        for chunk in step.chunks:
            record = self._requests[chunk.request_id]
            if record.prefill_start_ns is None:
                record.prefill_start_ns = row.start_ns
                record.num_prefill_cached_tokens = chunk.num_context_tokens
            if chunk.is_last:
                record.prefill_end_ns = row.start_ns + row.duration_ns

    def _on_joined(self, step: DecodeStep, row: StepRecord) -> StepRecord:
        """Requests that come back have waited longer than this step takes."""
        first_end_ns = row.start_ns + row.first_ns
        pauses = [self._last_token_ns.pop(i) for i in step.joined if i in self._last_token_ns]
        self.records.resume_gaps_ns += [first_end_ns - last_ns for last_ns in pauses]
        return row._replace(num_resumed=len(pauses))
