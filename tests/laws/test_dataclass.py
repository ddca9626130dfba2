"""Laws: pdsim's dataclass makes classes that behave like those of the standard library."""

import copy
import dataclasses
import pickle
from dataclasses import FrozenInstanceError, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdsim.dataclass

FIELDS = {
    "plain": (int, ...),
    "defaulted": (int, 7),
    "listed": (list, field(default_factory=list)),
    "hidden": (int, field(default=1, repr=False)),
    "uncompared": (int, field(default=2, compare=False)),
    "by_name": (int, field(kw_only=True)),
    "inner": (int, field(default=3, init=False)),
    "made": (tuple, field(default_factory=tuple, init=False)),
    "unset": (int, field(init=False, repr=False, compare=False)),
}
VALUES = {"listed": st.lists(st.integers(), max_size=2)}
HASHABLE = [name for name in FIELDS if name != "listed"]


def made_by(decorator, names, body=(), base=(), **options):
    members = {"__annotations__": {name: FIELDS[name][0] for name in names}, "__module__": __name__, **dict(body)}
    members |= {name: copy.copy(FIELDS[name][1]) for name in names if FIELDS[name][1] is not ...}
    return decorator(**options)(type("Made", base, members))


@st.composite
def pairs(draw):
    """Two classes, of pdsim and of the standard library, with the same fields and options, and words to construct."""
    frozen = draw(st.booleans())
    names = [name for name in FIELDS if draw(st.booleans()) and not (frozen and name == "listed")]
    options = {"frozen": frozen, **{name: draw(st.booleans()) for name in ("slots", "kw_only")}}
    of = [made_by(decorator, names, **options) for decorator in (pdsim.dataclass.dataclass, dataclasses.dataclass)]
    taken = [name for name in names if name not in {"inner", "made", "unset"}]
    words = st.fixed_dictionaries(
        {name: VALUES.get(name, st.integers(0, 2)) for name in taken if name in {"plain", "by_name"}},
        optional={name: VALUES.get(name, st.integers(0, 2)) for name in taken if name not in {"plain", "by_name"}},
    )
    return of, draw(words), draw(words)


@given(pairs())
def test_instances_look_compare_and_hash_as_those_of_the_standard_library(drawn):
    of, *words = drawn
    (ours, theirs), (other_ours, other_theirs) = ([cls(**one) for cls in of] for one in words)
    assert repr(ours) == repr(theirs)
    assert (ours == other_ours) == (theirs == other_theirs)
    assert ours != theirs
    assert (type(ours).__hash__ is None) == (type(theirs).__hash__ is None)
    if type(ours).__hash__:
        assert hash(ours) == hash(theirs)
    assert of[0].__match_args__ == of[1].__match_args__
    for twin in (copy.deepcopy(ours), copy.copy(ours)):
        assert twin == ours
    assert repr(dataclasses.replace(ours, **words[1])) == repr(dataclasses.replace(theirs, **words[1]))


@given(pairs(), st.lists(st.sampled_from(["extra", *FIELDS]), max_size=2, unique=True), st.integers(0, 3))
def test_constructors_refuse_the_same_words(drawn, names, num_by_place):
    of, *_ = drawn
    answers = []
    for cls in of:
        try:
            answers.append(repr(cls(*range(num_by_place), **dict.fromkeys(names, 1))))
        except TypeError as wrong:
            answers.append(str(wrong))
    assert answers[0] == answers[1]


@pdsim.dataclass.dataclass(frozen=True)
class Base:
    first: int

    def __post_init__(self):
        object.__setattr__(self, "doubled", 2 * self.first)


@dataclasses.dataclass(frozen=True)
class DerivedByTheirs(Base):
    second: int = 5


@pdsim.dataclass.dataclass(frozen=True)
class DerivedByOurs(Base):
    second: int = 5


class Calling(Base):
    def __init__(self):
        super().__init__(4)


@pdsim.dataclass.dataclass(frozen=True, slots=True)
class Slotted:
    first: int
    second: str = ""


@pytest.mark.parametrize("made", [Base(1), DerivedByOurs(1), DerivedByTheirs(1), Calling()])
def test_fields_of_frozen_classes_are_not_assigned(made):
    assert made.doubled == 2 * made.first
    with pytest.raises(FrozenInstanceError):
        made.first = 2
    with pytest.raises(FrozenInstanceError):
        del made.first


@pytest.mark.parametrize("made", [Base(1), DerivedByOurs(1, 2), DerivedByTheirs(1, 3), Slotted(1, "a")])
def test_instances_are_pickled(made):
    assert pickle.loads(pickle.dumps(made)) == made


def test_a_derived_class_is_as_frozen_as_its_base():
    for decorator in (pdsim.dataclass.dataclass, dataclasses.dataclass):
        with pytest.raises(TypeError, match="non-frozen"):
            decorator(type("Derived", (Base,), {}))


def test_threads_that_construct_a_class_first_at_once_get_the_constructor_of_that_class():
    base = made_by(pdsim.dataclass.dataclass, ["plain"], frozen=True)
    derived = made_by(pdsim.dataclass.dataclass, ["defaulted"], base=(base,), frozen=True)
    called_by_both = derived.__init__
    made = [derived.__new__(derived), derived.__new__(derived)]
    for one in made:
        called_by_both(one, 1, defaulted=2)
    assert made == [derived(1, defaulted=2)] * 2


def test_the_class_without_slots_that_mypyc_keeps_has_a_constructor_too():
    class Plain:
        number: int
        name: str = "none"

    made = pdsim.dataclass.dataclass(slots=True)(Plain)
    assert made is not Plain
    for one in (Plain, made, Plain, made):
        assert (one(3).number, one(3).name) == (3, "none")
