"""The load of a scenario for clients that an engine's own benchmark does not cover: a trace, which AIPerf replays."""

from pdsim.launch.commands import GATEWAY_PORT, HOST, Flags, Launch
from pdsim.scenario.build import requests_of
from pdsim.scenario.schema import Scenario
from pdsim.workload.client_driver import ClosedLoop

TRACE = "load.jsonl"


def add_replay(made: Launch, scenario: Scenario, source: str, model: str) -> None:
    """Adds the export of the requests with their times, and AIPerf, which sends them (its docs/cli_options.md)."""
    made.add("trace", f"pdsim export {source}", [("to", "mooncake"), ("out", TRACE)])
    client = scenario.client
    if isinstance(client, ClosedLoop):
        pace: Flags = [("concurrency", client.concurrency), ("request-count", len(requests_of(scenario)))]
    else:
        pace = [("fixed-schedule", True), ("fixed-schedule-auto-offset", True)]
    flags = [
        ("model", model),
        ("url", f"http://{HOST}:{GATEWAY_PORT}"),
        ("endpoint-type", "completions"),
        ("streaming", True),
        ("input-file", TRACE),
        ("custom-dataset-type", "mooncake_trace"),
        *pace,
        ("extra-inputs", "ignore_eos:true"),
        ("random-seed", scenario.seed),
        ("output-artifact-dir", scenario.name),
    ]
    made.add("load", "aiperf profile", flags)
