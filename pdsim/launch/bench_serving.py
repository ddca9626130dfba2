"""Writes the load of a scenario as options of SGLang's benchmark client (0.5.23, benchmark/serving.py)."""

from typing import Any

from pdsim.launch.commands import GATEWAY_PORT, pace
from pdsim.launch.words import Flags
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.component import component_name
from pdsim.workload.lengths import Fixed, Lengths, Uniform
from pdsim.workload.synthetic import RandomLengths, SharedPrefixGroups


def bench_flags(scenario: Scenario, host: str) -> tuple[Flags, list[str]]:
    """Options of SGLang's benchmark client that send the load. If the client cannot send it: no options, and the
    reasons.
    """
    requests, dataset = _dataset(scenario.workload)
    sent = pace(scenario.client)
    why = (
        []
        if dataset
        else [f"{component_name(scenario.workload)} with these lengths is no workload that bench_serving generates"]
    )
    why += [] if sent else ["bench_serving sends Poisson arrivals, or a closed loop without a ramp, only"]
    if why:
        return [], why
    flags: Flags = [
        ("backend", "sglang"),
        ("host", host),
        ("port", GATEWAY_PORT),
        ("num-prompts", requests),
        *dataset,
        *sent,
        ("seed", scenario.seed),
        ("tag", scenario.name),
        ("output-file", f"{scenario.name}.jsonl"),
    ]
    return flags, []


def _dataset(workload: Any) -> tuple[int, Flags]:
    """Number of prompts, and the options with which the client generates them. No options: the client cannot generate
    them.
    """
    if isinstance(workload, SharedPrefixGroups):
        return workload.num_groups * workload.prompts_per_group, [
            ("dataset-name", "generated-shared-prefix"),
            ("gsp-num-groups", workload.num_groups),
            ("gsp-prompts-per-group", workload.prompts_per_group),
            ("gsp-system-prompt-len", workload.system_prompt_tokens),
            ("gsp-question-len", workload.question_tokens),
            ("gsp-output-len", workload.output_tokens),
            ("gsp-num-turns", workload.num_turns if workload.num_turns > 1 else None),
            ("gsp-range-ratio", f"{workload.range_ratio:g}" if workload.range_ratio < 1 else None),
            ("gsp-ordered", workload.ordered),
        ]
    if isinstance(workload, RandomLengths):
        inputs, outputs = _longest(workload.input_tokens), _longest(workload.output_tokens)
        if inputs is not None and outputs is not None and inputs[1] == outputs[1]:
            return workload.num_requests, [
                ("dataset-name", "random-ids"),
                ("random-input-len", inputs[0]),
                ("random-output-len", outputs[0]),
                ("random-range-ratio", f"{inputs[1]:g}"),
                ("tokenize-prompt", True),
            ]
    return 0, []


def _longest(lengths: Lengths) -> tuple[int, float] | None:
    """The longest length in tokens, and the shortest as a share of it. None: the client lacks this distribution of
    lengths.
    """
    if isinstance(lengths, Fixed):
        return lengths.tokens, 1.0
    return (lengths.high, lengths.low / lengths.high) if isinstance(lengths, Uniform) else None
