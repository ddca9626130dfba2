"""Drives a prefill instance of several pipeline stages."""

from pdsim.core.messages import PrefillStep
from pdsim.cost.pipeline import PipelineTimes
from pdsim.sim.actor import Actor


class PipelinedActor(Actor):
    """Its forwards follow each other through the stages. The loop sees the result of one that has left the last."""

    def take_stages(self, pipeline: PipelineTimes) -> None:
        self._pipeline = pipeline
        self._stage_free_ns = [0] * len(pipeline.shares)

    def _begin_prefill(self, step: PrefillStep) -> None:
        start_ns = self._prefill_start_ns()
        largest_ns = self._cost.prefill_ns(step, start_ns)
        end_ns = self._pipeline.pass_on(start_ns, largest_ns, step.num_tokens, self._stage_free_ns)
        first_ns = self._stage_free_ns[0] - start_ns
        self._run_prefill(step, start_ns, end_ns, first_ns)
        self._gpu_free_ns = self._stage_free_ns[0]
