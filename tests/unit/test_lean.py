"""What swaps and sweeps take in place of the standard library is as the standard library's own."""

from __future__ import annotations

import contextlib
import enum
import json
import pickle
import signal
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core import lean, lean_json


class LeanPoint(lean.NamedTuple):
    """A place."""

    x: int
    y: int = 2
    name: str = ""

    def sum(self) -> int:
        return self.x + self.y


class Point(typing.NamedTuple):
    """A place."""

    x: int
    y: int = 2
    name: str = ""

    def sum(self) -> int:
        return self.x + self.y


class LeanColour(lean.Enum):
    """A colour."""

    RED = "red"
    BLUE = "blue"

    def is_warm(self) -> bool:
        return self is LeanColour.RED


class Colour(enum.Enum):
    """A colour."""

    RED = "red"
    BLUE = "blue"

    def is_warm(self) -> bool:
        return self is Colour.RED


MAKINGS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1,), {}), ((1, 3), {}), ((1, 3, "a"), {}), ((), {"x": 1}), ((1,), {"name": "b"}), ((), {"y": 1, "x": 4}),
    ((), {}), ((), {"y": 1}), ((1, 2, "a", 4), {}), ((1,), {"x": 1}), ((1,), {"z": 1}), ((1, 2, "a"), {"z": 1}),
]  # fmt: skip


def outcome(act: Callable[[], object]) -> object:
    try:
        return act()
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        return type(error)


@pytest.mark.parametrize("n_before", [0, 100])
@pytest.mark.parametrize(("values", "named"), MAKINGS)
def test_a_named_tuple_takes_what_typings_takes(n_before: int, values: tuple[Any, ...], named: dict[str, Any]) -> None:
    class Fresh(lean.NamedTuple):
        x: int
        y: int = 2
        name: str = ""

    for _ in range(n_before):
        Fresh(0)
    assert outcome(lambda: Fresh(*values, **named)) == outcome(lambda: Point(*values, **named))


@pytest.mark.parametrize(
    "look",
    [
        lambda p: (p.x, p.y, p.name), lambda p: p[1:], lambda p: p._replace(y=5), lambda p: p._replace(z=5),
        lambda p: p._asdict(), lambda p: p._fields, lambda p: p._field_defaults, lambda p: p == (1, 2, ""), hash,
        lambda p: p.sum(), lambda p: type(p)._make([1, 2, "c"]), lambda p: type(p)._make([1]), len,
        lambda p: repr(p).removeprefix("Lean"), lambda p: pickle.loads(pickle.dumps(p)), lambda p: p.__doc__,
        lambda p: setattr(p, "x", 1), lambda p: setattr(p, "other", 1), lambda p: type(p).__match_args__,
        lambda p: typing.get_type_hints(type(p)), lambda p: p.z,
    ],
)  # fmt: skip
def test_a_named_tuple_tells_what_typings_tells(look: Callable[[Any], object]) -> None:
    assert outcome(lambda: look(LeanPoint(1))) == outcome(lambda: look(Point(1)))


@pytest.mark.parametrize(
    "look",
    [
        lambda e: [one.name for one in e], lambda e: [one.value for one in e], len, lambda e: e("red").name,
        lambda e: e("green"), lambda e: e([]), lambda e: e["BLUE"].value, lambda e: e["GREEN"],
        lambda e: e(e.RED) is e.RED, lambda e: e.RED.is_warm(), lambda e: e.RED == "red", lambda e: e.RED in e,
        lambda e: {e.RED: 1}[e("red")],
        lambda e: repr(e.RED).replace("Lean", ""), lambda e: str(e.RED).replace("Lean", ""), lambda e: e.__doc__,
        lambda e: pickle.loads(pickle.dumps(e.BLUE)) is e.BLUE, lambda e: e.GREEN, lambda e: isinstance(e.RED, e),
    ],
)  # fmt: skip
def test_an_enum_is_as_enums(look: Callable[[Any], object]) -> None:
    assert outcome(lambda: look(LeanColour)) == outcome(lambda: look(Colour))


class Block:
    """One that tells a list of what it sees, and raises or swallows what it is told to."""

    def __init__(self, seen: list[object], number: int, does: str) -> None:
        self.seen, self.number, self.does = seen, number, does

    def __enter__(self) -> int:
        self.seen.append(("enter", self.number))
        if self.does == "refuse":
            raise KeyError(self.number)
        return self.number

    def __exit__(self, _kind: object, error: object, _trace: object) -> bool:
        self.seen.append(("exit", self.number, repr(error)))
        if self.does == "raise":
            raise ValueError(self.number)
        return self.does == "swallow"


def history(stack: type[contextlib.ExitStack], deeds: list[str], *, raises: bool, hands_over: bool) -> list[object]:
    """What blocks in an ExitStack see, and how it ends."""
    seen: list[object] = []
    try:
        with stack() as owned:
            for number, does in enumerate(deeds):
                if does == "callback":
                    owned.callback(seen.append, number)
                else:
                    seen.append(owned.enter_context(Block(seen, number, does)))
            if hands_over:
                other = owned.pop_all()
                seen.append("handed over")
                other.close()
            if raises:
                raise AttributeError("of the block")
        seen.append("went on")
    except (AttributeError, KeyError, ValueError) as error:
        seen.append(repr(error))
    return seen


@given(
    st.lists(st.sampled_from(["", "raise", "swallow", "refuse", "callback"]), max_size=6), st.booleans(), st.booleans()
)
def test_an_exit_stack_is_as_contextlibs(deeds: list[str], raises: bool, hands_over: bool) -> None:
    lean_one = history(lean.ExitStack, deeds, raises=raises, hands_over=hands_over)
    assert lean_one == history(contextlib.ExitStack, deeds, raises=raises, hands_over=hands_over)


@pytest.mark.parametrize("error", [FileNotFoundError, KeyError, None])
def test_suppress_is_as_contextlibs(error: type[Exception] | None) -> None:
    def ends(suppress: type[contextlib.suppress]) -> str:
        with suppress(OSError, ValueError):
            if error is not None:
                raise error
        return "went on"

    assert outcome(lambda: ends(lean.suppress)) == outcome(lambda: ends(contextlib.suppress))


def made_by(
    contextmanager: Callable[..., Any], seen: list[object], does: str
) -> contextlib.AbstractContextManager[int]:
    """A block of a generator that does as told."""

    @contextmanager
    def block(value: int, *, name: str) -> Iterator[int]:
        seen.append((value, name))
        if does == "yields nothing":
            return
        try:
            yield value
        except KeyError as error:
            seen.append(repr(error))
            if does == "swallows":
                return
            if does == "raises another":
                raise ValueError from error
            if does == "yields again":
                yield 3
            raise
        finally:
            seen.append("over")
        if does == "yields twice":
            yield 4

    made: contextlib.AbstractContextManager[int] = block(7, name="x")
    return made


@pytest.mark.parametrize("does", ["", "yields nothing", "swallows", "raises another", "yields again", "yields twice"])
@pytest.mark.parametrize("error", [KeyError("k"), OSError(5, "x"), StopIteration(), RuntimeError("r"), None])
def test_a_block_of_a_generator_is_as_contextlibs(does: str, error: Exception | None) -> None:
    def history_of(contextmanager: Callable[..., Any]) -> list[object]:
        seen: list[object] = []
        try:
            with made_by(contextmanager, seen, does) as value:
                seen.append(value)
                if error is not None:
                    raise error
            seen.append("went on")
        except Exception as raised:
            told = [raised, raised.__cause__, raised is error]
            seen.append([repr(one) for one in told])
        return seen

    assert history_of(lean.contextmanager) == history_of(contextlib.contextmanager)


def test_what_is_generic_takes_any_types() -> None:
    t_co = lean.TypeVar("t_co", covariant=True)

    class Holds(lean.Protocol[t_co]):
        def one(self) -> t_co: ...

    class Both(lean.NamedTuple, lean.Generic[t_co]):
        first: t_co

    assert Both(1).first == 1
    assert Holds.__mro__[-1] is object


def test_what_is_cached_is_asked_once() -> None:
    asked = iter(range(9))
    look = lean.cache(lambda: next(asked))
    assert [look(), look()] == [0, 0]
    double = lean.cache(lambda value: (value, next(asked)))
    assert [double(3), double(4), double(3)] == [(3, 1), (4, 2), (3, 1)]


def values() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters())
    keys = st.text(st.characters(), max_size=4)
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3))


@given(values(), st.sampled_from([None, 0, 1, 2]))
def test_json_is_written_as_jsons(value: Any, indent: int | None) -> None:
    assert lean_json.dumps(value, indent) == json.dumps(value, indent=indent)


def texts() -> Iterator[st.SearchStrategy[bytes]]:
    yield values().map(lambda value: json.dumps(value, indent=1).encode() + b"\n")
    yield st.binary(max_size=8)
    yield st.text('[]{}",:0123456789-.eE \ntrufalsn\\NI\ufeff\xe9', max_size=12).map(str.encode)


def said(read: Callable[[bytes], Any], text: bytes) -> str:
    try:
        return repr(read(text))
    except ValueError as error:
        return repr(error)


@given(st.one_of(*texts()))
def test_json_is_read_as_jsons(text: bytes) -> None:
    assert said(lean_json.loads, text) == said(json.loads, text)


def test_signals_have_the_same_numbers() -> None:
    assert (lean.SIGINT, lean.SIGKILL, lean.SIG_IGN) == (signal.SIGINT, signal.SIGKILL, signal.SIG_IGN)


@pytest.mark.parametrize("text", [b'{"a', b'{\n "magic"', b'{"a": tru'])
def test_json_that_ends_early_is_told_as_such_where_json_is_not_loaded_yet(text: bytes) -> None:
    script = f"from fusefs.core.lean_json import loads\ntry: loads({text!r})\nexcept ValueError: print('told')"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout == b"told\n"
