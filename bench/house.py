"""Measures the size of the code: python bench/house.py [REVISION ...]

Prints the numbers of files, lines, settings, flags, repeated class names and words; the docstrings that begin with a
preposition; import depth, imports against the layers and circles of imports; sizes of folders, files and functions; and
the files that one plain request visits. Prints them for this working tree and for each given revision, so that
`python bench/house.py 3f8fab7` shows before and after.
"""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"pdsim": "pdsim", "pdreal": "real/pdreal", "pdkernels": "kernels/pdkernels"}

REQUEST = """
import collections, json, sys, tempfile
from pathlib import Path
import pdsim

SCENARIO = '''
name: plain
model: qwen3-8b
page_size: 16
prefill: {gpu: h100}
decode: {gpu: h100}
workload: {use: random_lengths, num_requests: NUM, input_tokens: 1000, output_tokens: 100}
client: {use: open_loop, arrivals: {use: poisson, rate: 1/s}}
'''
HOME = str(Path(pdsim.__file__).parent)

def visits(num_requests):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plain.yaml"
        path.write_text(SCENARIO.replace("NUM", str(num_requests)))
        scenario = pdsim.load_scenario(path)
    moves, files, last = 0, collections.Counter(), None
    def watch(frame, event, _):
        nonlocal moves, last
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(HOME) or name == last:
            return
        moves, last = moves + 1, name
        files[name] += 1
    sys.setprofile(watch)
    try:
        pdsim.simulate(scenario)
    finally:
        sys.setprofile(None)
    return moves, files

few, some = visits(10)
many, more = visits(30)
print(json.dumps({"moves": (many - few) / 20, "files": sum(more[name] - some[name] >= 20 for name in more)}))
"""
"""Script that counts the files that one plain request visits. The difference between two runs leaves out work that is
done once per run. A file counts if every request enters it.
"""


GENERATED_PAGES = {"docs/accuracy.md", "docs/fields.md"}
"""Pages whose tables `make accuracy` and `make site` write."""

FLAGS = """
from pdsim.cli import app

commands = [name for name in app if not name.startswith("-")]
print(sum(len(app[name].assemble_argument_collection(parse_docstring=False)) for name in commands))
"""
"""Script that prints the number of arguments and flags of all commands."""

PREPOSITIONS = {
    "of",
    "what",
    "how",
    "by",
    "as",
    "in",
    "from",
    "with",
    "without",
    "for",
    "where",
    "when",
    "which",
    "who",
    "whose",
    "that",
    "to",
    "at",
    "on",
    "over",
    "under",
    "between",
    "beside",
    "until",
    "since",
    "if",
    "whether",
    "why",
    "one",
    "those",
    "such",
}


def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def num_lines(paths: list[Path]) -> int:
    return sum(path.read_text().count("\n") for path in paths)


def imports(root: Path) -> dict[str, set[str]]:
    """Returns, for each module, the modules of pdsim that are imported when this module is loaded."""
    modules = {}
    for path in python_files(root / "pdsim"):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        modules[name] = path
    return {name: set(_imported(ast.parse(path.read_text()).body, modules)) - {name} for name, path in modules.items()}


def _imported(nodes: Iterable[ast.AST], modules: Mapping[str, Path]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            inner = [name for name in submodules if name in modules]
            yield from inner or ([node.module] if node.module in modules else [])


def all_imports(root: Path) -> dict[str, set[str]]:
    """Returns, for each module, all modules of pdsim that it imports: at its head, for types only, or inside a
    function."""
    modules = {}
    for path in python_files(root / "pdsim"):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        modules[name] = path
    return {
        name: set(_imported(ast.walk(ast.parse(path.read_text())), modules)) - {name, "pdsim"}
        for name, path in modules.items()
        if name != "pdsim"
    }


def arrows_up(root: Path) -> list[tuple[str, str]]:
    """Returns imports of pdsim that go against the layers in pyproject.toml, or from one package of a layer to
    another."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    graph = all_imports(root)
    found = set()
    for contract in contracts:
        if contract["type"] != "layers":
            continue
        layers = [(room, floor) for floor, line in enumerate(contract["layers"]) for room in line.split(" | ")]

        def place(module: str, layers: list[tuple[str, int]] = layers) -> tuple[str, int] | None:
            return next((one for one in layers if f"{module}.".startswith(f"{one[0]}.")), None)

        for module, imported in graph.items():
            for other in imported:
                below, above = place(module), place(other)
                if below and above and below != above and above[1] <= below[1]:
                    found.add((module, other))
    return sorted(found)


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Returns sets of modules that import each other in a circle."""

    def reached(name: str) -> set[str]:
        found: set[str] = set()
        ahead = [name]
        while ahead:
            new = graph.get(ahead.pop(), set()) - found
            found |= new
            ahead += new
        return found

    behind = {name: reached(name) for name in graph}
    found: list[set[str]] = []
    for name in graph:
        circle = {other for other in behind[name] if name in behind[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


def folder_sizes(root: Path) -> Counter[str]:
    """Returns the number of Python files in each folder of pdsim, pdreal and pdkernels."""
    files = [path for folder in PACKAGES.values() for path in python_files(root / folder)]
    return Counter(path.parent.relative_to(root).as_posix() for path in files)


def file_lengths(root: Path) -> Counter[str]:
    """Returns the number of lines of each file of pdsim, pdreal and pdkernels."""
    files = [path for folder in PACKAGES.values() for path in python_files(root / folder)]
    return Counter({path.relative_to(root).as_posix(): num_lines([path]) for path in files})


def function_lengths(root: Path) -> Counter[str]:
    """Returns the number of lines of each function of pdsim, pdreal and pdkernels."""
    found: Counter[str] = Counter()
    for name in file_lengths(root):
        for node in ast.walk(ast.parse((root / name).read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                found[f"{name}:{node.name}"] = node.end_lineno - node.lineno + 1
    return found


def depth(graph: Mapping[str, set[str]]) -> int:
    """Returns the number of modules on the longest chain of imports."""
    longest: dict[str, int] = {}

    def chain(name: str, above: tuple[str, ...]) -> int:
        if name in above:
            return 0
        if name not in longest:
            longest[name] = 1 + max((chain(inner, (*above, name)) for inner in graph[name]), default=0)
        return longest[name]

    return max(chain(name, ()) for name in graph)


def settings(schema: Path) -> tuple[int, int]:
    """Returns the number of fields and the number of sections in a JSON schema, without those of faults."""
    content = json.loads(schema.read_text())
    sections = [content, *content.get("$defs", {}).values()]
    sizes = [len(section["properties"]) for section in sections if "properties" in section]
    return sum(sizes), len(sizes)


def num_words(root: Path, tracked: list[str]) -> int:
    """Number of words that people wrote in README and docs. Generated pages, printed output (code blocks), and the bars
    and rules of tables do not count.
    """
    pages = [name for name in tracked if name == "README.md" or re.fullmatch(r"docs/.*\.md", name)]
    pages = [name for name in pages if name not in GENERATED_PAGES]
    written = [
        re.sub(r"^```text\n.*?^```", "", (root / name).read_text(), flags=re.MULTILINE | re.DOTALL) for name in pages
    ]
    return sum(len(re.findall(r"\S*\w\S*", text)) for text in written)


def parsed(root: Path) -> list[ast.Module]:
    return [ast.parse(path.read_text()) for path in python_files(root / "pdsim")]


def num_repeated_names(trees: list[ast.Module]) -> int:
    """Returns the number of class names that several classes of pdsim have."""
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return sum(count > 1 for count in names.values())


def percent_prepositions(trees: list[ast.Module]) -> float:
    """Returns the percentage of docstrings, also of fields, that begin with a preposition or a relative word."""
    texts = [
        node.value.value.split()
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    first = [words[0].strip(",.:;").lower() for words in texts if words]
    return 100 * sum(word in PREPOSITIONS for word in first) / len(first)


def output(script: str, root: Path) -> Any:
    """Runs a Python script that imports the packages of the tree `root`. Returns the JSON that the script prints."""
    paths = ":".join(str(root / folder) for folder in (".", "real", "kernels"))
    command = [sys.executable, "-c", script]
    environment = {"PYTHONPATH": paths, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, check=False, cwd=root, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        sys.exit(
            f"bench/house.py: {sys.executable} cannot run pdsim; `make setup`, then `.venv/bin/python bench/house.py`"
        )
    return json.loads(done.stdout)


def measure(root: Path) -> dict[str, float]:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    tracked = [name for name in tracked if (root / name).is_file()]
    found: dict[str, float] = {}
    for package, folder in PACKAGES.items():
        files = python_files(root / folder)
        found[f"{package}: files"] = len(files)
        found[f"{package}: lines"] = num_lines(files)
    found["scenario: fields"], found["scenario: sections"] = settings(root / "pdsim.schema.json")
    found["pdsim: command flags"] = output(FLAGS, root)
    trees = parsed(root)
    found["pdsim: class names that stand twice"] = num_repeated_names(trees)
    found["pdsim: % docstrings with preposition"] = percent_prepositions(trees)
    found["pdsim: import depth"] = depth(imports(root))
    found["pdsim: imports against its layers"] = len(arrows_up(root))
    found["pdsim: modules in circles of imports"] = sum(map(len, circles(imports(root))))
    found["pdsim: the same, with types and calls"] = sum(map(len, circles(all_imports(root))))
    for title, sizes, limit in (
        ("folders: files", folder_sizes(root), 15),
        ("files: lines", file_lengths(root), 450),
        ("functions: lines", function_lengths(root), 70),
    ):
        found[f"{title}, most"] = max(sizes.values())
        found[f"{title}, over {limit}"] = sum(size > limit for size in sizes.values())
    request = output(REQUEST, root)
    found["a request: files visited"] = request["files"]
    found["a request: moves between files"] = request["moves"]
    found["docs: words"] = num_words(root, tracked)
    found["checkout: MB"] = sum((root / name).stat().st_size for name in tracked) / 1e6
    return found


def main() -> None:
    columns = {"now": measure(ROOT)}
    for revision in sys.argv[1:]:
        with TemporaryDirectory() as folder:
            tree = Path(folder) / "tree"
            subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, revision], cwd=ROOT, check=True)
            try:
                columns[revision] = measure(tree)
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    print(f"{'':38}" + "".join(f"{name:>12}" for name in columns))
    for row in columns["now"]:
        print(f"{row:38}" + "".join(f"{column[row]:>12,.0f}" for column in columns.values()))


if __name__ == "__main__":
    main()
