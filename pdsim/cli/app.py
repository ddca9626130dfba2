"""The commands. A wrong file or flag is one message and exit code 2; a run that stalls exits with 1."""

from collections.abc import Sequence

from pdsim.cli.asking import ask
from pdsim.cli.command import program, run_app
from pdsim.cli.measurements import calibrate, scale, validate
from pdsim.cli.runs import compare, explain, export, replay, report, run
from pdsim.cli.scenarios import catalog, schema, sglang
from pdsim.cli.sweeping import sweep

app = program("pdsim", "Simulate prefill/decode disaggregated LLM serving with the scheduler that real hardware runs.")
for command in (
    ask,
    run,
    compare,
    validate,
    calibrate,
    scale,
    explain,
    report,
    replay,
    sweep,
    export,
    sglang,
    catalog,
    schema,
):
    app.command(command)


def main(arguments: Sequence[str] | None = None) -> None:
    run_app(app, arguments)
