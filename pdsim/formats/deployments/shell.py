"""Reads shell scripts: their commands, the loops around each command, and here-documents."""

import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import dropwhile, takewhile
from math import prod
from pathlib import Path
from typing import NamedTuple

from pdsim.inputs import InputError


class Loop(NamedTuple):
    """A loop of a script."""

    text: str
    """The loop as the script has it, up to `do`. Empty: a group in braces, or a loop that is not recognized."""
    turns: int | None
    """Number of turns. None: not known."""
    variable: str
    """Name of the variable that a `for` loop sets. Empty: a loop of another kind."""
    end: str
    """The word that ends the loop: done, or } if the loop has braces in place of `do` and `done`."""


class Document(NamedTuple):
    """A here-document (<<EOF) of a script, with those variables replaced that the script sets before."""

    text: str
    target: str
    """File that the command writes the text to, as the command names it. Empty: none."""
    is_appended: bool
    """True: the command adds the text to the end of the file (>>)."""
    is_data: bool
    """True: the lines are no commands of a shell, and the text is not given to a command that stops servers."""


class Command(NamedTuple):
    """A command of a script."""

    number: int
    """Number of the line in which the command begins."""
    words: list[str]
    """The command's words, without keywords such as `do`, and without redirections."""
    variables: dict[str, str]
    """The command's environment variables that the script sets: values by name."""
    loops: tuple[Loop, ...]
    """The loops around the command, the outermost first."""
    document: Document | None
    """The here-document that the command reads. None: it reads none."""


def commands_of(text: str, where: str, names: Collection[str], is_imported: Callable[[str], bool]) -> Iterator[Command]:
    """Yields the commands of a script, also those in here-documents that a shell reads. where: names the script in
    messages. names: names of programs; a line with one of them must be a line of a shell, or InputError is raised.
    is_imported: tells whether the file with this name is read by itself; here-documents that write such a file are left
    out.
    """
    yield from _Script(where, names, is_imported).commands(text.splitlines(), 1)


def split_text(text: str) -> Iterator[list[str]]:
    """Yields the words of each command in a text. Raises ValueError if a line is no line of a shell."""
    lines, at = text.splitlines(), 0
    while at < len(lines):
        line, _, at = _whole_line(lines, at)
        yield from (_unmarked(_stripped(words)) for words, _ in _split(_marked(line, [])[0]))


class _Script:
    """A script that is read: the variables it has set so far, and the loops that have begun and not ended."""

    def __init__(self, where: str, names: Collection[str], is_imported: Callable[[str], bool]) -> None:
        self._where, self._names, self._is_imported = where, names, is_imported
        self._variables: dict[str, str] = {}
        self._exported: dict[str, str] = {}
        self._loops: list[Loop] = []
        """Also groups in braces, so that each end ends its own beginning."""
        self._header: list[str] = []
        """Words of a loop whose `do` has not come yet. Empty: there is no such loop."""

    def commands(self, lines: Sequence[str], first: int) -> Iterator[Command]:
        """Yields the commands in these lines, the first of which has the number `first`."""
        at = 0
        while at < len(lines):
            line, begun, at = _whole_line(lines, at)
            line = expanded(line, self._variables)
            self._variables |= _arrays(line)
            line, ends = _marked(line, lines[at:] if "<<" in line else [])
            bodies: list[tuple[int, list[str]]] = []
            for end in ends:
                body = list(takewhile(lambda one, end=end: one.strip() != end, lines[at:]))  # type: ignore[misc]
                bodies.append((first + at, body))
                at += len(body) + 1
            parts, is_line = self._parts(line, first + begun)
            for i, (words, sign) in enumerate(parts):
                read = next((bodies[int(word[1:])] for word in words if _is_document(word)), None)
                document = None if read is None else self._document(read[1], _pipeline(parts[i:]))
                for one in self._command(words, sign, first + begun, document):
                    yield one if is_line else one._replace(words=[])
                if read is not None and document is None:
                    yield from self.commands(read[1], read[0])

    def _parts(self, line: str, number: int) -> tuple[list[tuple[list[str], str]], bool]:
        """Returns (the commands as in `_split`, True). If the line is no line of a shell, such as the first line of a
        string of several lines: (its parts between signs such as semicolons, False).
        """
        try:
            return _split(line), True
        except ValueError as wrong:
            if any(name in line for name in self._names):
                raise InputError(f"{self._where}, line {number}: no line of a shell: {wrong}") from None
            return [(part.split(), ";") for part in re.split(r"[;&|]+", line) if part.strip()], False

    def _command(self, words: list[str], sign: str, number: int, document: Document | None) -> Iterator[Command]:
        is_conditional = words[:1] in (["then"], ["else"])
        words = _unmarked(self._behind_keywords(words, sign))
        own = _leading_variables(words)
        rest = words[len(own) :]
        is_export = rest[:1] == ["export"]
        own = _leading_variables(rest[1:]) if is_export else own
        is_setting = len(own) + is_export >= len(words)
        if is_conditional and (is_setting or is_export):
            own = {name: self._variables.get(name, value) for name, value in own.items()}
        if is_export:
            self._exported |= own
        if is_setting:
            self._variables |= own
            rest = []
        if rest or document is not None:
            loops = tuple(loop for loop in self._loops if loop.text)
            yield Command(number, rest, {**self._exported, **own}, loops, document)

    def _behind_keywords(self, words: list[str], sign: str) -> list[str]:
        """Begins and ends loops as the words say. Returns the words of the command that runs; empty: none. sign: what
        ends the command, such as a semicolon.
        """
        if self._header[:1] == ["for"]:
            if (header := " ".join(self._header)).count("(") > header.count(")"):  # inside for ((...)) or $(...)
                num_inside = len(list(takewhile(lambda word: word not in ("do", "{"), words)))
                self._header += [*words[:num_inside], sign]
                words = words[num_inside:]
            elif words[0] not in ("do", "{"):
                self._header = []
        words = _behind_names(_stripped(words))
        while words[:1] and words[0] in _KEYWORDS:
            if self._header and (words[0] == "do" or (words[0] == "{" and self._header[0] == "for")):
                self._loops.append(_loop(self._header, _ENDS[words[0]]))
                self._header = []
            elif words[0] in _ENDS:
                self._loops.append(Loop("", 1, "", _ENDS[words[0]]))
            words = _behind_names(_stripped(words[1:]))
        if words[:1] in (["done"], ["}"]):
            self._end(words[0])
            return []
        at = next((i for i, word in enumerate(words) if _begins_loop(word, is_first=i == 0)), None)
        if at is None:
            return words
        kind, behind = re.split(r"[(`]", words[at])[-1], words[at + 1 :]
        if kind == "for" and _FOR.match(" ".join(behind)) is None:
            return words
        self._header = [kind, *behind, sign]
        if kind == "for":
            self._variables.pop(_variable_of(self._header), None)
        return [] if kind == "for" else behind

    def _end(self, word: str) -> None:
        """Ends the innermost loop or group that ends with this word, unless a loop inside it has not ended."""
        at = max((i for i, loop in enumerate(self._loops) if loop.end == word), default=len(self._loops))
        if not any(loop.text for loop in self._loops[at + 1 :]):
            del self._loops[at:]

    def _document(self, lines: Sequence[str], words: Sequence[str]) -> Document | None:
        """The here-document with these lines. None: a shell reads the lines as commands. words: the words of the
        command that reads the here-document, and of the commands that its output is piped to.
        """
        called = [word.rsplit("/", 1)[-1] for word in re.findall(r"[^\s;&|<>()'\"]+", " ".join(words))]
        names = set(called)
        target = _target(words, names)
        is_script = Path(target).suffix not in _DATA if target else not names & _READ_DATA
        if target and self._is_imported(target):
            return Document("", "", is_appended=False, is_data=False)
        if is_script or names & _SHELLS:
            return None
        text = expanded("\n".join(lines) + "\n", self._variables)
        is_appended = any(word.startswith(f"{_MARK}>>") for word in words) or "tee -a" in " ".join(called)
        return Document(text, target.removeprefix("./"), is_appended, is_data=_subcommand(called) not in _STOPS)


_SHELLS = {"bash", "sh", "zsh", "dash", "ksh", "ssh", "sbatch", "srun"}
_RUN_DATA = {"kubectl", "oc", "helm", "docker", "podman", "python", "python3", "jq"}
"""Programs that read no commands from a here-document, unless they start a shell. Their output is not the document."""
_READ_DATA = {*_RUN_DATA, "cat", "tee"}
"""Programs that read no commands from a here-document, unless they start a shell or write a script."""
_STOPS = {"delete", "down", "diff", "uninstall"}
"""Subcommands that start nothing of the manifest that they read."""
_MANAGERS = {"kubectl", "oc", "helm", "docker", "podman"}
"""Programs with such subcommands."""
_DATA = {".yaml", ".yml", ".json", ".jsonl", ".toml", ".ini", ".cfg", ".conf", ".env", ".txt", ".md", ".py", ".jinja"}
"""Suffixes of files that have no commands of a shell."""


def _subcommand(words: Sequence[str]) -> str:
    """What a manager of containers is called to do, such as apply. Empty: the words call none. Options before it have
    a value behind them, unless they are written with =.
    """
    behind = iter(list(dropwhile(lambda word: word not in _MANAGERS, words))[1:])
    for word in behind:
        if word[0] != "-":
            if word != "compose":
                return word
        elif "=" not in word:
            next(behind, None)
    return ""


def _target(words: Sequence[str], names: Collection[str]) -> str:
    """The file that the commands write a here-document to. Empty: none. words: of a command and those that its output
    is piped to. names: these words without folders.
    """
    if "tee" in words:
        return next((word for word in words[words.index("tee") + 1 :] if word[:1] not in ("-", _MARK)), "")
    files = [word[1:].lstrip(">") for word in words if word.startswith(f"{_MARK}>")]
    return files[0] if files and not _RUN_DATA & set(names) else ""


def _whole_line(lines: Sequence[str], at: int) -> tuple[str, int, int]:
    """Returns (the next line of a script, its index, the index of the line behind). at: index to begin with. A line
    that ends with a backslash is joined with the lines that follow. Lines that are only a comment are left out.
    """
    begun, parts = at, list[str]()
    while at < len(lines):
        line = lines[at]
        at += 1
        if line.lstrip().startswith("#"):
            continue
        begun = begun if parts else at - 1
        if not line.rstrip().endswith("\\"):
            parts.append(line)
            break
        parts.append(line.rstrip()[:-1])
    return " ".join(parts), begun, at


_SPECIAL = re.compile(
    r"""(?P<text>'[^']*'|"(?:\\.|[^"\\])*"|\\.|\(\([^()]*\)\))"""
    r"""|(?<![^\s;&|(])(?P<comment>\#.*)"""
    r"""|(?<!<)<<(?!<)-?\s*["'\\]?(?P<end>[\w.-]+)["']?"""
    r"""|(?P<stream>(?<!\S)\d|&)?(?<![=<>-])(?P<sign>>{1,2})\s*(?P<file>&\d|"""
    r"""(?:'[^']*'|"[^"]*"|\$\(\([^()]*\)\)|\$\([^()]*\)|[<>]\([^()]*\)|[^\s;&|'"()])+)"""
)
"""Strings and numbers ((...)), which stay as they are, comments, here-documents, and redirections of output."""


_MARK = "\0"
"""Begins words that stand for redirections. Scripts do not have this character."""
_IN_STRINGS = str.maketrans("()", "\1\2")
"""Characters that stand for parentheses in strings, which are no subshells. Scripts do not have these characters."""
_OF_STRINGS = str.maketrans("\1\2", "()")


def _marked(line: str, rest: Sequence[str]) -> tuple[str, list[str]]:
    """Returns (the line, the end words of its here-documents). In the line, the word 0 behind _MARK stands for the
    first here-document, 1 for the next; >FILE or >>FILE behind _MARK for output to a file; parentheses in strings are
    those of _IN_STRINGS; comments and other redirections are left out. rest: the lines that follow.
    """
    ends: list[str] = []

    def plain(found: re.Match[str]) -> str:
        if found["end"] and any(one.strip() == found["end"] for one in rest):
            ends.append(found["end"])
            return f" {_MARK}{len(ends) - 1} "
        if found["file"]:
            name = found["file"].replace(" ", "") if "$(" in found["file"] else found["file"]
            is_output = found["stream"] in (None, "1") and name[0] not in "&<>" and name != "/dev/null"
            return f" {_MARK}{found['sign']}{name} " if is_output else " "
        is_string = found["text"] and found[0][0] != "("
        return "" if found["comment"] else found[0].translate(_IN_STRINGS) if is_string else found[0]

    return _SPECIAL.sub(plain, line.replace("for((", "for ((")), ends


def _is_document(word: str) -> bool:
    return word[:1] == _MARK and word[1:].isdecimal()


def _unmarked(words: Sequence[str]) -> list[str]:
    """The words with the script's own parentheses in strings."""
    return [word.translate(_OF_STRINGS) for word in words]


def _split(line: str) -> list[tuple[list[str], str]]:
    """The commands of a line from `_marked`, each with the sign behind it, such as a semicolon. Raises ValueError if
    the line is no line of a shell.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    lexer.commenters = ""
    found: list[tuple[list[str], str]] = []
    words: list[str] = []
    for word in [*lexer, ";"]:
        if not word or word.strip(";&|"):
            words.append(word)
        elif words:
            found.append((words, word))
            words = []
    return found


def _stripped(words: Sequence[str]) -> list[str]:
    """The words of a command without redirections, without here-documents, and without the parentheses of a subshell
    around the command.
    """
    words = [word for word in words if word[:1] != _MARK]
    if words:
        words[0] = words[0].lstrip("(")
        unpaired = sum(word.count(")") - word.count("(") for word in words)
        while words[-1].endswith(")") and unpaired > 0:
            words[-1], unpaired = words[-1][:-1], unpaired - 1
    return [word for i, word in enumerate(words) if word or 0 < i < len(words) - 1]


def _pipeline(parts: Sequence[tuple[list[str], str]]) -> list[str]:
    """The words of the first command of `parts`, and of the commands that its output is piped to. parts: commands of a
    line, each with the sign behind it, such as a semicolon.
    """
    num_piped = len(list(takewhile(lambda part: part[1] in ("|", "|&"), parts)))
    return [word for words, _ in parts[: num_piped + 1] for word in words]


_LOOPS = {"for", "while", "until", "select"}
_KEYWORDS = {"do", "then", "else", "{", "(", "!", "time"}
"""Words that may precede a command."""
_ENDS = {"do": "done", "{": "}"}
"""Words that end what these words begin."""
_FOR = re.compile(r"\w+$|\w+ in\b|\(\(")
"""What follows `for` at the beginning of a loop. Other text follows a `for` that is a word of a sentence."""
_COUNTED = re.compile(r"for\s*\(\(.*?\b(\w+)\s*=\s*(\d+)[^;]*;\s*\1\s*<(=?)\s*(\d+)\s*;(.*?)\)\)")
_ARRAY = re.compile(r"\bread\s+-r?a\w*\s+(\w+)\s+<<<\s+\"?([^\"$]+)\"?")
_LIST = re.compile(r"^\s*(\w+)=\(([^)$]*)\)")


def _behind_names(words: list[str]) -> list[str]:
    """The words of a command without the name of a function that begins (NAME() or function NAME), and without the
    pattern of a `case` before it (WORD or case WORD in PATTERN).
    """
    words = words[3:] if words[:1] == ["case"] and words[2:3] == ["in"] else words
    if words[:1] == ["function"]:
        words = [f"{''.join(words[1:2]).removesuffix('()')}()", *words[2:]]
    if words[1:2] and words[1] in ("()", "(){"):
        words = ["".join(words[:2]), *words[2:]]
    if (function := re.fullmatch(r"[^\s()=]+\(\)(\{?)", "".join(words[:1]))) is not None:
        return [*filter(None, [function[1]]), *words[1:]]
    is_pattern = len(words) > 1 and words[0].endswith(")") and "(" not in words[0] and words[0] not in ("done)", "})")
    return words[1:] if is_pattern else words


def _begins_loop(word: str, *, is_first: bool) -> bool:
    """True if the word begins a loop, such as `for` or $(for. is_first: the word is the first of its command."""
    inside = re.split(r"[(`]", word)
    return inside[-1] in _LOOPS and (is_first or len(inside) > 1)


def _loop(header: Sequence[str], end: str) -> Loop:
    """The loop with the words `header` before its `do`; the last word is a sign such as a semicolon. end: Loop.end."""
    words = _unmarked(header[:-1])
    text = " ".join(words).replace(" ;", ";")
    if words[0] != "for":
        return Loop(text, None, "", end)
    return Loop(text, _num_turns(words, text), _variable_of(words), end)


def _variable_of(words: Sequence[str]) -> str:
    """Name of the variable that a `for` loop with these words sets. Empty: none."""
    return next(iter(re.findall(r"\w+", " ".join(words[1:]))), "")


def _num_turns(words: Sequence[str], text: str) -> int | None:
    """How often a `for` loop runs; None: not known. words: those before its `do`. text: the words, joined."""
    if (counted := _COUNTED.match(text)) is not None:
        name, first, or_equal, last, changes = counted.groups()
        step = re.search(rf"\b{name}\s*(?:\+=|=\s*{name}\s*\+)\s*(\d+)|\b{name}\+\+|\+\+{name}\b", changes)
        return None if step is None else _num_values(int(first), int(last) + bool(or_equal), int(step[1] or 1))
    if words[2:3] != ["in"]:
        return None
    over = " ".join(words[3:])
    if (known := re.fullmatch(r"\$\{!?\w+\[@\]\}=(\d+)", over)) is not None:
        return int(known[1])
    if (seq := re.fullmatch(r"(?:\$\(|`)\s*seq\s+(?:(\d+)\s+(?:(\d+)\s+)?)?(\d+)\s*[)`]", over)) is not None:
        return _num_values(int(seq[1] or 1), int(seq[3]) + 1, int(seq[2] or 1))
    if (braces := re.fullmatch(r"\{(\d+)\.\.(\d+)(?:\.\.(\d+))?\}", over)) is not None:
        first_value, last_value = sorted(map(int, braces.groups()[:2]))
        return _num_values(first_value, last_value + 1, int(braces[3] or 1))
    return None if re.search(r"[$`*?{\[]", over) else max(1, len(words[3:]))


def _num_values(first: int, end: int, step: int) -> int:
    """Number of values from `first` to below `end`, at least 1."""
    return max(1, len(range(first, end, max(1, step))))


def _arrays(line: str) -> dict[str, str]:
    """Lengths of the arrays that the line sets, by "NAME[@]". `expanded` finds them by this name."""
    if (found := _ARRAY.search(line)) is not None:
        return {f"{found[1]}[@]": str(len([one for one in re.split(r"[,\s]+", found[2]) if one]))}
    if (found := _LIST.match(line)) is not None:
        return {f"{found[1]}[@]": str(len(found[2].split()))}
    return {}


def _leading_variables(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        if not re.match(r"[A-Za-z_]\w*=", word) or re.search(r"=\$\((?!.*\))", word):
            break
        name, _, value = word.partition("=")
        found[name] = value
    return found


_SUM = re.compile(r"\$\(\(([\w$*\s]+)\)\)")
_ALL_OF = re.compile(r"\$\{!?(\w+)\[@\]\}")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")


def expanded(text: str, variables: Mapping[str, str]) -> str:
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
