"""Reads which commands a deployment runs, from scripts, manifests and values of charts."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields, replace
from math import prod
from pathlib import Path
from typing import Any

from pdsim.dataclass import dataclass
from pdsim.formats.deployments.containers import Pods, containers_of, engine_of_image
from pdsim.formats.deployments.readers import parsed
from pdsim.formats.deployments.shell import Command, Document, Loop, commands_of, expanded, split_text
from pdsim.inputs import MOST_YAML_BYTES, InputError, parse_yaml, parse_yaml_documents, read_text, shown

PROGRAMS = {
    ("sglang.launch_server",): "sglang",
    ("sglang", "serve"): "sglang",
    ("vllm", "serve"): "vllm",
    ("vllm.entrypoints.openai.api_server",): "vllm",
    ("dynamo.sglang",): "dynamo.sglang",
    ("dynamo.vllm",): "dynamo.vllm",
    ("dynamo.trtllm",): "dynamo.trtllm",
    ("trtllm-serve",): "trtllm",
    ("sglang_router.launch_router",): "gateway",
    ("sglang-router",): "gateway",
    ("vllm-router",): "gateway",
    ("dynamo.frontend",): "frontend",
    ("sglang.bench_serving",): "sglang-load",
    ("vllm", "bench", "serve"): "vllm-load",
    ("benchmark_serving.py",): "vllm-load",
    ("aiperf", "profile"): "aiperf-load",
    ("genai-perf", "profile"): "aiperf-load",
}
"""Known programs, by the words of the command that start them."""
_BY_LENGTH = sorted(PROGRAMS, key=len, reverse=True)


@dataclass(frozen=True)
class Process(Pods):
    """A program that a deployment runs, with its options."""

    where: str
    """Place of the command, for messages: the file, and the line or object in it."""
    program: str
    """Name of the known program that the command starts: a value of PROGRAMS, or trtllm-orchestrator (trtllm.py)."""
    words: Sequence[str]
    """The arguments of the program, in order, after those that are part of its name (serve in vllm serve)."""
    written: Mapping[str, str] = field(default_factory=dict)
    """Files that the shell script itself writes as here-documents (<<EOF), for options that name one of these files:
    text by file name. Empty: there are no such files.
    """
    note: str = ""
    """A text on how loops around the command count, if the number of servers is not certain. Empty: it is certain."""


def read_processes(path: Path, imported: Collection[Path] = ()) -> list[Process]:
    """The processes that a file starts. Empty: the file starts no known program. Raises InputError if the file, a
    manifest in it, or a file that --config names cannot be read, or if a line with a known program is no line of a
    shell. imported: files that are read by themselves, so that a script's here-documents that write them do not count.
    """
    files = {one.absolute() for one in imported}
    text = read_text(path)
    is_manifest = path.suffix in (".yaml", ".yml", ".json")
    found = (
        _of_manifests(text, str(path))
        if is_manifest
        else _of_script(text, str(path), lambda name: (path.parent / name).absolute() in files)
    )
    return [_with_config(one, path.parent) for one in found]


def _with_config(process: Process, folder: Path) -> Process:
    """The process, with the options of the file that --config names. Options in the command take precedence. If the
    file is missing, or the program is trtllm (whose files trtllm.py reads): the unchanged process.
    """
    words = [part for one in process.words for part in (one.split("=", 1) if one.startswith("--config=") else [one])]
    if "--config" not in words[:-1] or process.program == "trtllm":
        return process
    at = words.index("--config")
    path = folder / words[at + 1]
    if not path.is_file():
        return process
    config = parse_yaml(read_text(path, "YAML", MOST_YAML_BYTES), str(path))
    return replace(process, words=[*words[:at], *_flags_of(config, words), *words[at + 2 :]])


def _flags_of(config: Any, words: Sequence[str]) -> Iterator[str]:
    given = {word.partition("=")[0].removeprefix("--").replace("_", "-") for word in words}
    for name, value in config.items() if isinstance(config, dict) else ():
        flag = str(name).replace("_", "-")
        if flag in given:
            continue
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif value is not None:
            yield f"--{flag}"
            yield value if isinstance(value, str) else json.dumps(value)


_ONE_TURN = "the file does not say how many turns this loop has; one turn counts"
_ANY_NAME = r"[A-Za-z_]\w*"
_SAME_MANIFEST = "each turn applies the same manifest, so its servers count once"


def _of_script(text: str, where: str, is_imported: Callable[[str], bool]) -> Iterator[Process]:
    names = {name[-1] for name in PROGRAMS}
    commands = list(commands_of(text, where, names, is_imported))
    documents = [one.document for one in commands if one.document is not None]
    written = {one.target: one.text for one in documents if one.target}
    for at, one in enumerate(commands):
        place = f"{where}, line {one.number}"
        if (found := program_in(one.words)) is not None:
            replicas, note = _turns([loop for loop in one.loops if not _is_of_ranks(loop, one.words)])
            yield Process(place, *found, written, note, variables=one.variables, replicas=replicas)
        if one.document is not None and one.document.is_data and not _is_replaced(one.document, commands[at + 1 :]):
            yield from _of_document(one.document.text, f"{place}, here-document", one.loops)


def _is_of_ranks(loop: Loop, words: Sequence[str]) -> bool:
    """True if each turn of the loop starts one host's part of the same server: --node-rank has the loop's variable."""
    return bool(loop.variable) and bool(re.search(rf"--node[-_]rank[ =]\S*\$\S*\b{loop.variable}\b", " ".join(words)))


def _is_replaced(document: Document, behind: Sequence[Command]) -> bool:
    """True if a later here-document replaces the file that this one is written to, and no command between them names
    the file. behind: the commands that follow.
    """
    for one in behind if document.target else ():
        if one.document is not None and one.document.target == document.target and not one.document.is_appended:
            return True
        if any(Path(word) == Path(document.target) for word in one.words):
            return False
    return False


def _turns(loops: Sequence[Loop]) -> tuple[int, str]:
    """Returns (number of turns of nested loops, a note on a loop whose number is not known, which counts as one turn).
    The note is empty if all numbers are known.
    """
    unknown = next((f"{loop.text}: {_ONE_TURN}" for loop in loops if loop.turns is None), "")
    return prod(1 if loop.turns is None else loop.turns for loop in loops), unknown


def _of_document(text: str, where: str, loops: Sequence[Loop]) -> Iterator[Process]:
    """The processes of manifests in a here-document. Empty: the text has no manifest. loops: those around the command.
    Only loops whose variable is in the text apply another manifest in each turn.
    """
    try:
        processes = list(_of_manifests(text, where))
    except InputError:
        return
    own = [loop for loop in loops if re.search(rf"\$\{{?{loop.variable or _ANY_NAME}\b", text)]
    turns, note = _turns(own)
    if loops and not own:
        note = f"{loops[-1].text}: {_SAME_MANIFEST}"
    for one in processes:
        yield replace(one, replicas=one.replicas * turns, note=note)


_NAMING = {"echo", "grep", "kill", "printf"}
"""Commands that name a program and do not start it."""
_SEARCHING = {"killall", "pgrep", "pidof", "pkill"}
"""Such commands that also run behind others, such as ssh."""
_BEFORE = {"!", "(", "do", "elif", "else", "if", "sudo", "then", "until", "while", "{"}
"""Words that may precede a command of _NAMING."""


def program_in(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """The first known program among the words, and the words that follow. A word may contain a whole command. None:
    there is none, or the command only names the program, as `pkill -f vllm` does.
    """
    first = next((word for word in words if word not in _BEFORE), "")
    if _base(first) in _NAMING:
        return None
    for at in range(len(words)):
        if re.split(r"[/(`]", words[at])[-1] in _SEARCHING:
            return None
        for starts in _BY_LENGTH:
            if [*map(_base, words[at : at + len(starts)])] == [*starts]:
                return PROGRAMS[starts], list(words[at + len(starts) :])
    for word in words:
        if " " in word or "\n" in word:
            for inner in _commands_in(word):
                if (found := program_in(inner)) is not None:
                    return found
    return _in_image(words)


def _commands_in(word: str) -> Iterator[list[str]]:
    """Yields the words of each command in a word such as that behind bash -c. Raises InputError if the word has the
    name of a known program, but is no line of a shell.
    """
    try:
        yield from split_text(word)
    except ValueError as wrong:
        if any(name[-1] in word for name in PROGRAMS):
            raise InputError(f"{shown(word)}: no line of a shell: {wrong}") from None


_RUNNERS = {"docker", "podman", "nerdctl"}
_STARTS = {"run", "create"}


def _in_image(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """Returns (the program in the image that a `docker run` starts, the arguments after the image's name). None: the
    command starts no image with a known program.
    """
    if not _RUNNERS & set(map(_base, words[:2])) or not _STARTS & set(words):
        return None
    engines = [(engine_of_image(word), list(words[at:])) for at, word in enumerate(words, start=1) if "/" in word]
    return next(((engine, behind) for engine, behind in engines if engine is not None), None)


def _base(word: str) -> str:
    return word.rsplit("/", 1)[-1]


def _of_manifests(text: str, where: str) -> Iterator[Process]:
    for document in parse_yaml_documents(text, where):
        try:
            containers = list(containers_of(document, where))
        except InputError as wrong:
            raise InputError(f"{where}: {wrong}") from None
        for one in containers:
            words = [_of_kubernetes(word) for word in one.words]
            found = program_in(_with_variables(words, one.variables))
            if found is None and one.engine is not None:
                found = one.engine, _with_variables(words, one.variables)
            if found is None:
                continue
            program, behind = found
            pods = {name.name: getattr(one, name.name) for name in fields(Pods)}
            yield Process(one.where, program, behind, **pods)


def _of_kubernetes(word: str) -> str:
    return word.replace("$$", "$")


def _with_variables(words: Iterable[str], variables: Mapping[str, str]) -> list[str]:
    """The words, in which $(NAME) and ${NAME} are replaced by variables of the container."""
    return [
        expanded(re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), word), variables)
        for word in words
    ]


def merged(processes: Sequence[Process]) -> list[Process]:
    """The processes of rank 0 alone, so that a server on several hosts is a single process."""
    return [one for one in processes if _rank(one) == 0 and not _is_headless(one)]


def _rank(process: Process) -> int:
    words = list(process.words)
    for flag in ("--node-rank", "--node_rank"):
        if flag in words and (at := words.index(flag) + 1) < len(words) and words[at].isdecimal():
            return int(words[at])
        for word in words:
            if word.startswith(f"{flag}=") and word.partition("=")[2].isdecimal():
                return int(word.partition("=")[2])
    return 0


def _is_headless(process: Process) -> bool:
    """True if the process is a further part of a server that spans several hosts. The scenario's server is then read
    from the process on the first host.
    """
    _, flags = parsed(process.words)
    rank = flags.get("data-parallel-start-rank")
    return "headless" in flags or (isinstance(rank, str) and rank.isdecimal() and rank != "0")
