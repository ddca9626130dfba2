"""The command line. If a file or an option is wrong, a command prints one message and exits with 2. If a run stalls, it
exits with 1.
"""

import os
from collections.abc import Sequence

os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # to look for them costs a tenth of the time to start

from pdsim.garbage import search_seldom

search_seldom()  # imports make much, and no garbage

try:
    from pdsim.cli.command import program, run_app
    from pdsim.signals import ended_like_ctrl_c
except KeyboardInterrupt:  # these imports take most of the time to start
    raise SystemExit(130) from None

app = program("pdsim", "Simulate prefill/decode disaggregated LLM serving with the scheduler that real hardware runs.")
for path in (
    "studies:ask",
    "scenarios:init",
    "runs:run",
    "runs:compare",
    "measurements:observe",
    "measurements:validate",
    "measurements:calibrate",
    "measurements:scale",
    "explaining:explain",
    "runs:report",
    "runs:replay",
    "studies:plan",
    "studies:serve",
    "studies:sweep",
    "runs:export",
    "scenarios:launch",
    "importing:import_",
    "catalog:catalog",
    "scenarios:schema",
    "scenarios:fields",
):
    app.command(f"pdsim.cli.{path}", name=path.partition(":")[2].rstrip("_"))  # imported when it is called


_FOR_LIBRARIES = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # Arrow's own pool takes 9 MiB more for a run folder
    "OPENBLAS_NUM_THREADS": "1",  # to start a thread for each CPU takes NumPy longer than all that it computes here
}
"""Environment variables that `main` sets before libraries read them. A variable that the user has set keeps its value.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    for name, value in _FOR_LIBRARIES.items():
        os.environ.setdefault(name, value)
    with ended_like_ctrl_c():
        run_app(app, arguments)
