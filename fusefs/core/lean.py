"""What a swap or a sweep needs of the standard library's Python, without what that loads.

A type checker sees the standard library's own. Whatever the two load takes these from here, and so may others;
tests/unit/test_lean.py holds them against what they stand for (docs/decisions/0045).
"""

from __future__ import annotations

__all__ = [
    "SIGINT", "SIGKILL", "SIG_IGN", "TYPE_CHECKING", "Callable", "Enum", "ExitStack", "Generic", "NamedTuple",
    "NewType", "Protocol", "TypeVar", "cache", "contextmanager", "partial", "signal", "suppress",
]  # fmt: skip

TYPE_CHECKING = False
"""As typing's: a type checker takes whatever has this name for true."""

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack, contextmanager, suppress
    from enum import Enum
    from functools import cache, partial
    from signal import SIG_IGN, SIGINT, SIGKILL, signal
    from typing import Generic, NamedTuple, NewType, Protocol, TypeVar
else:
    from _collections_abc import Callable
    from _functools import partial
    from _signal import SIG_IGN, SIGINT, SIGKILL, signal

    try:
        from _collections import _tuplegetter
    except ImportError:  # another Python than CPython

        def _tuplegetter(number, doc):
            return property(lambda self: self[number], doc=doc)

    _FEW = 8
    """Values of a class before a function is compiled for it, which takes as long as a hundred of them."""

    class Generic:
        """Nothing, of whatever types."""

        __slots__ = ()

        def __class_getitem__(cls, _types):
            return cls

    Protocol = Generic

    def TypeVar(_name, **_limits):  # noqa: N802
        """Any type."""
        return object

    def NewType(_name, kind):  # noqa: N802
        """The type itself."""
        return kind

    def cache(function):
        """What a function returned when it was called first with such values."""
        found = {}

        def call(*values):
            if values not in found:
                found[values] = function(*values)
            return found[values]

        call.cache_clear = found.clear
        return call

    class _Tuple(tuple):
        """What all that are written as a NamedTuple have."""

        __slots__ = ()

        def __new__(cls, /, *values, **named):
            """One of a class's first ones."""
            rest = cls._fields[len(values) :]
            told = {**cls._field_defaults, **named} if rest else named
            is_whole = len(values) <= len(cls._fields) and named.keys() <= set(rest) <= told.keys()
            if is_whole and next(cls._few, None) is not None:
                return tuple.__new__(cls, (*values, *[told[one] for one in rest]))
            return _compiled(cls)(cls, *values, **named)

        @classmethod
        def _make(cls, values):
            new = tuple.__new__(cls, values)
            if len(new) != len(cls._fields):
                raise TypeError(f"Expected {len(cls._fields)} arguments, got {len(new)}")
            return new

        def _replace(self, /, **named):
            new = tuple.__new__(type(self), map(named.pop, self._fields, self))
            if named:
                raise ValueError(f"Got unexpected field names: {list(named)!r}")
            return new

        def _asdict(self):
            return dict(zip(self._fields, self, strict=True))

        def __repr__(self):
            return f"{type(self).__name__}({', '.join(map('{}={!r}'.format, self._fields, self))})"

        def __getnewargs__(self):
            return tuple(self)

    def _compiled(cls):
        """A class's own function, as collections.namedtuple has it: where there are millions, nothing is as fast."""
        listed = ", ".join(cls._fields)
        make = eval(f"lambda cls, {listed}: new(cls, ({listed},))", {"new": tuple.__new__})
        make.__defaults__ = tuple(cls._field_defaults.values())
        cls.__new__ = staticmethod(make)
        return make

    class _NamedTupleMaker(type):
        """Makes a subclass of tuple of each class that is written as one of NamedTuple."""

        def __new__(cls, name, bases, namespace):
            if not bases:
                return super().__new__(cls, name, bases, namespace)
            fields = tuple(namespace.get("__annotations__", ()))
            namespace["_field_defaults"] = {one: namespace[one] for one in fields if one in namespace}
            namespace["_fields"] = namespace["__match_args__"] = fields
            namespace["_few"] = iter(range(_FEW))
            namespace["__slots__"] = ()
            namespace.update({one: _tuplegetter(number, "") for number, one in enumerate(fields)})
            return type(name, (_Tuple,), namespace)

    class NamedTuple(metaclass=_NamedTupleMaker):
        """As typing.NamedTuple. A class gets a compiled function of its own when it proves to make many."""

        __slots__ = ()

    class _EnumMaker(type):
        """Makes members of what a class body names."""

        def __new__(cls, name, bases, namespace):
            made = super().__new__(cls, name, bases, namespace)
            made._member_map_ = {}
            made._value2member_map_ = {}
            for key, value in namespace.items():
                if not key.startswith("_") and not hasattr(value, "__get__"):
                    member = object.__new__(made)
                    member.name = member._name_ = key
                    member.value = member._value_ = value
                    made._member_map_[key] = made._value2member_map_[value] = member
                    setattr(made, key, member)
            return made

        def __call__(cls, value):
            """The member with a value."""
            if type(value) is cls:
                return value
            try:
                return cls._value2member_map_[value]
            except (KeyError, TypeError):
                raise ValueError(f"{value!r} is not a valid {cls.__qualname__}") from None

        def __getitem__(cls, name):
            return cls._member_map_[name]

        def __iter__(cls):
            return iter(cls._member_map_.values())

        def __len__(cls):
            return len(cls._member_map_)

        def __contains__(cls, value):
            return type(value) is cls

    class Enum(metaclass=_EnumMaker):
        """As enum.Enum, of members whose values differ."""

        def __repr__(self):
            return f"<{type(self).__name__}.{self.name}: {self.value!r}>"

        def __str__(self):
            return f"{type(self).__name__}.{self.name}"

        def __reduce_ex__(self, _protocol):
            return type(self), (self.value,)

    class suppress:  # noqa: N801
        """As contextlib.suppress."""

        def __init__(self, *kinds):
            self._kinds = kinds

        def __enter__(self):
            pass

        def __exit__(self, kind, _error, _trace):
            return kind is not None and issubclass(kind, self._kinds)

    class _Block:
        """What `contextmanager` makes of a generator."""

        def __init__(self, steps):
            self._steps = steps

        def __enter__(self):
            for entered in self._steps:
                return entered
            raise RuntimeError("generator didn't yield")

        def __exit__(self, kind, error, trace):
            if kind is None:
                for _step in self._steps:
                    raise RuntimeError("generator didn't stop")
                return False
            try:
                self._steps.throw(error)
            except StopIteration as end:
                return end is not error
            except BaseException as raised:
                # A StopIteration that the generator does not catch comes back as the cause of another error.
                if raised is error or (isinstance(error, StopIteration) and raised.__cause__ is error):
                    error.__traceback__ = trace
                    return False
                raise
            raise RuntimeError("generator didn't stop after throw()")

    def contextmanager(function):
        """As contextlib.contextmanager, for blocks alone."""

        def begin(*values, **named):
            return _Block(function(*values, **named))

        begin.__doc__ = function.__doc__
        return begin

    class ExitStack:
        """As contextlib.ExitStack."""

        def __init__(self):
            self._exits = []

        def __enter__(self):
            return self

        def enter_context(self, block):
            """Enter a block, which ends with this one."""
            leave = type(block).__exit__
            entered = type(block).__enter__(block)
            self._exits.append(partial(leave, block))
            return entered

        def push(self, block):
            """Have a block end with this one that was entered."""
            self._exits.append(partial(type(block).__exit__, block))
            return block

        def callback(self, function, /, *values, **named):
            """Have a function called at the end."""

            def call(*_error):
                function(*values, **named)

            self._exits.append(call)
            return function

        def pop_all(self):
            """One that ends all of it, where this one now ends nothing."""
            other = type(self)()
            other._exits, self._exits = self._exits, []
            return other

        def close(self):
            """End it all now."""
            self.__exit__(None, None, None)

        def __exit__(self, kind, error, trace):
            """End it all, the last first. What one of them raises, those before it are told."""
            while self._exits:
                try:
                    is_over = self._exits.pop()(kind, error, trace)
                except BaseException as raised:
                    if self.__exit__(type(raised), raised, raised.__traceback__):
                        return True
                    raise
                if kind is not None and is_over:
                    self.close()
                    return True
            return False
