"""Runs the engines' own parsers of flags, which it imports from their wheels without the wheels' dependencies.

`python tests/launch/engine_parsers.py FOLDER` prints engine_flags.txt: what the parsers know of each flag, field and
variable that pdsim/launch names. Each folder in FOLDER is an unpacked wheel: sglang, vllm, sglang-router, vllm-router,
ai-dynamo, aiperf. `... FOLDER PROGRAM --parse` reads lists of words from standard input, one JSON list per line, and
prints for each the error of the engine's own parser, or an empty line. `... FOLDER PROGRAM --defaults` prints the
program's lines of engine_defaults.txt. All need torch and msgspec.
"""

import argparse
import importlib
import importlib.abc
import importlib.machinery
import json
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

PACKAGES = ("sglang", "vllm", "sglang_router", "vllm_router", "dynamo", "aiperf")
LAUNCH = Path(__file__).parents[2] / "pdsim" / "launch"
IMPORT = LAUNCH.parent / "formats" / "deployments"
COMPILED = ("dynamo._core", "dynamo.llm", "dynamo.runtime", "dynamo.prometheus_names", "dynamo.nixl_connect")
PLATFORMS = ("amdsmi", "libtpu", "tpu_info", "tpu_inference", "pathwaysutils", "triton", "triton_kernels")
"""Packages whose presence would tell the engine that this machine has another accelerator."""


class _Anything(type):
    """Metaclass of Absent: the class itself has all attributes, takes all arguments, and decorates without effect."""

    def __new__(cls, name, bases, names, **_):
        return super().__new__(cls, name, bases, names)

    def __init__(cls, name, bases, names, **_):
        super().__init__(name, bases, names)

    def __getattr__(cls, name):
        if name.startswith("__") and name not in ("__class_validators__", "__func__"):
            raise AttributeError(name)
        return [] if name == "__class_validators__" else Absent

    def __or__(cls, other):
        return cls

    __ror__ = __or__

    def __iter__(cls):
        return iter(())

    def __getitem__(cls, key):
        return cls

    def __setitem__(cls, key, value):
        pass

    def __get_pydantic_core_schema__(cls, source, handler):
        from pydantic_core import core_schema

        return core_schema.any_schema()


class Absent(metaclass=_Anything):
    """Takes the place of everything in a package that is not installed."""

    def __new__(cls, *given, **named):
        return given[0] if len(given) == 1 and not named and callable(given[0]) else object.__new__(cls)

    def __init__(self, *given, **named):
        pass

    def __getattr__(self, name):
        return getattr(Absent, name)

    def __call__(self, *given, **named):
        return given[0] if len(given) == 1 and callable(given[0]) else Absent

    def __iter__(self):
        return iter(())

    def __bool__(self):
        return False


class _Module(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return {"__version__": "99.0", "dumps": lambda *_: b""}.get(name, Absent)


class _AbsentPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook, used after all others, that makes empty modules for packages that an engine imports and that are not
    installed.
    """

    def find_spec(self, name, path, target=None):
        is_compiled = any(name == one or name.startswith(f"{one}.") for one in COMPILED)
        top = name.partition(".")[0]
        if not is_compiled and (top in (*PACKAGES, *PLATFORMS) or not self._is_asked_by_an_engine()):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    @staticmethod
    def _is_asked_by_an_engine():
        frame = sys._getframe()
        while frame is not None and re.search("importlib|engine_parsers", frame.f_code.co_filename):
            frame = frame.f_back
        return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in PACKAGES

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def wheels(folder: Path) -> dict[str, tuple[Path, str]]:
    """The newest unpacked wheel of each package, and its release."""
    found: dict[str, tuple[tuple[int, ...], Path, str]] = {}
    for info in folder.glob("*/*.dist-info"):
        name, _, release = info.name.removesuffix(".dist-info").partition("-")
        package = "dynamo" if name == "ai_dynamo" else name
        order = tuple(int(part) for part in re.findall(r"\d+", release))
        if package in PACKAGES and (package not in found or found[package][0] < order):
            found[package] = order, info.parent, release
    return {package: (path, release) for package, (_, path, release) in found.items()}


# Parsers of programs.


def _sglang_server():
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def _sglang_load():
    kernels = "sglang.srt.disaggregation.utils"  # the client needs a constant of it, and nothing of what it imports
    sys.modules[kernels] = _Module(kernels)
    from sglang.benchmark import serving

    class Parser(argparse.ArgumentParser):
        def parse_args(self, *_):
            raise _FoundError(self)

    serving.ArgumentParser = Parser
    try:
        serving.cli_main()
    except _FoundError as found:
        del Parser.parse_args
        return found.args[0]
    raise AssertionError("no parser")


class _FoundError(Exception):
    pass


def _router(package: str) -> Callable[[], argparse.ArgumentParser]:
    def made():
        parser = argparse.ArgumentParser()
        importlib.import_module(f"{package}.router_args").RouterArgs.add_cli_args(parser)
        return parser

    return made


def _vllm_parser():
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = CpuPlatform()
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return FlexibleArgumentParser()


def _vllm_server():
    parser = _vllm_parser()
    from vllm.entrypoints.common.cli_args import make_arg_parser

    return make_arg_parser(parser)


def _vllm_load():
    parser = _vllm_parser()
    from vllm.benchmarks.serve import add_cli_args

    add_cli_args(parser)
    return parser


def _dynamo(*groups: str, engine: Callable[[], argparse.ArgumentParser] | None = None):
    def made():
        parser = argparse.ArgumentParser(conflict_handler="resolve") if engine is None else engine()
        parser.conflict_handler = "resolve"
        for group in groups:
            module, _, name = group.rpartition(".")
            getattr(importlib.import_module(f"dynamo.{module}"), name)().add_arguments(parser)
        return parser

    return made


def _aiperf():
    from aiperf.cli import app

    parser = argparse.ArgumentParser()
    for argument in app["profile"].assemble_argument_collection(parse_docstring=False):
        names = [name for name in argument.names if name.startswith("-")]
        if names and not {*names} & {*parser._option_string_actions}:
            is_switch = argument.hint is bool or "--no-" in " ".join(names)
            parser.add_argument(*names, **({"action": "store_true"} if is_switch else {"nargs": "+"}))
    return parser


_RUNTIME = "common.configuration.groups.runtime_args.DynamoRuntimeArgGroup"
PROGRAMS: dict[str, tuple[str, Callable[[], argparse.ArgumentParser]]] = {
    "python -m sglang.launch_server": ("sglang", _sglang_server),
    "python -m sglang.bench_serving": ("sglang", _sglang_load),
    "python -m sglang_router.launch_router": ("sglang_router", _router("sglang_router")),
    "vllm serve": ("vllm", _vllm_server),
    "vllm bench serve": ("vllm", _vllm_load),
    "vllm-router": ("vllm_router", _router("vllm_router")),
    "python -m dynamo.frontend": ("dynamo", _dynamo("frontend.frontend_args.FrontendArgGroup")),
    "python -m dynamo.sglang": (
        "dynamo",
        _dynamo("sglang.backend_args.DynamoSGLangArgGroup", _RUNTIME, engine=_sglang_server),
    ),
    "python -m dynamo.vllm": (
        "dynamo",
        _dynamo("vllm.backend_args.DynamoVllmArgGroup", _RUNTIME, engine=_vllm_server),
    ),
    "aiperf profile": ("aiperf", _aiperf),
}
"""For each program, by the words that call it: its package, and a function that makes its parser. Workers of Dynamo
take an engine's flags and Dynamo's own.
"""

JSON_FIELDS = {
    "vllm --kv-events-config": ("vllm", "vllm/config/kv_events.py", "KVEventsConfig"),
    "vllm --kv-transfer-config": ("vllm", "vllm/config/kv_transfer.py", "KVTransferConfig"),
    "vllm --ec-transfer-config": ("vllm", "vllm/config/ec_transfer.py", "ECTransferConfig"),
    "vllm --eplb-config": ("vllm", "vllm/config/parallel.py", "EPLBConfig"),
    "sglang --kv-events-config": ("sglang", "sglang/srt/disaggregation/kv_events.py", "KVEventsConfig"),
}
"""For each flag whose value is JSON: package, file and name of the class that reads the JSON."""
VARIABLES = {
    "SGLANG_": ("sglang", "sglang/srt/environ.py"),
    "VLLM_": ("vllm", "vllm/envs.py"),
}
"""For each prefix of an engine's environment variables: the package and the file that reads them."""


def flags_of(program: str, release: str) -> Iterator[str]:
    """Yields lines of engine_flags.txt: for each flag of a program that pdsim/launch names, the number of its values
    and its choices.
    """
    named = {*_flags_named(_sources()), *_OF_ROLES}
    yield f"# {program}: {release}"
    for name, action in sorted(PROGRAMS[program][1]()._option_string_actions.items()):
        if name.removeprefix("--") in named:
            choices = "|".join(sorted(map(str, action.choices or ())))  # engines keep some in sets
            nargs = 0 if action.nargs == 0 else action.nargs or 1
            yield " ".join([name, str(nargs), *([choices] if choices and " " not in choices else [])])


def defaults_of(program: str, release: str) -> Iterator[str]:
    """Yields lines of engine_defaults.txt: the default of each flag of a program that `pdsim launch` writes or `pdsim
    import` reads.
    """
    named = {*_flags_named(_sources(LAUNCH, IMPORT))}
    yield f"# {program}: {release}"
    for name, action in sorted(PROGRAMS[program][1]()._option_string_actions.items()):
        if name.startswith("--") and name.removeprefix("--") in named:
            yield f"{name} {json.dumps(action.default, default=str)}"


def _flags_named(text: str) -> list[str]:
    return re.findall(r'"([a-z][a-z0-9-]+)"', text)


_OF_ROLES = [f"{role}-{what}" for role in ("prefill", "decode") for what in ("policy", "selector")]
"""Flags whose names pdsim/launch makes from a role's name."""


def _sources(*folders: Path) -> str:
    paths = [path for folder in folders or [LAUNCH] for path in sorted(folder.glob("*.py"))]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def others(found: Mapping[str, tuple[Path, str]]) -> Iterator[str]:
    """Yields lines of engine_flags.txt on the fields of JSON values, and on environment variables."""
    for flag, (package, path, name) in JSON_FIELDS.items():
        text = (found[package][0] / path).read_text(encoding="utf-8")
        body = re.split(r"\nclass |\n@", text.partition(f"class {name}")[2])[0]
        yield f"# JSON of {flag}: {package} {found[package][1]}"
        yield " ".join(re.findall(r"^    ([a-z_]+): ", body, re.MULTILINE))
    for prefix, (package, path) in VARIABLES.items():
        known = {*re.findall(r"\b[A-Z0-9_]+", (found[package][0] / path).read_text(encoding="utf-8"))}
        yield f"# variables {prefix}: {package} {found[package][1]}"
        yield " ".join(sorted({*re.findall(rf"\b{prefix}[A-Z0-9_]+", _sources())} & known))


def against(parser: argparse.ArgumentParser, words: list[str]) -> str:
    """The parser's error for these words. Empty: the parser takes the words."""

    def wrong(message):
        raise _FoundError(message)

    parser.error = wrong
    try:
        parser.parse_args(words)
    except _FoundError as found:
        return str(found)
    return ""


def in_own_process(folder: Path, program: str, *flags: str, given: str = "") -> str:
    """Runs this file for one program in a new process, and returns its output. In one process, the modules of one
    engine would change another. given: standard input.
    """
    command = [sys.executable, __file__, str(folder), program, *flags]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{program}: {done.stderr[-2000:]}")
    return done.stdout


def main() -> None:
    folder, *rest = sys.argv[1:]
    found = wheels(Path(folder))
    if not rest:
        made = "".join(in_own_process(Path(folder), program) for program in PROGRAMS)
        sys.stdout.write(made + "".join(f"{line}\n" for line in others(found)))
        return
    sys.path[:0] = [str(path) for path, _ in found.values()]
    sys.meta_path.append(_AbsentPackages())
    sys.modules["regex"] = re  # vLLM checks names with it
    program, *flags = rest
    package, parser = PROGRAMS[program]
    if "--parse" in flags:
        made = parser()
        for line in sys.stdin:
            print(json.dumps(against(made, json.loads(line))))
    else:
        lines = defaults_of if "--defaults" in flags else flags_of
        print("\n".join(lines(program, f"{package} {found[package][1]}")))


if __name__ == "__main__":
    main()
