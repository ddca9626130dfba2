"""pdsim serve: a local page to try clusters on."""

from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from cyclopts import Parameter

from pdsim.cli.command import Limits, Set, Trace
from pdsim.study.planning.slo import DEFAULT_SLO

_PORT = 8321
_NUM_REQUESTS = 500
_STARTER = {"client": {"use": "open_loop", "arrivals": {"use": "poisson", "rate": "10 /s"}}}


def serve(
    scenario: Annotated[Path | None, Parameter(help="A scenario file [a starter].")] = None,
    /,
    *,
    trace: Trace = None,
    slo: Limits = DEFAULT_SLO,
    gpu: Annotated[
        list[str] | None, Parameter(negative="", help="A GPU's price an hour: h100=2.5; others have none.")
    ] = None,
    set_: Set = (),
    num_requests: Annotated[int, Parameter(help="At most so many, for answers within a second.")] = _NUM_REQUESTS,
    port: Annotated[int, Parameter(help="Of 127.0.0.1; 0 takes a free one.")] = _PORT,
    jobs: Annotated[int | None, Parameter(help="Processes; else one for each CPU, up to three.")] = None,
) -> None:
    """Open a page on this machine: choose model, GPUs and instances, and see latencies and cost change."""
    import os

    from pdsim.cli.planning import prices_of
    from pdsim.scenario.yaml_file import ConfigError
    from pdsim.study.engine import open_engine
    from pdsim.study.planning.slo import Slo
    from pdsim.study.planning.trials import Trials
    from pdsim.study.questions.base import AskOptions, base_of
    from pdsim.study.store import Store
    from pdsim.study.sweep import Work
    from pdsim.web.board import Board, with_fewer

    try:
        from pdsim.web.server import serve as run_server
    except ImportError:
        raise ConfigError("serve needs aiohttp, which is not installed: pip install 'pdsim[web]'") from None
    wanted, prices = Slo.parse(slo), prices_of(gpu or ())
    with TemporaryDirectory(prefix="pdsim-serve-") as name:
        folder = Path(name)
        base = base_of(scenario, AskOptions(trace=trace), set_, folder=folder, starter=_STARTER)
        wanted.require_classes(with_fewer(base, num_requests).scenario)
        with closing(open_engine("pool", min(3, os.cpu_count() or 1) if jobs is None else jobs)) as engine:
            board = Board(Trials(with_fewer(base, num_requests), wanted, 1, Work(Store(folder), engine)), prices)
            try:
                run_server(board, port, lambda address: print(f"{address}  (Ctrl-C ends it)", flush=True))
            except OSError as taken:
                raise ConfigError(f"--port {port}: {taken.strerror}; --port 0 takes a free one") from None
            except KeyboardInterrupt:
                print()
