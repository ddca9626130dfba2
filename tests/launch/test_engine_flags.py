"""Each flag, field of JSON and variable of a launch is one that the engine's own parser has.

engine_flags.txt says what the parsers of the named releases have. With PDSIM_ENGINES=FOLDER, which has unpacked wheels,
the parsers themselves are asked (engine_parsers.py).
"""

import argparse
import importlib.util
import json
import os
import re
import shlex
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from pdsim.launch import ENGINES
from pdsim.scenario.yaml_file import ConfigError
from tests.launch import engine_parsers
from tests.launch.sample import AGGREGATED, ALONE, ENCODE, HISPARSE, OTHER, VLLM_ENCODE, WIDE, WITHOUT, sample, scenario

LISTED = Path(__file__).with_name("engine_flags.txt")
OF_OTHERS = re.compile(r"CUDA_|DYN_|MC_|SGLANG_DISAGG_STAGING_BUFFER_SIZE_MB")
"""Variables of CUDA, of Dynamo's runtime and of Mooncake, which are no Python; and one of SGLang 0.5.12."""


def sections():
    """Lines of engine_flags.txt by what their head names, without the release."""
    found = {}
    for line in LISTED.read_text().splitlines():
        if line.startswith("# "):
            head = line.removeprefix("# ").rpartition(":")[0]
        found.setdefault(head, []).extend([] if line.startswith("# ") else [line])
    return found


SECTIONS = sections()


def parser_of(program):
    """A parser made of the list."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    parser.add_argument("model", nargs="?")
    for line in SECTIONS[program]:
        name, nargs, *choices = line.split(" ")
        how = {"nargs": nargs if nargs in "*+?" else int(nargs)} if nargs != "0" else {"action": "store_true"}
        choices = choices[0].split("|") if choices else None
        parser.add_argument(name, dest=name, **({"choices": choices} if choices else {}), **how)
    return parser


PARSERS = {program: parser_of(program) for program in engine_parsers.PROGRAMS}


def apart(command):
    """Variables, program and words of a command."""
    words = shlex.split(command)
    first = next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    variables = [word.partition("=")[0] for word in words[:first]]
    rest = shlex.join(words[first:])
    program = next((one for one in PARSERS if rest.startswith(f"{one} ")), None)
    return variables, program, shlex.split(rest.removeprefix(program or ""))


def commands():
    """Commands of the sample's launches."""
    for engine in ENGINES:
        without = [(section, None) for section in WITHOUT[engine]]
        changes = [[*without, change] for change in sample(OTHER, engine) if not change[0].startswith(WITHOUT[engine])]
        changes += [[*ALONE, (f"aggregated.{name}", value)] for name, value in sample(AGGREGATED, engine)]
        changes += [ENCODE] if engine == "sglang" else [VLLM_ENCODE] if engine == "vllm" else []
        changes += [HISPARSE, WIDE, [*WIDE, ("prefill.load_balance_method", "total_tokens")]]
        for change in changes:
            try:
                made = ENGINES[engine](scenario(*change), ["s.yaml"], "m")
            except ConfigError:
                continue
            yield from made.commands.values()


@cache
def called():
    """Variables, program and words of each command."""
    return [apart(command) for command in dict.fromkeys(commands())]


def test_every_program_is_launched_by_some_command():
    assert {program for _, program, _ in called()} == {*PARSERS, None}  # None: pdsim export


def test_parsers_take_every_command():
    for _, program, words in called():
        if program is not None:
            PARSERS[program].parse_args(words)


def test_engines_have_every_variable():
    known = {name for head, lines in SECTIONS.items() if head.startswith("variables") for name in lines[0].split()}
    named = {name for variables, _, _ in called() for name in variables}
    assert {name for name in named if not OF_OTHERS.match(name)} <= known


def test_engines_have_every_field_of_json():
    for _, program, words in called():
        engine = "vllm" if program in ("vllm serve", "python -m dynamo.vllm") else "sglang"
        for flag, value in pairwise(words):
            if (known := SECTIONS.get(f"JSON of {engine} {flag}")) is not None:
                assert json.loads(value).keys() <= {*known[0].split()}


@pytest.mark.parametrize("engine", ["dynamo", "dynamo-vllm"])
def test_workers_publish_what_a_router_of_mode_kv_reads(engine):
    """vLLM's publisher is silent without enable_kv_cache_events; SGLang's has no such field."""
    said = {mode: [] for mode in ("kv", "random")}
    for mode, policy in (("kv", "cache_aware"), ("random", "random")):
        made_of = scenario(*[(section, None) for section in WITHOUT[engine]], ("router", policy))
        commands = ENGINES[engine](made_of, ["s.yaml"], "m").commands
        assert f"--router-mode {mode}" in commands["frontend"]
        for name in ("prefill-0", "decode-0"):
            words = shlex.split(commands[name])
            said[mode] += [json.loads(words[i + 1]) for i, word in enumerate(words) if word == "--kv-events-config"]
    assert said["random"] == []
    assert [one.get("enable_kv_cache_events") for one in said["kv"]] == [True if engine == "dynamo-vllm" else None] * 2
    assert {one["publisher"] for one in said["kv"]} == {"zmq"}


@pytest.fixture(scope="module")
def wheels():
    folder = os.environ.get("PDSIM_ENGINES")
    if folder is None:
        pytest.skip("PDSIM_ENGINES names no folder of unpacked wheels")
    missing = {*engine_parsers.PACKAGES} - {*engine_parsers.wheels(Path(folder))}
    missing |= {name for name in ("msgspec", "torch") if importlib.util.find_spec(name) is None}
    if missing:
        pytest.skip(f"{folder} or this Python lacks {', '.join(sorted(missing))}")
    return Path(folder)


@pytest.mark.slow
def test_the_list_is_what_the_wheels_have(wheels):
    parts = [engine_parsers.in_own_process(wheels, program) for program in engine_parsers.PROGRAMS]
    found = "".join(parts) + "".join(f"{line}\n" for line in engine_parsers.others(engine_parsers.wheels(wheels)))
    assert found == LISTED.read_text()


@pytest.mark.slow
def test_the_defaults_are_what_the_wheels_have(wheels):
    programs = ("python -m sglang.launch_server", "vllm serve")
    found = "".join(engine_parsers.in_own_process(wheels, program, "--defaults") for program in programs)
    assert found == LISTED.with_name("engine_defaults.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("program", [program for program in PARSERS if program != "aiperf profile"])
def test_the_engines_own_parser_takes_every_command(wheels, program):
    mine = [words for _, started, words in called() if started == program]
    given = "".join(json.dumps(words) + "\n" for words in mine)
    against = [
        json.loads(line)
        for line in engine_parsers.in_own_process(wheels, program, "--parse", given=given).split("\n")
        if line
    ]
    assert len(against) == len(mine)
    assert [wrong for wrong in against if wrong] == []
