"""What others wrote is read within limits; what is beyond them is told, and never taken."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.inputs import InputError, finite, parse_json, parse_yaml, read_text, shown, whole

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"n": ' * 50_000, "nested too deeply"),
        ("1" * 5000, "more than 4300 digits"),
        ('{"n": Infinity}', "Infinity is no finite number"),
        ('{"n": NaN}', "NaN is no finite number"),
        ('{"n": -1e999}', "-1e999 is no finite number"),
        ('{\n"n": }', "line 2: not JSON: Expecting value at column 6"),
    ],
)
def test_json_beyond_the_limits_is_refused(text, said):
    with pytest.raises(InputError, match=r"^here.*" + said):
        parse_json(text, "here")


def test_other_tools_may_write_infinity():
    assert parse_json('{"rate": Infinity}', "here", has_infinity=True) == {"rate": float("inf")}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LAUGHS, "its aliases stand for .* values; at most 1,000,000 are read"),
        ("a: &a [*a]", "a YAML alias refers to a value that contains the alias"),
        ("n: " + "1" * 5000, "4300"),
        ("[" * 1200, "nested too deeply"),
        ("at: 2020-13-45", "not YAML"),
    ],
)
def test_yaml_beyond_the_limits_is_refused(text, said):
    with pytest.raises(InputError, match=said):
        parse_yaml(text, "here")


def test_only_regular_files_of_some_size_are_read(tmp_path):
    with pytest.raises(InputError, match="a device or a pipe"):
        read_text(Path("/dev/zero"))
    (tmp_path / "big").write_text("12345")
    with pytest.raises(InputError, match="has 5 bytes"):
        read_text(tmp_path / "big", most_bytes=4)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inside: st.lists(inside, max_size=20) | st.dictionaries(st.text(), inside, max_size=20),
)


@given(ANYTHING)
def test_a_value_is_shown_in_few_lines(value):
    assert len(shown(value)) < 20_000


def test_an_integer_that_python_does_not_print():
    assert shown({"n": 10**5000}) == "a dict too long to print"


@given(ANYTHING)
def test_numbers_are_numbers_or_refused(value):
    for read in (whole, finite):
        try:
            found = read(value)
        except ValueError:
            continue
        assert not isinstance(value, bool)
        assert found == (float(value) if isinstance(value, str) and read is finite else type(found)(value))


@pytest.mark.parametrize("value", [True, 3.7, "3.7", "inf", float("inf"), "1e999", "x", "", None, [], "1" * 5000])
def test_what_is_no_whole_number(value):
    with pytest.raises(ValueError):
        whole(value)


def test_who_changes_what_was_read_changes_nothing_of_the_next_reader():
    """Short texts are remembered."""
    parse_yaml("a: [1]", "x")["a"].append(2)
    assert parse_yaml("a: [1]", "x") == {"a": [1]}
