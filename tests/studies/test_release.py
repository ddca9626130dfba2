"""What a release moves is said (experiments/conformance/release.py)."""

from importlib import import_module
from pathlib import Path

import pytest

RULE = {"rule": "a refuses b", "at": "engine/args.py:2", "finds": "assert b"}


@pytest.fixture
def release(monkeypatch):
    monkeypatch.syspath_prepend(str(Path("experiments/conformance")))
    return import_module("release")


@pytest.fixture
def package(tmp_path):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "args.py").write_text("import a\nassert b\n")
    return tmp_path


def test_a_rule_that_stands_is_not_named(release, package):
    assert release.refusal_moves(package, [RULE]) == ([], [])


def test_a_rule_on_another_line_is_a_note(release, package):
    gone, elsewhere = release.refusal_moves(package, [{**RULE, "at": "engine/args.py:1"}])
    assert gone == []
    assert "stands on line 2 of engine/args.py, no longer on 1" in elsewhere[0]


@pytest.mark.parametrize("change", [{"finds": "assert c"}, {"at": "engine/old.py:2"}])
def test_a_rule_without_its_text_or_its_file_is_gone(release, package, change):
    gone, elsewhere = release.refusal_moves(package, [{**RULE, **change}])
    assert len(gone) == 1
    assert elsewhere == []


def test_flags_move_if_they_take_less(release):
    kept = {"--same": "1", "--old": "0", "--few": "1 a|b", "--many": "1 a", "--list": "1"}
    found = {"--same": "1", "--few": "1 a", "--many": "1 a|b", "--list": "+", "--new": "1"}
    moved, more = release.flag_moves(kept, found)
    assert moved == ["--old is gone.", "--few no longer takes b.", "--list took 1 values, and takes +."]
    assert more == ["--many takes b, too."]


def test_defaults_move_if_they_differ(release):
    assert release.default_moves({"--a": "1", "--b": "2", "--gone": "3"}, {"--a": "1", "--b": "4"}) == [
        "The default of --b was 2, and is 4."
    ]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_rules_were_written_for_one_release(release, engine):
    program = release.SERVERS[engine]
    flags, defaults = (release.kept_lines(f"engine_{what}.txt", program) for what in ("flags", "defaults"))
    assert flags[0] == defaults[0]
    assert {*flags[1]} <= {*defaults[1], "--model", "--help"} | {name for name in flags[1] if "no-" in name}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_loads_of_every_kind_are_driven(release, engine):
    kinds = {name.rpartition("-")[0] for name in release.first_loads(engine, 1)}
    assert len(kinds) == len(release.first_loads(engine, 1))
    assert len(release.first_loads(engine, 2)) == 2 * len(kinds)
    assert kinds >= ({"drawn", "drawn-prefill", "drawn-decode"} if engine == "sglang" else {"", "prefill", "decode"})


@pytest.mark.parametrize(
    ("required", "found"),
    [
        (["transformers==5.19.0"], "transformers==5.19.0"),
        (["transformers<5.21,>=5.16; python_version > '3.9'"], "transformers<5.21,>=5.16"),
        (["transformers==4; extra == 'old'", "torch"], "transformers"),
        (["transformers-stream==1"], "transformers"),
    ],
)
def test_packages_have_the_versions_that_the_wheel_asks_for(release, tmp_path, required, found):
    info = tmp_path / "wheel" / "sglang-9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("".join(f"Requires-Dist: {one}\n" for one in required))
    assert release.Wheel("sglang", "9", tmp_path).wanted("transformers") == found
