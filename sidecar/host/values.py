"""``dataclass`` as in the standard library, for classes that are loaded in a fraction of the time.

The standard one writes the source of six methods for each class and compiles it, in every process. A command loads some
150 such classes, and most of the time before its first byte was read went into that. Here the methods to compare, hash
and print are functions that all classes share, and only ``__init__`` is generated.

``frozen`` is a promise to the type checker, which holds it everywhere, tests included. At run time nothing stops an
assignment, so that an instance is also made faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    import dataclasses
    from functools import cache
    from operator import attrgetter
    from reprlib import recursive_repr

    def dataclass(*, frozen=False, slots=False, kw_only=False, eq=True):
        """Return a decorator like the standard one, with those of its options that are in use."""

        def decorate(cls):
            own = set(cls.__dict__)
            made = dataclasses.dataclass(eq=False, repr=False, slots=slots, kw_only=kw_only)(cls)
            if "__repr__" not in own:
                made.__repr__ = _repr
            if eq and "__eq__" not in own:
                made.__eq__ = _eq
                if "__hash__" not in own:
                    made.__hash__ = _hash if frozen else None
            return made

        return decorate

    @cache
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
