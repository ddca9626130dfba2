"""The measurement that would make a prediction more precise: which times to measure, at which sizes, and with which
command.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pdsim.dataclass import dataclass
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.cost import GROUPS, Group
from pdsim.system.catalog import load_model

_MINUTES = 10
"""Maximum duration in minutes of `pdsim observe` if --minutes is not given."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Mean sizes of a cluster's prefill forwards and decode steps."""

    prompt_tokens: float
    """Mean number of tokens of a prompt."""
    batch: float
    """Mean number of requests that decode at a time on one instance or data-parallel rank, over the run's duration."""
    context_tokens: float
    """Mean number of context tokens of each request in a decode step."""


def sizes_of(scenario: Scenario, row: Mapping[str, Any]) -> Sizes:
    """Mean prompt length, decode batch and context length of a run. row: the run's summary."""
    _, decoding = scenario.servers
    prompt_tokens, output_tokens = (
        row[f"total_{what}_tokens"] / max(1, row["completed"]) for what in ("input", "output")
    )
    batch = row["mean_running_requests"] / (decoding.instances * decoding.dp)
    return Sizes(prompt_tokens=prompt_tokens, batch=batch, context_tokens=prompt_tokens + output_tokens / 2)


def rounded(tokens: float) -> int:
    """Rounds a number of tokens upwards to two significant digits: 1,234 becomes 1,300. A measurement up to the rounded
    number then covers the given number.
    """
    step = 10 ** max(0, len(str(round(tokens))) - 2)
    return int(-(-tokens // step) * step)


class Measurement(NamedTuple):
    what: str
    """Says which times to measure, and at which sizes."""
    command: str
    """Command that measures a running server. URL in the command stands for the server's address."""
    minutes: int
    """Maximum duration of `command` in minutes."""
    own_gpu: str
    """Command that measures the step times on a GPU of the user's own, without a server. Empty: pdsim's real mode
    cannot run the model, or only times outside the GPUs are to be measured.
    """

    def __str__(self) -> str:
        own = f", or on a GPU of your own: {self.own_gpu}" if self.own_gpu else ""
        return f"Measure {self.what}: {self.command} ({self.minutes} minutes){own}."


def measurement(groups: Iterable[Group], scenario: Scenario, sizes: Sizes) -> Measurement | None:
    """Recommends a measurement of step times. None: `groups` is empty.

    groups: which times to measure: "prefill" (forwards), "decode" (steps) or "outside" (the part of TTFT outside GPUs).
    scenario: names the model. sizes: mean sizes of the forwards and steps.
    """
    deciding = [group for group in GROUPS if group in set(groups)]
    if not deciding:
        return None
    prompt, batch = rounded(sizes.prompt_tokens), max(1, round(sizes.batch))
    what: Mapping[Group, str] = {
        "prefill": f"prefill of {prompt:,} tokens",
        "decode": f"decode of {batch:,} requests with {rounded(sizes.context_tokens):,} tokens each",
        "outside": "TTFT of one short prompt",
    }
    flags = {"prefill": f" --longest-prompt {prompt}", "decode": f" --concurrency {batch}", "outside": ""}
    of_gpu = [group for group in deciding if group != "outside"]
    can_run = bool(of_gpu) and load_model(scenario.model).llama is not None
    return Measurement(
        what=" and ".join(what[group] for group in deciding),
        command=f"pdsim observe URL{''.join(flags[group] for group in deciding)}",
        minutes=_MINUTES,
        own_gpu=f"pdreal measure --model {scenario.model} --only {','.join(of_gpu)}" if can_run else "",
    )
