"""What a user wrote reaches a program byte by byte: through shells, Kubernetes and comments."""

import os
import re
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdsim.cli import main
from pdsim.launch import ENGINES
from pdsim.launch.manifests import app_name
from pdsim.launch.words import Expanded, command_words, comment, container_word
from pdsim.scenario.yaml_file import ConfigError, parse_yaml
from tests.cli.test_commands import output
from tests.launch.sample import PAIR, WITHOUT, scenario

PROGRAMS = ("python", "vllm", "vllm-router", "aiperf", "pdsim")
RECORD = """\
#!{python} -S
import os, sys
with open(os.environ["RECORD"], "ab") as file:
    file.write(b"\\0".join(map(os.fsencode, [os.path.basename(sys.argv[0]), *sys.argv[1:]])) + b"\\0\\n\\0")
"""
HOSTILE = (
    "a-$(touch PWNED)", "`touch PWNED`", "'; touch PWNED; '", '"$(touch PWNED)"', "a\ntouch PWNED\n", "$HOST0", "$0 $@",
    "a b  c", "*", "~", "!!", "-x", "--help", "#", "\\", "é\u2028touch PWNED", "$(NAMESPACE)", "$$", "{{7*7}}", "&lt;",
)  # fmt: skip
words = st.sampled_from(HOSTILE) | st.text(st.characters(codec="utf-8", exclude_characters="\0/\\"), min_size=1)
PLACEHOLDERS = {"name": "NAME-OF-SCENARIO", "model": "PATH-OF-MODEL", "source": "FILE-OF-SCENARIO"}


def made_of(engine, name, model, source):
    """A launch on several hosts where the engine can, so that the commands have variables too."""
    changes = [(section, None) for section in WITHOUT[engine]]
    named = scenario(*changes, ("prefill.instances", "5")).model_copy(update={"name": name})
    return ENGINES[engine](named, [source, "--set", source], model)


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bin")
    for program in PROGRAMS:
        stub = folder / program
        stub.write_text(RECORD.format(python=sys.executable))
        stub.chmod(0o755)
    return folder


def run(script, stubs, folder):
    """Runs a script under sh; returns the words of each program that it called."""
    record = folder / "record"
    record.write_bytes(b"")
    hosts = {f"HOST{i}": f"host-{i}" for i in range(4)}
    before = set(folder.iterdir())
    environment = {"PATH": str(stubs), "RECORD": str(record), **hosts}
    subprocess.run(["/bin/sh"], input=script.encode(), env=environment, cwd=folder, check=True)
    assert set(folder.iterdir()) == before
    calls = record.read_bytes().split(b"\0\n\0")[:-1]
    return [[os.fsdecode(word) for word in call.split(b"\0")] for call in calls]


def apart(called):
    """Flags apart from the values that are joined to them."""
    return [part for word in called for part in (word.split("=", 1) if re.match(r"--[a-z-]+=-", word) else [word])]


def filled(word, given):
    for field, placeholder in PLACEHOLDERS.items():
        word = word.replace(placeholder, given[field])
    return word


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "kubernetes"])
@settings(max_examples=8, deadline=None)
@given(name=words, model=words, source=words)
@example(name=HOSTILE[0], model=HOSTILE[4], source=HOSTILE[2])
@example(name="$HOST0", model="$HOST1", source="-x")
def test_a_shell_hands_on_each_word_unchanged(engine, stubs, tmp_path_factory, name, model, source):
    """The stubs alone are called, with the words of a harmless launch in which the hostile ones stand."""
    given_words = {"name": name, "model": model, "source": source}
    folder = tmp_path_factory.mktemp("run")
    plain, hostile = made_of(engine, **PLACEHOLDERS), made_of(engine, **given_words)
    expected = run("\n".join(plain.commands.values()), stubs, folder)
    found = run("\n".join(hostile.commands.values()) + "\n" + "".join(map(comment, hostile.notes)), stubs, folder)
    assert len(expected) == len(plain.commands)
    assert [apart(call) for call in found] == [[filled(word, given_words) for word in call] for call in expected]


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "kubernetes"])
def test_what_is_printed_may_be_run_as_a_script(engine, stubs, tmp_path, capsys):
    plain = PAIR.replace(", staging: {ring: 1 GiB}", "").replace("health: {}\n", "")
    (tmp_path / "pair.yaml").write_text(plain.replace("name: pair", r'name: "a; touch PWNED; $(touch PWNED)"'))
    shown = output(capsys, "launch", tmp_path / "pair.yaml", "--engine", engine, "--model-path", "a\ntouch PWNED")
    calls = run(shown, stubs, tmp_path)
    assert {call[0] for call in calls} <= set(PROGRAMS)


def kubernetes_expands(word, variables):
    """The rule of Kubernetes for commands (third_party/forked/golang/expansion/expand.go), written down again."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)",
        lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]),
        word,
    )


@given(words)
@example("$(NAMESPACE)$$(NAMESPACE)$")
def test_kubernetes_hands_on_each_word_unchanged(word):
    variables = {"NAMESPACE": "default"}
    assert kubernetes_expands(container_word(word), variables) == word
    assert kubernetes_expands(container_word(Expanded("$(NAMESPACE)")), variables) == "default"


def containers(node):
    """Words that each container of a manifest starts with."""
    if isinstance(node, dict):
        if "image" in node:
            yield [*node["command"], *node.get("args", [])]
        node = list(node.values())
    for one in node if isinstance(node, list) else ():
        yield from containers(one)


@pytest.mark.parametrize("engine", ["kubernetes", "dynamo", "dynamo-vllm"])
@settings(max_examples=6, deadline=None)
@given(name=words, model=words)
@example(name="$(NAMESPACE)", model="a: $(NAMESPACE) $$\n---\n")
@example(name="\x85", model="a\u2028b")
def test_manifests_hand_on_each_word_unchanged(engine, name, model):
    """YAML reads back what was written, no name breaks its structure, and containers get the words as they are."""
    given_words = {"name": name, "model": model, "source": "s.yaml"}
    plain, hostile = made_of(engine, **PLACEHOLDERS), made_of(engine, **given_words)
    for file, text in plain.manifests.items():
        expected = [parse_yaml(one, file) for one in text.split("---\n")]
        found = [parse_yaml(one, file) for one in re.split(r"^---\n", hostile.manifests[file], flags=re.MULTILINE)]
        assert [one["kind"] for one in found] == [one["kind"] for one in expected]
        for one, twin in zip(found, expected, strict=True):
            assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", one["metadata"]["name"])
            assert one["metadata"]["labels"]["app"] == app_name(name)
            got = [apart([kubernetes_expands(word, {}) for word in command]) for command in containers(one)]
            apps = (app_name(PLACEHOLDERS["name"]), app_name(name))
            assert got == [
                [filled(kubernetes_expands(word, {}).replace(*apps), given_words) for word in command]
                for command in containers(twin)
            ]


@given(st.text(min_size=1))
def test_names_of_kubernetes_begin_with_a_letter_and_end_as_labels_do(name):
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", app_name(name))


@pytest.mark.parametrize("word", ["a\0b", "\udcff"])
def test_a_word_that_no_command_line_holds_is_refused(word):
    with pytest.raises(ConfigError, match="no command line holds this word"):
        command_words(["program"], [("flag", word)])


def test_a_model_path_that_looks_like_a_flag_is_refused(capsys, tmp_path):
    (tmp_path / "pair.yaml").write_text(PAIR)
    with pytest.raises(SystemExit) as ended:
        main(["launch", str(tmp_path / "pair.yaml"), "--model-path=-x"])
    assert ended.value.code == 2
    assert "write ./-x" in capsys.readouterr().err
