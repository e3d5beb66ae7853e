"""``dataclass`` as in the standard library, for classes that cost next to nothing until they are used.

The standard one writes the source of six methods for each class and compiles it, in every process. A command loads some
250 such classes and makes instances of a few dozen; most of the time before its first byte was read went into the others.
Here the methods to compare, hash and print are functions that all classes share, and a class is completed (its fields
listed, its ``__init__`` generated) when its first instance is made or its fields are asked for.

``frozen`` and ``slots`` are promises to the type checker, which holds them everywhere, tests included. At run time
nothing stops an assignment, so that an instance is also made faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    import dataclasses
    from _thread import RLock
    from functools import lru_cache
    from operator import attrgetter
    from reprlib import recursive_repr

    _FIELDS = "__dataclass_fields__"
    _TAKEN_OVER = ("__dataclass_params__", "__match_args__", _FIELDS, "__init__")
    """What a completed class gets from the standard ``dataclass``; ``__init__`` last, for it says that all is there."""
    _completing = RLock()

    def dataclass(*, frozen=False, slots=False, kw_only=False, eq=True, repr=True):
        """Return a decorator like the standard one, with those of its options that are in use."""

        def decorate(cls):
            own = set(cls.__dict__)
            incomplete = _Incomplete(cls, kw_only, "__init__" not in own)
            setattr(cls, _FIELDS, incomplete)
            if "__init__" not in own:
                cls.__init__ = incomplete.make_first()
            if repr and "__repr__" not in own:
                cls.__repr__ = _repr
            if eq and "__eq__" not in own:
                cls.__eq__ = _eq
                if "__hash__" not in own:
                    cls.__hash__ = _hash if frozen else None
            return cls

        return decorate

    class _Incomplete:
        """The fields of a class that are not listed yet: whoever asks the class for them gets the true ones."""

        def __init__(self, cls, kw_only, with_init):
            self._cls = cls
            self._options = {"kw_only": True} if kw_only else {}  # Python 3.8 does not know it
            self._with_init = with_init

        def __get__(self, instance, owner):
            return self.complete().__dict__[_FIELDS]

        def make_first(self):
            """Return the ``__init__`` of the first instance, which completes the class."""
            complete = self.complete

            def __init__(self, *args, **values):  # noqa: N807 - it becomes the method of a class
                complete().__init__(self, *args, **values)

            return __init__

        def complete(self):
            """Complete the class and return it.

            The standard ``dataclass`` works on a twin: another thread may make instances meanwhile, and must never see
            a class without ``__init__``.
            """
            cls = self._cls
            with _completing:
                if cls.__dict__[_FIELDS] is not self:
                    return cls
                names = cls.__dict__.get("__annotations__")  # noqa: RUF063 - those of this class alone, from Python 3.8 on
                space = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": ""}
                space["__annotations__"] = names = cls.__annotations__ if names is None else names
                above = {}
                for base in cls.__mro__[:0:-1]:
                    above.update(getattr(base, _FIELDS) if _FIELDS in base.__dict__ else {})
                space.update({name: getattr(cls, name) for name in [*names, "__post_init__"] if hasattr(cls, name)})
                parent = type("_", (), {_FIELDS: above, "__dataclass_params__": _NotFrozen})
                made = dataclasses.dataclass(eq=False, repr=False, init=self._with_init, **self._options)(
                    type("_", (parent,), space)
                )
                for name in names:
                    if isinstance(cls.__dict__.get(name), dataclasses.Field):
                        if name in made.__dict__:
                            setattr(cls, name, made.__dict__[name])
                        else:
                            delattr(cls, name)
                for name in _TAKEN_OVER:
                    if name in made.__dict__:
                        setattr(cls, name, made.__dict__[name])
            return cls

    class _NotFrozen:
        frozen = False

    @lru_cache(maxsize=None)
    def _list_compared(cls):
        names = [field.name for field in dataclasses.fields(cls) if field.compare]
        return attrgetter(*names) if names else lambda instance: ()

    def _eq(self, other):
        if other.__class__ is not self.__class__:
            return NotImplemented
        values = _list_compared(self.__class__)
        return values(self) == values(other)

    def _hash(self):
        return hash(_list_compared(self.__class__)(self))

    @recursive_repr()
    def _repr(self):
        shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
        return f"{self.__class__.__qualname__}({', '.join(shown)})"
