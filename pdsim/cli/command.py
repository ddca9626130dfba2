"""Common parts of the commands of pdsim and pdreal: options, JSON output, and the handling of errors."""

import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from typing import Annotated, Any, NoReturn

from cyclopts import App, CycloptsError, Parameter
from cyclopts.validators import Number

from pdsim import __version__, is_compiled
from pdsim.core.instance import PolicyError
from pdsim.inputs import InputError, shortened
from pdsim.scenario.building.room import limited
from pdsim.scenario.load_options import LoadOptions
from pdsim.scenario.sections.component import imports
from pdsim.scenario.sections.profile import read_profile
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.catalog import VARIABLE, CatalogError, searched
from pdsim.workload.trace_file import InputNote, InputWarning


def out_at(what: str) -> Parameter:
    """Makes the option --out. what: its help text."""
    return Parameter(name=("--out", "-o"), help=what)


_FULL = {ENOSPC, EDQUOT, EFBIG}
"""Error numbers of the system for a full disk, or for a quota that is used up."""
ScenarioFile = Annotated[Path, Parameter(help="Scenario file (YAML).")]
Set = Annotated[
    tuple[str, ...],
    Parameter(
        name="--set", show_default=False, help="Change a field of the scenario: path=value. Repeat for more fields."
    ),
]
ProfileFiles = Annotated[
    tuple[str, ...],
    Parameter(
        name="--profile",
        show_default=False,
        help="Profile whose step times, host, transfers and front end apply: FILE, or prefill=FILE and decode=FILE.",
    ),
]
Json = Annotated[bool, Parameter(name="--json", help="Print JSON instead of tables.")]
Details = Annotated[bool, Parameter(help="Print all numbers, and where the time of requests goes by stage.")]
Seed = Annotated[int | None, Parameter(help="Seed, instead of the scenario's.")]
RunOrScenario = Annotated[Path, Parameter(help="Run folder, or scenario file to simulate first.")]
Tornado = Annotated[
    bool,
    Parameter(help="Simulate again with 10 % more of each resource, to find the resource that limits each metric."),
]
Out = Annotated[Path | None, out_at("Folder to write the run to.")]
Jobs = Annotated[int | None, Parameter(help="Number of processes [one per CPU].")]
Port = Annotated[int, Parameter(validator=Number(gte=0, lte=65535))]
Engine = Annotated[
    str, Parameter(help="Where to simulate: pool (processes), here (this process), ray, or ray:ADDRESS.")
]
Trace = Annotated[Path | None, Parameter(help="Trace that replaces the workload.")]
Limits = Annotated[
    str,
    Parameter(help="SLO: limits of ttft, tpot and e2e as percentiles or for a share of the requests, also per class."),
]
Load = Annotated[LoadOptions, Parameter(name="*", help="Model and load.")]
NO_LOAD = LoadOptions()
Force = Annotated[bool, Parameter(help="Overwrite an earlier run in --out.")]


def profile_changes(files: Sequence[str]) -> tuple[str, ...]:
    """Changes, in the notation of --set, with which profiles replace the scenario's cost, and also its transfer times
    and front end if a profile has them. files: values of --profile: one FILE, or prefill=FILE and decode=FILE; empty:
    there are no changes. Raises ConfigError for FILE with a second value, for two files of one role, or if a file is no
    profile.
    """
    if not files:
        return ()
    of_role = dict(file.split("=", 1) for file in files if file.startswith(("prefill=", "decode=")))
    if len(of_role) < len(files) and len(files) > 1:
        raise ConfigError(f"--profile {' --profile '.join(files)}: expected FILE, or prefill=FILE and decode=FILE")
    paths = {role: str(Path(file).absolute()) for role, file in (of_role or {"": files[0]}).items()}
    has_front_end = any(read_profile(Path(path)).get("front_end") for path in paths.values())
    front_end = ("front_end=null",) if has_front_end else ()
    return ("cost=null", *front_end, f"profile={json.dumps(paths.get('', paths))}")


def program(name: str, purpose: str) -> App:
    """Makes the command-line app of a program. All commands of the app have the options --trust, --catalog and --yes.
    purpose: help text of the program.
    """
    version = f"{__version__} ({'compiled' if is_compiled() else 'interpreted'})"
    app = App(name=name, help=purpose, version=version, default_parameter=Parameter(negative=()))  # no --no-flags
    for one in (app, app.meta):
        one.suppress_keyboard_interrupt = False  # run_app says it

    @app.meta.default
    def launch(
        *words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
        trust: Annotated[
            bool,
            Parameter(
                env_var="PDSIM_TRUST",
                help="Import the modules that files name (module:Class). This runs their code.",
            ),
        ] = False,
        catalog: Annotated[
            Path | None,
            Parameter(env_var=VARIABLE, help="Folder with models, GPUs and transports of your own."),
        ] = None,
        yes: Annotated[bool, Parameter(help="Begin even if the run may not fit this machine's memory.")] = False,
    ) -> None:
        with (
            imports(allowed=trust),
            searched(catalog, is_new=words[:2] == ("catalog", "add")),
            _working_folder_searched(trust),
            limited(not yes),
            _warnings_shown(name),
        ):
            app(words, exit_on_error=False, print_error=False)

    return app


def run_app(app: App, arguments: Sequence[str] | None, mistakes: tuple[type[Exception], ...] = ()) -> None:
    """Runs the command that the arguments name. If a file or an option is wrong, prints one message and exits with 2.
    If the user interrupts, prints one message and exits with 130. If a disk is full, prints one message and exits with
    1. If the reader of the output has gone, exits with 0. arguments: None: those of this process. mistakes: further
    exceptions for which the command prints one message and exits with 2.
    """
    _open_closed_streams()
    known: tuple[type[Exception], ...] = (
        CycloptsError,
        InputError,  # of which are ConfigError and RunFolderError
        CatalogError,
        PolicyError,
        *mistakes,
    )
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words in ([], ["--help"], ["-h"]):
        for name in app:
            _ = app[name]  # its module, which is not loaded before, has its help
    elif not words[0].startswith("-") and words[0] not in app:
        words = words[:1]  # an error: --help behind it would explain the program instead
    try:
        app.meta(words, exit_on_error=False, print_error=False)
    except known as wrong:
        _fail(app, str(wrong))
    except KeyboardInterrupt:
        print(f"{app.name[0]}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(0) from None
    except OSError as wrong:  # of a file or folder that cannot be read or written
        if wrong.errno in _FULL:
            where = "" if wrong.filename is None else f"{wrong.filename}: "
            print(f"{app.name[0]}: {where}{os.strerror(wrong.errno)}; complete files are kept", file=sys.stderr)
            raise SystemExit(1) from None
        if wrong.filename is None:
            raise
        _fail(app, f"{wrong.filename}: {wrong.strerror}")


def _open_closed_streams() -> None:
    """Opens /dev/null for each standard stream that the caller closed. Otherwise the next opened file would get the
    descriptor of the closed stream, and output would go into the file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123  until the end


@contextmanager
def _warnings_shown(name: str) -> Iterator[None]:
    """Context that prints each of pdsim's warnings once, as a message that begins with the program's name."""
    shown: set[str] = set()
    with warnings.catch_warnings():
        show: Any = warnings.showwarning

        def tell(message: Any, category: Any, *where: Any) -> None:
            if not issubclass(category, InputWarning):
                show(message, category, *where)
            elif str(message) not in shown:
                shown.add(str(message))
                kind = "" if issubclass(category, InputNote) else "warning: "
                print(f"{name}: {kind}{shortened(str(message))}", file=sys.stderr)

        warnings.simplefilter("always", InputWarning)
        warnings.showwarning = tell  # type: ignore[assignment]
        yield


def _fail(app: App, message: str) -> NoReturn:
    print(f"{app.name[0]}: {shortened(message)}", file=sys.stderr)
    raise SystemExit(2) from None


@contextmanager
def _working_folder_searched(is_wanted: bool) -> Iterator[None]:
    """Context in which Python also finds modules in the working folder, where the user's policies may be. is_wanted:
    False: the context changes nothing.
    """
    if is_wanted:
        sys.path.insert(0, "")
    try:
        yield
    finally:
        if is_wanted:
            sys.path.remove("")


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))
