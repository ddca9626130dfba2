"""Writes the commands and manifests that start the cluster of a scenario with a real engine."""

from collections.abc import Callable, Sequence

from pdsim.launch import dynamo, kubernetes, sglang, vllm
from pdsim.launch.commands import Launch
from pdsim.scenario.schema import Scenario

ENGINES: dict[str, Callable[[Scenario, Sequence[str], str], Launch]] = {
    "sglang": sglang.launch,
    "vllm": vllm.launch,
    "dynamo": dynamo.launch_sglang,
    "dynamo-vllm": dynamo.launch_vllm,
    "kubernetes": kubernetes.launch,
}
"""For each engine: the function that makes the commands or manifests. Its arguments are the scenario, the command-line
arguments that name the scenario's file, and the name or path by which the engine finds the model.
"""
