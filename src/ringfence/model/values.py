"""``dataclass`` for frozen, slotted values, defined three times faster than by the standard library.

``ringfence run`` defines some forty value classes before it does anything, and the standard decorator
compiles six functions for each: 0.7 ms a class, half of all that we import. Here only ``__init__`` is
compiled; the other methods are shared. Everything else is as in :mod:`dataclasses` (``fields``, ``replace``,
``asdict``, matching, pickling, the errors), which still reads the class body; type checkers see the real one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    import dataclasses
    from operator import attrgetter

    def dataclass(*, frozen, slots):
        """As ``dataclasses.dataclass(frozen=True, slots=True)``; no other kind, and no inherited fields."""
        if not (frozen and slots):
            raise TypeError("only frozen, slotted values; use the standard dataclass for others")
        return _define

    def _define(cls):
        plain = dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
        names = tuple(field.name for field in dataclasses.fields(plain))
        body = {key: item for key, item in cls.__dict__.items() if key not in names}
        body.pop("__dict__", None)
        body.pop("__weakref__", None)
        body["__slots__"] = names
        body.setdefault("__repr__", _repr)
        body.setdefault("__eq__", _eq)
        body.setdefault("__hash__", _hash)
        body |= {
            "__setattr__": _refuse_to_set,
            "__delattr__": _refuse_to_delete,
            "__getstate__": _get_state,
            "__setstate__": _set_state,
            "_values": property(attrgetter(*names)) if names else (),
        }
        made = type(cls)(cls.__name__, cls.__bases__, body)
        made.__init__ = _init_of(made, dataclasses.fields(plain))
        return made

    def _init_of(cls, fields):
        scope = {}
        arguments, lines = ["self"], []
        for number, field in enumerate(fields):
            name = field.name
            scope[f"_set{number}"] = cls.__dict__[name].__set__  # the slot's own: __setattr__ is shut
            if field.default_factory is not dataclasses.MISSING:
                scope[f"_new{number}"] = field.default_factory
                scope["_missing"] = dataclasses.MISSING
                arguments.append(f"{name}=_missing")
                lines.append(f" _set{number}(self, _new{number}() if {name} is _missing else {name})")
                continue
            if field.default is not dataclasses.MISSING:
                scope[f"_default{number}"] = field.default
                arguments.append(f"{name}=_default{number}")
            else:
                arguments.append(name)
            lines.append(f" _set{number}(self, {name})")
        if hasattr(cls, "__post_init__"):
            lines.append(" self.__post_init__()")
        source = f"def __init__({', '.join(arguments)}):\n" + ("\n".join(lines) or " pass")
        exec(source, scope)  # noqa: S102 - our own class bodies, as the standard library does it
        init = scope["__init__"]
        init.__qualname__ = f"{cls.__qualname__}.__init__"
        return init

    def _repr(self):
        shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
        return f"{type(self).__qualname__}({shown})"

    def _eq(self, other):
        if other.__class__ is not self.__class__:
            return NotImplemented
        return self._values == other._values

    def _hash(self):
        return hash(self._values)

    def _refuse_to_set(self, name, value):
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def _refuse_to_delete(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    def _get_state(self):
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    def _set_state(self, state):
        for field, item in zip(dataclasses.fields(self), state, strict=True):
            object.__setattr__(self, field.name, item)
