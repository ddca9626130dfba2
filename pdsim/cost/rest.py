"""A decode loop rests between two steps: its host takes in the one and prepares the other."""

from pdsim.core.messages import PrefillStep
from pdsim.cost.model import CostModel, DecodeLine


class Resting:
    """A model whose decode steps are followed by a rest, which is told as part of the step."""

    def __init__(self, model: CostModel, step_ns: float, request_ns: float) -> None:
        """request_ns: for each request of the batch."""
        self._model = model
        self._step_ns = step_ns
        self._request_ns = request_ns

    def prefill_ns(self, step: PrefillStep, start_ns: int) -> int:
        return self._model.prefill_ns(step, start_ns)

    def decode_line(self, num_requests: int) -> DecodeLine:
        line = self._model.decode_line(num_requests)
        rest = DecodeLine.of_ns(self._step_ns + self._request_ns * num_requests, 0, 0)
        return line._replace(base=line.base + rest.base)
