"""Reads the outputs of an earlier real run, whose tokens a later run verifies and accepts as drafts."""

from collections.abc import Sequence
from pathlib import Path

from pdreal.clients import Tokens
from pdsim.core.messages import Arrival
from pdsim.core.routing.router import request_of
from pdsim.core.sequence import TokenIds
from pdsim.metrics.journal_file import read_journal
from pdsim.metrics.run_folder import read_summary
from pdsim.metrics.tables import RunFolderError
from pdsim.workload.request_spec import RequestSpec


def read_reference(run: Path, requests: Sequence[RequestSpec], vocab_size: int) -> dict[int, list[int]]:
    """Returns the output tokens of each request of an earlier real run, by request id. Raises RunFolderError if the run
    is no complete real run of the same requests, or if it accepted drafts unchecked.

    run: folder of the earlier run. requests: requests of the new run, for a model with `vocab_size` tokens.
    """
    summary = read_summary(run)
    if summary.get("accept_length") is not None and summary["pdsim"].get("reference_match") != 1:
        raise RunFolderError(
            f"--reference {run}: a run whose drafts were accepted unchecked; give a run without drafts"
        )
    prompts: dict[int, TokenIds] = {}
    outputs: dict[int, list[int]] = {}
    for entry in read_journal(run):
        if isinstance(message := entry.args[0], Arrival) and isinstance(message.prompt, TokenIds):
            prompts[request_of(message.request_id)] = message.prompt
        if entry.call == "on_step_done":
            for request_id, output in entry.args[1].ended:
                if not isinstance(output, TokenIds):
                    raise RunFolderError(f"{run}: a simulated run, whose outputs have no tokens; give a run of pdreal")
                outputs[request_of(request_id)] = output.ids()
    for spec in requests:
        if wrong := _difference(spec, prompts.get(spec.request_id), outputs.get(spec.request_id, ()), vocab_size):
            raise RunFolderError(
                f"--reference {run}: request {spec.request_id} {wrong}; give a complete run of the same workload, "
                "model and seed"
            )
    return outputs


def _difference(spec: RequestSpec, prompt: TokenIds | None, output: Sequence[int], vocab_size: int) -> str:
    """Returns how a request differs from the request with the same id in the earlier run. Empty: it does not differ.
    prompt: the earlier prompt; None: the earlier run has no such request. output: the earlier output, which may be
    longer. Later turns of a session repeat outputs, so only the lengths of their prompts are compared.
    """
    if prompt is None:
        return "is missing there"
    if len(prompt) != len(spec.prompt):
        return f"has {len(spec.prompt)} prompt tokens, but {len(prompt)} there"
    if not spec.after and prompt != Tokens(vocab_size).ids(spec.prompt):
        return "has another prompt there"
    if len(output) < len(spec.output):
        return f"has {len(spec.output)} output tokens, but {len(output)} there"
    return ""
