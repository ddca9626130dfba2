"""A decode loop rests between two steps: its host takes in the one and prepares the other."""

from pdsim.core.messages import PrefillStep
from pdsim.cost.model import CostModel, DecodeLine


class Resting:
    """A model whose decode steps are followed by a rest, which is told as part of the step."""

    def __init__(self, model: CostModel, step_ns: int, request_ns: int) -> None:
        """request_ns: for each request of the batch."""
        self._model = model
        self._step_ns = step_ns
        self._request_ns = request_ns

    def prefill_ns(self, step: PrefillStep, start_ns: int, host_stretch: float = 1) -> int:
        return self._model.prefill_ns(step, start_ns, host_stretch)

    def decode_line(self, num_requests: int, host_stretch: float = 1) -> DecodeLine:
        line = self._model.decode_line(num_requests, host_stretch)
        rest = DecodeLine.of_ns(host_stretch * (self._step_ns + self._request_ns * num_requests), 0, 0)
        return line._replace(base=line.base + rest.base)
