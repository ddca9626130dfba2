"""Measurements that decide an answer which hangs on times that nobody measured."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pdsim.scenario.cost import GROUPS, Group
from pdsim.scenario.schema import Scenario
from pdsim.system.catalog import load_model


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Typical sizes of what a cluster computes."""

    prompt_tokens: float
    batch: float
    """Requests of a decode step."""
    context_tokens: float
    """Tokens of each of them."""


def sizes_of(scenario: Scenario, row: Mapping[str, Any]) -> Sizes:
    """Sizes of a run by its summary."""
    decoding = scenario.decode or scenario.aggregated
    assert decoding is not None
    prompt_tokens, output_tokens = (
        row[f"total_{what}_tokens"] / max(1, row["completed"]) for what in ("input", "output")
    )
    batch = row["mean_running_requests"] / (decoding.instances * decoding.dp)
    return Sizes(prompt_tokens=prompt_tokens, batch=batch, context_tokens=prompt_tokens + output_tokens / 2)


def rounded(tokens: float) -> int:
    """The next size with two digits: what is measured must reach it."""
    step = 10 ** max(0, len(str(round(tokens))) - 2)
    return int(-(-tokens // step) * step)


def measurement(groups: Iterable[Group], scenario: Scenario, sizes: Sizes) -> str:
    """Sentences that name what decides, its size, and the command that measures it; empty without groups."""
    deciding = [group for group in GROUPS if group in set(groups)]
    if not deciding:
        return ""
    prompt, batch = rounded(sizes.prompt_tokens), max(1, round(sizes.batch))
    what: Mapping[Group, str] = {
        "prefill": f"prefill of {prompt:,} tokens",
        "decode": f"decode of {batch:,} requests with {rounded(sizes.context_tokens):,} tokens each",
        "outside": "TTFT of one short prompt",
    }
    flags = {"prefill": f" --longest-prompt {prompt}", "decode": f" --concurrency {batch}", "outside": ""}
    parts = " and ".join(what[group] for group in deciding)
    command = f"pdsim observe URL{''.join(flags[group] for group in deciding)}"
    of_gpu = [group for group in deciding if group != "outside"]
    if of_gpu and load_model(scenario.model).llama is not None:
        command += f", or pdreal measure --model {scenario.model} --only {','.join(of_gpu)}"
    return f"Measure {parts}, {'it decides' if len(deciding) == 1 else 'they decide'}: {command}."
