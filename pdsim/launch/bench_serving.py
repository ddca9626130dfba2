"""Writes the load of a scenario as options of SGLang's benchmark client (0.5.23, benchmark/serving.py)."""

from math import isqrt
from typing import Any

from pdsim.launch.commands import GATEWAY_PORT, pace
from pdsim.launch.words import Flags
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.component import component_name
from pdsim.system.catalog import load_model
from pdsim.workload.lengths import Fixed, Lengths, Uniform
from pdsim.workload.synthetic import RandomLengths, SharedPrefixGroups


def bench_flags(scenario: Scenario, host: str) -> tuple[Flags, list[str]]:
    """Options of SGLang's benchmark client that send the load. If the client cannot send the load: no options, and the
    reasons. host: address to which the client sends.
    """
    requests, dataset = _dataset(scenario.workload, scenario.model)
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


def _dataset(workload: Any, model: str) -> tuple[int, Flags]:
    """Number of prompts, and the options with which the client generates them. No options: the client cannot generate
    them. model: the model's name in the catalog, from which the sizes of images follow.
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
        images: Flags = []
        if (size := image_size(workload, model)) is not None:
            images = [("image-count", size[0]), ("image-resolution", f"{size[1]}x{size[2]}")]
        inputs, outputs = _longest(workload.input_tokens), _longest(workload.output_tokens)
        if inputs is not None and outputs is not None and inputs[1] == outputs[1]:
            return workload.num_requests, [
                ("dataset-name", "image" if images else "random-ids"),
                ("random-input-len", inputs[0]),
                ("random-output-len", outputs[0]),
                ("random-range-ratio", f"{inputs[1]:g}"),
                *(images or [("tokenize-prompt", True)]),
            ]
    return 0, []


def only_equal_images(_: Any, scenario: Scenario) -> str | None:
    """Check of the images of a workload random_lengths. Returns the reason for a refusal unless each request has the
    same number of new images of one size, and the model has an encoder in the catalog. None: benchmark clients can send
    the images, the workload has no images, or the workload is not random_lengths.
    """
    workload = scenario.workload
    if not isinstance(workload, RandomLengths) or workload.images is None or image_size(workload, scenario.model):
        return None
    return "clients send a fixed number of new images of one size, to a model with an encoder in the catalog"


def image_size(workload: RandomLengths, model: str) -> tuple[int, int, int] | None:
    """Number of images of a request, and height and width in pixels that give an image its number of tokens in the
    workload. None: the workload has no images, its requests differ in number or size of images or share images, or the
    model has no encoder in the catalog. model: name of the model in the catalog.
    """
    encoder = load_model(model).encoder
    if encoder is None or not isinstance(workload.images, Fixed) or not isinstance(workload.image_tokens, Fixed):
        return None
    if workload.distinct_images is not None or workload.image_share < 1:
        return None
    num_tokens, width = workload.image_tokens.tokens, encoder.patch_size * encoder.merge_size
    height = next(rows for rows in range(isqrt(num_tokens), 0, -1) if num_tokens % rows == 0)
    return workload.images.tokens, height * width, num_tokens // height * width


def _longest(lengths: Lengths) -> tuple[int, float] | None:
    """The longest length in tokens, and the shortest as a share of it. None: the client lacks this distribution of
    lengths.
    """
    if isinstance(lengths, Fixed):
        return lengths.tokens, 1.0
    return (lengths.high, lengths.low / lengths.high) if isinstance(lengths, Uniform) else None
