"""The decorator `dataclass` of the standard library, for programs that define hundreds of classes and use few of them.

The standard library compiles up to six methods of a class when the class is defined. Here a constructor is compiled
when it is first called, and all classes share the other methods: a command starts in 0.25 CPU s instead of 0.38
(experiments/speed), together with fewer imports. mypy sees the standard library's decorator. A class does not show its
signature before the first call.

Assigning to a field of a frozen class raises, unless the class has slots and is derived from no other dataclass: then
mypy alone forbids the assignment, and the constructor takes a third of the time. `order`, `unsafe_hash` and `InitVar`
are not supported.
"""

import dataclasses
from dataclasses import MISSING, FrozenInstanceError, fields
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, NoReturn

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls=None, /, *, init=True, repr=True, eq=True, frozen=False, kw_only=False, slots=False):
        def decorated(plain):
            is_derived = hasattr(plain, "__dataclass_fields__")
            plain.__doc__ = plain.__doc__ or plain.__name__  # the standard library would write its signature
            methods = {"__repr__": _repr} if repr else {}
            methods |= {"__eq__": _eq, "__hash__": _hash if frozen else None} if eq else {}
            if frozen and not slots and not is_derived:
                methods |= {"__setattr__": _refuse, "__delattr__": _refuse}
            for name, method in methods.items():
                if vars(plain).get(name) is None:
                    setattr(plain, name, method)
            generated = {"init": False, "repr": False, "eq": False, "frozen": frozen and is_derived}
            made = dataclasses.dataclass(**generated, kw_only=kw_only, slots=slots)(plain)
            made.__dataclass_params__.frozen = frozen  # classes derived from it must be as frozen
            if init and "__init__" not in vars(plain):
                for one in {plain, made}:  # mypyc keeps the class that it compiled, not the second one that has slots
                    one.__init__ = _first_call(one)
            return made

        return decorated if cls is None else decorated(cls)


def _first_call(cls: Any) -> Any:
    """Returns a temporary __init__ for a dataclass. Its first call compiles the real __init__, stores the real one in
    the class, and calls it. Several threads may make the first call at the same time.
    """

    def compiling(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__ = _constructor(cls)
        cls.__init__(self, *args, **kwargs)

    return compiling


def _constructor(cls: Any) -> Any:
    assignment = "self.{} = {}" if cls.__setattr__ is object.__setattr__ else "_assign(self, '{}', {})"
    known: dict[str, Any] = {"_assign": object.__setattr__, "_MISSING": MISSING}
    first: list[str] = ["self"]
    by_keyword: list[str] = []
    body: list[str] = []
    for one in fields(cls):
        name = parameter = value = one.name
        if one.default is not MISSING:
            known[f"_default_{name}"] = one.default
            parameter, made = f"{name}=_default_{name}", f"_default_{name}"
        elif one.default_factory is not MISSING:
            known[f"_make_{name}"] = one.default_factory
            parameter, made = f"{name}=_MISSING", f"_make_{name}()"
            value = f"{made} if {name} is _MISSING else {name}"
        if one.init:
            (by_keyword if one.kw_only else first).append(parameter)
            body.append(assignment.format(name, value))
        elif parameter != name:
            body.append(assignment.format(name, made))
    body += ["self.__post_init__()"] if hasattr(cls, "__post_init__") else []
    declared = ", ".join([*first, *["*"][: len(by_keyword)], *by_keyword])
    exec(f"def __init__({declared}):\n {'; '.join(body) or 'pass'}", known)
    known["__init__"].__qualname__ = f"{cls.__qualname__}.__init__"
    return known["__init__"]


@recursive_repr()
def _repr(self: Any) -> str:
    shown = (f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _eq(self: Any, other: Any) -> bool:
    return _compared(self) == _compared(other) if other.__class__ is self.__class__ else NotImplemented


def _hash(self: Any) -> int:
    return hash(_compared(self))


def _compared(self: Any) -> tuple[Any, ...]:
    names = _COMPARED.get(type(self))
    if names is None:
        names = _COMPARED[type(self)] = tuple(one.name for one in fields(self) if one.compare)
    return tuple([getattr(self, name) for name in names])


_COMPARED: dict[type, tuple[str, ...]] = {}
"""For each class: the names of the fields that `==` compares."""


def _refuse(self: Any, name: str, *_value: Any) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")
