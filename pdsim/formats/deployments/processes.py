"""Reads which commands a deployment runs, from scripts, manifests and values of charts."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, fields, replace
from itertools import dropwhile
from math import prod
from pathlib import Path
from typing import Any

from pdsim.dataclass import dataclass
from pdsim.formats.deployments.containers import Pods, containers_of, engine_of_image
from pdsim.formats.deployments.readers import parsed
from pdsim.inputs import MOST_YAML_BYTES, InputError, parse_yaml, parse_yaml_documents, read_text

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
    uncounted: str = ""
    """A `for` loop around the command whose number of turns is not known, so that it counts as one turn. Empty: there
    is no such loop.
    """


def read_processes(path: Path) -> list[Process]:
    """The processes that a file starts. Empty: the file starts no known program. Raises InputError if the file, a
    manifest in it, or a file that --config names cannot be read, or if a line with a known program is no line of a
    shell.
    """
    text = read_text(path)
    is_manifest = path.suffix in (".yaml", ".yml", ".json")
    found = _of_manifests(text, str(path)) if is_manifest else _of_script(text, str(path))
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


def _of_script(text: str, where: str) -> Iterator[Process]:
    variables: dict[str, str] = {}
    exported: dict[str, str] = {}
    loops: list[tuple[int, str]] = []
    texts = dict(_written(text))
    for number, line in _whole_lines(_without_data(text)):
        begun = [_turns(loop) for loop in _loops_in(_expanded(line, variables))]
        variables |= _arrays(_expanded(line, variables))
        for command in _commands(_expanded(line, variables), f"{where}, line {number}"):
            words = list(dropwhile(_BEFORE_LOOPS.__contains__, command))
            if not words:
                continue
            if words[0] in _LOOPS:
                loops.append(begun.pop(0) if words[0] == "for" and begun else (1, ""))
            if words[0] == "done" and loops:
                loops.pop()
            own = _leading_variables(words)
            rest = words[len(own) :]
            if rest[:1] == ["export"]:
                own = _leading_variables(rest[1:])
                exported |= own
            if len(own) + (rest[:1] == ["export"]) >= len(words):
                variables |= own
            elif (found := program_in(rest)) is not None:
                program, behind = found
                line_of_it, environment = f"{where}, line {number}", {**exported, **own}
                written = {_expanded(name, variables): _expanded(one, variables) for name, one in texts.items()}
                replicas, uncounted = prod(turns for turns, _ in loops), next((loop for _, loop in loops if loop), "")
                yield Process(line_of_it, program, behind, written, uncounted, variables=environment, replicas=replicas)
    for _, manifest in _data_in(text):
        with suppress(InputError):
            yield from _of_manifests(_expanded(manifest, variables), f"{where}, here-document")


_HERE_DOCUMENT = re.compile(r"^([^\n#]*?)<<-?\s*['\"]?(\w+)['\"]?([^\n]*)\n(.*?)^\s*\2\s*$", re.MULTILINE | re.DOTALL)
_TARGET = re.compile(r"(?:>|\btee)\s*(?:-a\s+)?['\"]?([^\s;&|>'\"]+)")


def _written(text: str) -> Iterator[tuple[str, str]]:
    """Yields name and text of each file that a script writes as a here-document."""
    for before, _, behind, inside in _HERE_DOCUMENT.findall(text):
        if (target := _TARGET.search(f"{before} {behind}")) is not None:
            yield target[1].removeprefix("./"), inside


_SHELLS = {"bash", "sh", "zsh", "dash", "ksh", "ssh", "sbatch", "srun"}
_READ_DATA = {"cat", "tee", "kubectl", "oc", "helm", "docker", "podman", "python", "python3", "jq"}
"""Programs that read no commands from a here-document, unless they start a shell or write a script."""
_DATA = {".yaml", ".yml", ".json", ".jsonl", ".toml", ".ini", ".cfg", ".conf", ".env", ".txt", ".md", ".py", ".jinja"}
"""Suffixes of files that have no commands of a shell."""


def _data_in(text: str) -> Iterator[tuple[slice, str]]:
    """Yields the place and the text of each here-document of a script whose lines are no commands of a shell."""
    for found in _HERE_DOCUMENT.finditer(text):
        line = f"{found[1]} {found[3]}"
        words = {_base(word) for word in re.findall(r"[^\s;&|<>()'\"]+", line)}
        target = _TARGET.search(line)
        is_data = words & _READ_DATA if target is None else Path(target[1]).suffix in _DATA
        if is_data and not words & _SHELLS:
            yield slice(*found.span(4)), found[4]


def _without_data(text: str) -> str:
    """The script, in which the lines of here-documents that are no commands are empty."""
    for place, inside in _data_in(text):
        text = text[: place.start] + re.sub(r"[^\n]", " ", inside) + text[place.stop :]
    return text


_LOOPS = {"for", "while", "until", "select"}
_BEFORE_LOOPS = {"do", "then", "else", "{", "(", "!", "time"}
"""Words that may precede a loop in a command."""
_FOR = re.compile(r"(?:^|[;&|({]|\b(?:do|then|else|time)\b)\s*(?=for\b)")
_LOOP = re.compile(r"for\s+\w+\s+in\s+(.*?)\s*(?:;\s*do\b.*)?$")
_COUNTED = re.compile(r"for\s*\(\(.*?\b(\w+)\s*=\s*(\d+)[^;]*;\s*\1\s*<(=?)\s*(\d+)\s*;(.*?)\)\)")
_ARRAY = re.compile(r"\bread\s+-r?a\w*\s+(\w+)\s+<<<\s+\"?([^\"$]+)\"?")
_LIST = re.compile(r"^\s*(\w+)=\(([^)$]*)\)")


def _loops_in(line: str) -> list[str]:
    """The rest of a script's line from each `for` loop that begins in it."""
    return [line[found.end() :] for found in _FOR.finditer(line)]


def _turns(loop: str) -> tuple[int, str]:
    """Returns (number of turns of a `for` loop, ""). If the number is not known: (1, the loop as the script has it).
    loop: the script's line, from `for`.
    """
    known = _num_runs(loop)
    return (1, re.split(r"\s*;?\s*\bdo\b", loop)[0].strip()) if known is None else (known, "")


def _num_runs(loop: str) -> int | None:
    """How often a `for` loop of a script runs; None: not known. loop: the script's line, from `for`."""
    if (counted := _COUNTED.match(loop)) is not None:
        name, first, or_equal, last, changes = counted.groups()
        step = re.search(rf"\b{name}\s*(?:\+=|=\s*{name}\s*\+)\s*(\d+)|\b{name}\+\+|\+\+{name}\b", changes)
        return None if step is None else _num_values(int(first), int(last) + bool(or_equal), int(step[1] or 1))
    if (listed := _LOOP.match(loop)) is None:
        return None
    over = listed[1].strip().strip('"')
    if (known := re.fullmatch(r"\$\{!?\w+\[@\]\}=(\d+)", over)) is not None:
        return int(known[1])
    if (seq := re.fullmatch(r"\$\(seq\s+(?:(\d+)\s+(?:(\d+)\s+)?)?(\d+)\)", over)) is not None:
        return _num_values(int(seq[1] or 1), int(seq[3]) + 1, int(seq[2] or 1))
    if (braces := re.fullmatch(r"\{(\d+)\.\.(\d+)(?:\.\.(\d+))?\}", over)) is not None:
        first_value, last_value = sorted(map(int, braces.groups()[:2]))
        return _num_values(first_value, last_value + 1, int(braces[3] or 1))
    return None if re.search(r"[$`*?]", over) else max(1, len(over.split()))


def _num_values(first: int, end: int, step: int) -> int:
    """Number of values from `first` to below `end`, at least 1."""
    return max(1, len(range(first, end, max(1, step))))


def _arrays(line: str) -> dict[str, str]:
    """Lengths of the arrays that the line sets, by "NAME[@]". `_expanded` finds them by this name."""
    if (found := _ARRAY.search(line)) is not None:
        return {f"{found[1]}[@]": str(len([one for one in re.split(r"[,\s]+", found[2]) if one]))}
    if (found := _LIST.match(line)) is not None:
        return {f"{found[1]}[@]": str(len(found[2].split()))}
    return {}


def _whole_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields the lines of a text, each with its number. A line that ends with a backslash is joined with the lines that
    follow, and has the number of the first of them. Lines that are only a comment are left out.
    """
    begun, parts = 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            continue
        begun = begun or number
        if line.rstrip().endswith("\\"):
            parts.append(line.rstrip()[:-1])
            continue
        yield begun, " ".join([*parts, line])
        begun, parts = 0, []
    if parts:
        yield begun, " ".join(parts)


_SUM = re.compile(r"\$\(\(([\w$*\s]+)\)\)")
_ALL_OF = re.compile(r"\$\{!?(\w+)\[@\]\}")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """The text with shell variables replaced. $NAME and ${NAME} become the variable's value, and $((A * B)) becomes the
    product if both numbers are known. ${NAME:-DEFAULT} becomes DEFAULT if `variables` lacks NAME. ${NAME[@]} stays, but
    gets =LENGTH behind it if the array's length is known. All other variables stay unchanged.
    """

    def value(found: re.Match[str]) -> str:
        name, default, bare = found.groups()
        known = variables.get(name or bare, default)
        return found.group() if known is None else known

    def length(found: re.Match[str]) -> str:
        known = variables.get(f"{found[1]}[@]")
        return found.group() if known is None else f"{found.group()}={known}"

    text = _SUM.sub(lambda found: _product(found, variables), text)
    return _VARIABLE.sub(value, _ALL_OF.sub(length, text))


def _product(found: re.Match[str], variables: Mapping[str, str]) -> str:
    """The value of $((A * B)), if A and B are numbers or variables with numbers. Otherwise the unchanged text."""
    factors = [variables.get(one.lstrip("$"), one) for one in re.split(r"\s*\*\s*", found[1].strip())]
    return str(prod(map(int, factors))) if all(one.isdecimal() for one in factors) else found.group()


_REDIRECTION = re.compile(r"(?<=\s)(?:\d|&)?>{1,2}\s*(?:&\d|[^\s;&|]+)")
_ENDS = {";", "&&", "||", "|", "&", ";;"}


def _commands(line: str, where: str) -> Iterator[list[str]]:
    """Yields the commands of a line, each as a list of words."""
    lexer = shlex.shlex(_REDIRECTION.sub(" ", line), posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words: list[str] = []
    try:
        for word in lexer:
            if word in _ENDS:
                yield from [words] if words else []
                words = []
            else:
                words.append(word)
    except ValueError as wrong:
        if any(name[-1] in line for name in PROGRAMS):
            raise InputError(f"{where}: no line of a shell: {wrong}") from None
        return
    if words:
        yield words


def _leading_variables(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        if not re.match(r"[A-Za-z_]\w*=", word):
            break
        name, _, value = word.partition("=")
        found[name] = value
    return found


def program_in(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """The first known program among the words, and the words that follow. A word may contain a whole command. None:
    there is none.
    """
    for at in range(len(words)):
        for starts in _BY_LENGTH:
            if [*map(_base, words[at : at + len(starts)])] == [*starts]:
                return PROGRAMS[starts], list(words[at + len(starts) :])
    for word in words:
        if " " in word or "\n" in word:
            for _, line in _whole_lines(word):
                for inner in _commands(line, ""):
                    if (found := program_in(inner)) is not None:
                        return found
    return _in_image(words)


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
        _expanded(re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), word), variables)
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
