"""``dataclass`` as in the standard library, for classes that cost next to nothing until they are used, and little then.

The standard one writes the source of six methods for each class and compiles it, in every process. A command loads some
250 such classes and makes a few instances of a few dozen; most of the time before its first byte was read went into that.
Here the methods to compare, hash and print are functions that all classes share. So is the one that makes the first
instances; only a class with many of them gets an ``__init__`` of its own, which is faster and takes long to compile. The
fields of a class are listed when somebody asks for them.

``frozen`` and ``slots`` are promises to the type checker, which holds them everywhere, tests included. At run time
nothing stops an assignment, so that an instance is also made faster.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, List, Tuple

MANY = 50
"""To compile an ``__init__`` takes about as long as to make so many instances without."""

if TYPE_CHECKING:
    from dataclasses import MISSING as MISSING
    from dataclasses import dataclass as dataclass
    from dataclasses import field as field
    from dataclasses import is_dataclass as is_dataclass

    def list_fields(kind: type) -> List[Tuple[str, Any, Any]]: ...
else:
    # The module ``dataclasses`` is loaded by who needs it: it loads another ten.
    from _thread import RLock
    from functools import lru_cache
    from operator import attrgetter
    from reprlib import recursive_repr

    _FIELDS = "__dataclass_fields__"
    _TAKEN_OVER = ("__dataclass_params__", "__match_args__", _FIELDS, "__init__")
    """What a class gets from the standard ``dataclass``, where that makes it."""
    MISSING = object()
    """In place of a default that a field does not have."""
    _completing = RLock()

    class _Default:
        """What ``field`` says of a field."""

        def __init__(self, default, default_factory):
            self.default, self.default_factory, self.init = default, default_factory, True

    def field(*, default=MISSING, default_factory=MISSING):
        """Give a field a default like the standard function, with those of its options that the program uses."""
        return _Default(default, default_factory)

    def is_dataclass(kind):
        """Return whether this is a class that was decorated here."""
        return isinstance(kind, type) and any(_FIELDS in base.__dict__ for base in kind.__mro__)

    @lru_cache(maxsize=None)
    def list_fields(kind):
        """Return the fields of a class: the name of each, its default, and what makes one."""
        rows = {}
        for base in kind.__mro__[::-1]:
            rows.update((row[0], row[:3]) for row in _list_rows(base.__dict__.get(_FIELDS, {})))
        return list(rows.values())

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
            self._kw_only = kw_only
            self._with_init = with_init
            self._found = None

        def __get__(self, instance, owner):
            return self.complete().__dict__[_FIELDS]

        def make_first(self):
            """Return the ``__init__`` of the first instances: for arguments that are right it does what the compiled one
            does, and for all others that one is made, which says what is wrong with them."""
            filling, count = None, 0

            def __init__(instance, /, *args, **values):  # noqa: N807 - it becomes the method of a class
                nonlocal filling, count
                if filling is None:
                    filling = _Filling(self)
                count += 1
                if count > MANY or not filling.fill(instance.__dict__, args, values):
                    self.complete(compiled=True).__init__(instance, *args, **values)
                elif filling.has_more:
                    instance.__post_init__()

            return __init__

        def read(self):
            """Return the annotations of the class itself, and what it gives its fields: values, or ``field(…)``."""
            with _completing:
                if self._found is None:
                    cls = self._cls
                    # Those of this class alone, from Python 3.8 on.
                    names = cls.__dict__.get("__annotations__")  # noqa: RUF063
                    names = cls.__annotations__ if names is None else names
                    self._found = names, {name: getattr(cls, name) for name in names if hasattr(cls, name)}
                return self._found

        def list_own(self):
            """Yield a row for each field that the class itself declares: name, default, factory, whether it is an argument,
            and whether that has to be named."""
            names, given = self.read()
            for name, kind in names.items():
                if "ClassVar" in str(kind):
                    continue
                value = given.get(name, MISSING)
                if _is_field(value):
                    yield (name, *_read_field(value), self._kw_only)
                else:
                    yield name, value, MISSING, True, self._kw_only

        def complete(self, compiled=False):
            """List the fields of the class, and if that is asked for compile its ``__init__``. Return the class.

            The standard ``dataclass`` works on a twin: another thread may make instances meanwhile, and must never see
            a class without ``__init__``.
            """
            import dataclasses

            cls = self._cls
            with _completing:
                if cls.__dict__[_FIELDS] is not self and not compiled:
                    return cls
                names, given = self.read()
                given = {name: _make_standard(value, dataclasses) for name, value in given.items()}
                space = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": "-"}
                space.update(given, __annotations__=names)
                if hasattr(cls, "__post_init__"):
                    space["__post_init__"] = cls.__post_init__
                above = {}
                for base in cls.__mro__[:0:-1]:
                    above.update(getattr(base, _FIELDS) if _FIELDS in base.__dict__ else {})
                parent = type("_", (), {_FIELDS: above, "__dataclass_params__": _NotFrozen})
                options = {"kw_only": True} if self._kw_only else {}  # Python 3.8 does not know it
                made = dataclasses.dataclass(eq=False, repr=False, init=compiled and self._with_init, **options)(
                    type("_", (parent,), space)
                )
                for name in names:
                    if _is_field(cls.__dict__.get(name)):
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

    class _Filling:
        """How the attributes of an instance are set without an ``__init__`` of its class's own."""

        def __init__(self, incomplete):
            rows = {}
            for base in incomplete._cls.__mro__[:0:-1]:
                rows.update((row[0], row) for row in _list_rows(base.__dict__.get(_FIELDS, {})))
            rows.update((row[0], row) for row in incomplete.list_own())
            self._template, self._factories, self._order = {}, [], []
            self._names, self._needed = set(), set()
            for name, default, factory, is_argument, is_named in rows.values():
                if is_argument:
                    self._names.add(name)
                    if not is_named:
                        self._order.append(name)
                    if default is MISSING and factory is MISSING:
                        self._needed.add(name)
                if factory is not MISSING:
                    self._factories.append((name, factory))
                if is_argument or default is not MISSING or factory is not MISSING:
                    self._template[name] = default
            self.has_more = hasattr(incomplete._cls, "__post_init__")

        def fill(self, attributes, args, values):
            """Set the attributes, in the order of the fields. Return whether the arguments were right."""
            if args:
                if len(args) > len(self._order) or not values.keys().isdisjoint(self._order[: len(args)]):
                    return False
                values = {**dict(zip(self._order, args)), **values}
            if not self._needed <= values.keys() or not values.keys() <= self._names:
                return False
            attributes.update(self._template)
            for name, factory in self._factories:
                if name not in values:
                    attributes[name] = factory()
            attributes.update(values)
            return True

    def _list_rows(fields):
        """Return what ``list_own`` says, of a class whose fields may be listed already."""
        if isinstance(fields, _Incomplete):
            return fields.list_own()
        return [
            (one.name, *_read_field(one), getattr(one, "kw_only", False))
            for one in fields.values()
            if one._field_type is sys.modules["dataclasses"]._FIELD
        ]

    def _is_field(value):
        """Return whether a class gives one of its fields a default by ``field``: this one, or the standard one."""
        standard = sys.modules.get("dataclasses")
        return isinstance(value, _Default) or (standard is not None and isinstance(value, standard.Field))

    def _read_field(value):
        """Return the default of a field, what makes one, and whether it is an argument."""
        if isinstance(value, _Default):
            return value.default, value.default_factory, True
        none = sys.modules["dataclasses"].MISSING
        default, factory = (MISSING if one is none else one for one in (value.default, value.default_factory))
        return default, factory, value.init

    def _make_standard(value, dataclasses):
        """Return what the standard ``dataclass`` takes for this."""
        if not isinstance(value, _Default):
            return value
        if value.default_factory is not MISSING:
            return dataclasses.field(default_factory=value.default_factory)
        return dataclasses.field(default=dataclasses.MISSING if value.default is MISSING else value.default)

    @lru_cache(maxsize=None)
    def _list_compared(cls):
        import dataclasses

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
        import dataclasses

        shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
        return f"{self.__class__.__qualname__}({', '.join(shown)})"
