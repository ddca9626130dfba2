"""The load of a scenario for clients that an engine's own benchmark does not cover: a trace, which AIPerf replays."""

from pdsim.launch.commands import GATEWAY_PORT, HOST, Launch
from pdsim.scenario.schema import Scenario
from pdsim.workload.client_driver import ClosedLoop

TRACE = "load.jsonl"


def add_replay(made: Launch, scenario: Scenario, source: str, model: str) -> None:
    """Adds the export of the requests with their times, and AIPerf 0.3, which sends them.

    Flags: aiperf/common/config, InputConfig and LoadGeneratorConfig.
    """
    made.add("trace", f"pdsim export {source}", [("to", "mooncake"), ("out", TRACE)])
    client = scenario.client
    pace = ("concurrency", client.concurrency) if isinstance(client, ClosedLoop) else ("fixed-schedule", True)
    flags = [
        ("model", model),
        ("url", f"http://{HOST}:{GATEWAY_PORT}"),
        ("endpoint-type", "completions"),
        ("streaming", True),
        ("input-file", TRACE),
        ("custom-dataset-type", "mooncake_trace"),
        pace,
        ("random-seed", scenario.seed),
        ("artifact-dir", scenario.name),
    ]
    made.add("load", "aiperf profile", flags)
