"""Our ``dataclass`` is the standard one in everything but the time that it takes to define."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import field
from typing import ClassVar

import pytest

from ringfence.model import values


@values.dataclass(frozen=True, slots=True)
class Ours:
    """Ours."""

    kind: ClassVar[str] = "value"
    a: int
    b: str = "x"
    c: list[int] = field(default_factory=list, repr=False)

    @property
    def double(self) -> int:
        return self.a * 2


@dataclasses.dataclass(frozen=True, slots=True)
class Theirs:
    """Theirs."""

    kind: ClassVar[str] = "value"
    a: int
    b: str = "x"
    c: list[int] = field(default_factory=list, repr=False)

    @property
    def double(self) -> int:
        return self.a * 2


@values.dataclass(frozen=True, slots=True)
class Hashable:
    """One field only."""

    a: int


@values.dataclass(frozen=True, slots=True)
class Checked:
    """Refuses in ``__post_init__``."""

    a: int

    def __post_init__(self) -> None:
        if self.a < 0:
            raise ValueError("negative")


def test_as_the_standard_one():
    for cls in (Ours, Theirs):
        one = cls(1)
        assert (one.a, one.b, one.c, one.double, cls.kind) == (1, "x", [], 2, "value")
        assert cls(1).c is not cls(1).c
        assert one == cls(a=1, b="x", c=[])
        assert one != cls(2)
        assert one != (1, "x", [])
        assert repr(one) == f"{cls.__qualname__}(a=1, b='x')"
        assert dataclasses.asdict(one) == {"a": 1, "b": "x", "c": []}
        assert dataclasses.replace(one, b="y") == cls(1, "y")
        assert [f.name for f in dataclasses.fields(cls)] == ["a", "b", "c"]
        assert dataclasses.is_dataclass(cls)
        assert pickle.loads(pickle.dumps(one)) == one
        assert copy.deepcopy(one) == one
        assert cls.__slots__ == ("a", "b", "c")
        assert cls.__match_args__ == ("a", "b", "c")
        assert not hasattr(one, "__dict__")
        match one:
            case cls(a, b):
                assert (a, b) == (1, "x")


def test_frozen():
    for one in (Ours(1), Theirs(1)):
        with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'a'"):
            one.a = 2  # type: ignore[misc]
        with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'a'"):
            del one.a
    with pytest.raises(dataclasses.FrozenInstanceError):  # the standard one of Python 3.11 stumbles here
        Ours(1).new = 1  # type: ignore[attr-defined]


def test_wrong_arguments():
    for cls in (Ours, Theirs):
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
            cls()
        with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
            cls(1, z=1)


def test_hashes():
    assert hash(Hashable(1)) == hash(Hashable(1))
    assert len({Hashable(1), Hashable(1), Hashable(2)}) == 2
    with pytest.raises(TypeError, match="unhashable"):
        hash(Ours(1))


def test_post_init():
    assert Checked(1).a == 1
    with pytest.raises(ValueError, match="negative"):
        Checked(-1)


def test_no_other_kind():
    with pytest.raises(TypeError):
        values.dataclass(frozen=False, slots=True)
