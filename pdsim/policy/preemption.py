"""Built-in preemption policies: who gives its pages back when the next decode step does not fit."""

from dataclasses import dataclass

from pdsim.policy.views import DecodeView


@dataclass
class FewestOutputsFirst:
    """The request with fewest output tokens, of these the one with the longest prompt (SGLang's order)."""

    def victim(self, view: DecodeView) -> int:
        return min(view.running, key=lambda r: (r.num_output_tokens, -r.num_prompt_tokens, r.request_id)).request_id


@dataclass
class LastArrivedFirst:
    """The youngest request, so that the oldest keep their progress."""

    def victim(self, view: DecodeView) -> int:
        return max(view.running, key=lambda r: (r.arrival_ns, r.request_id)).request_id
