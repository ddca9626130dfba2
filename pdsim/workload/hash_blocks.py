"""Prompts that a trace gives as hash ids."""

from pdsim.core.sequence import Spans
from pdsim.workload.request_spec import RequestSpec, fresh_streams
from pdsim.workload.trace_file import Line


class HashBlocks:
    """Prompts as hash ids, one for each block: an id stands for its block and all before it.

    So equal leading ids are a shared prefix. Each id has one parent, and a chain of first children is one stream: few
    spans, however long the prompt.
    """

    def __init__(self, block_tokens: int) -> None:
        self._size = block_tokens
        self._streams = fresh_streams()
        self._places: dict[int, tuple[int, int]] = {}

    def spec(self, number: int, line: Line, arrival_ns: float) -> RequestSpec:
        num_tokens, num_outputs = line.count("input_length"), line.count("output_length")
        prompt = self._prompt(line, num_tokens)
        output = Spans.of(next(self._streams), num_outputs)
        return RequestSpec(number, prompt, output, num_outputs, arrival_ns=round(arrival_ns))

    def _prompt(self, line: Line, num_tokens: int) -> Spans:
        ids = line.value("hash_ids")
        size = self._size
        if not isinstance(ids, list) or len(ids) != -(-num_tokens // size):
            raise line.error("hash_ids", ids, f"a list of {-(-num_tokens // size)} ids, one per {size} input tokens")
        spans = []
        before = None
        for i, block in enumerate(ids):
            if block not in self._places:
                continues = before is not None and ids[i - 1] == block - 1
                place = (before[0], before[1] + size) if continues and before else (next(self._streams), 0)
                self._places[block] = place
            before = self._places[block]
            spans.append((*before, min(size, num_tokens - i * size)))
        return Spans(spans)
