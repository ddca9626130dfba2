"""Commands and manifests that start the cluster of a scenario with an engine."""

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
"""Launchers by engine. Each takes a scenario, the command-line words that name its file, and the engine's name of the
model."""
