"""Globs: as the C library's own fnmatch(3) has them, but for what it can't have meant."""

import ctypes
import functools
import os
from contextlib import suppress
from itertools import chain, starmap

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from fusefs.core.glob import ASCII, compile_glob, name_ends

_libc = ctypes.CDLL(None, use_errno=True)
_libc.newlocale.restype = _libc.uselocale.restype = ctypes.c_void_p
_libc.newlocale.argtypes = ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p
_libc.uselocale.argtypes = (ctypes.c_void_p,)
_LC_ALL_MASK = 0x1FBF
_FNM_CASEFOLD = 16

PLAIN, UTF_8 = "C", "C.UTF-8"


def fnmatch(pattern: bytes, name: bytes, locale: str, *, ignores_case: bool = False) -> bool:
    """Whether find would say that a name matches, in this thread's locale for as long as it takes."""
    before = _libc.uselocale(_opened(locale))
    try:
        return bool(_libc.fnmatch(pattern, name, _FNM_CASEFOLD * ignores_case) == 0)
    finally:
        _libc.uselocale(before)


@functools.cache
def _opened(locale: str) -> int:
    opened: int | None = _libc.newlocale(_LC_ALL_MASK, locale.encode(), None)
    assert opened, f"no locale {locale}"
    return opened


LETTER, ANY_LETTER = "é", "[[:alpha:]]"
"""A name that begins with the one matches, byte by byte, no pattern that begins with the other: glibc 2.36 takes a name
byte by byte too if it doesn't match as UTF-8."""
PLAIN_PARTS = [*"abBZ1-._!^:/ \n", "[", "]", "\\"]
PARTS = [*PLAIN_PARTS, "é", "É", "ж", "字", "\u212a", "\u0130", "\u03a3", "\u03c2", "\u03c3", "\U0001f600"]
BYTES = ["\udcff", "\udcc3", "\udca9"]
WILD = ["*", "*", "?", "[", "]", "[^", "[!", "-", "\\", *(f"[:{name}:]" for name in ASCII)]
WELL_FORMED = [
    "*",
    "?",
    "a",
    "é",
    "]",
    "-",
    r"\*",
    r"\a",
    "[a-c]",
    "[!a]",
    "[^ж]",
    "[]-a]",
    "[a-]",
    r"[\]-\é]",
    "[[:digit:]_]",
]


def told(parts: list[str]) -> str:
    """Parts as os.fsdecode tells them: single bytes that are UTF-8 together become a character."""
    return os.fsdecode(os.fsencode("".join(parts)))


def texts(*parts: str) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(parts), max_size=6).map(told)


def nearby(pattern: str) -> st.SearchStrategy[tuple[str, str]]:
    """A pattern, and a name that may well match it."""
    parts = st.sampled_from([part for part in pattern if part != "*"] or ["a"])
    return st.tuples(st.just(pattern), st.just(pattern) | st.lists(parts, max_size=6).map(told))


def pairs(patterns: st.SearchStrategy[str], names: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[str, str]]:
    return st.tuples(patterns, names) | patterns.flatmap(nearby)


PLAIN_PAIRS = pairs(texts(*PLAIN_PARTS, *WILD, *WILD) | texts(*PLAIN_PARTS, *WELL_FORMED[4:]), texts(*PLAIN_PARTS))
PAIRS = pairs(texts(*PARTS, *WILD, *WILD) | texts(*PARTS, *WELL_FORMED), texts(*PARTS))
ODD_PAIRS = pairs(texts(*PARTS, *BYTES, *WILD, *WILD) | texts(*PARTS, *BYTES, *WELL_FORMED), texts(*PARTS, *BYTES))
ODD_ENDS = st.sampled_from(
    [("", "\udcff"), ("\udcff", "\udcff"), ("?", "\udcff"), ("\udcff*", ""), ("\udcff*", "\udcff")]
)
"""Either the pattern's or the name's, or both, are no UTF-8."""


def matches(pattern: str, name: str, *, ignores_case: bool = False) -> bool | None:
    """What a pattern says of a name; None if the pattern is refused."""
    try:
        return compile_glob(pattern, ignores_case=ignores_case)(name)
    except ValueError:
        return None


@given(PLAIN_PAIRS, st.booleans(), st.sampled_from([PLAIN, UTF_8]))
def test_ascii_matches_as_in_the_c_library(pair: tuple[str, str], ignores_case: bool, locale: str) -> None:
    pattern, name = pair
    assume(pattern.isascii())
    theirs = fnmatch(pattern.encode(), name.encode(), locale, ignores_case=ignores_case)
    assert matches(pattern, name, ignores_case=ignores_case) in (theirs, None)


@given(PAIRS, st.booleans())
@example(("?", "é"), False)
@example(("??", "é"), False)
@example(("[!a]", "字"), False)
@example(("K", "\u212a"), True)
@example(("\u0130", "i"), True)
@example(("a\u03a3", "a\u03a3"), True)
def test_utf_8_matches_by_characters(pair: tuple[str, str], ignores_case: bool) -> None:
    pattern, name = pair
    theirs = fnmatch((ANY_LETTER + pattern).encode(), (LETTER + name).encode(), UTF_8, ignores_case=ignores_case)
    assert matches(pattern, name, ignores_case=ignores_case) in (theirs, None)


@given(ODD_PAIRS, ODD_ENDS, st.booleans(), st.sampled_from([PLAIN, UTF_8]))
@example(("?", "é"), ("?", "\udcff"), False, UTF_8)
@example(("[é]", ""), ("*", "\udcff"), False, PLAIN)
@example(("É*", "é"), ("", "\udcff"), True, UTF_8)
@example(("*\udca9", "É"), ("", ""), True, UTF_8)
def test_what_is_no_utf_8_matches_byte_by_byte(
    pair: tuple[str, str], ends: tuple[str, str], ignores_case: bool, locale: str
) -> None:
    pattern, name = (text + end for text, end in zip(pair, ends, strict=True))
    theirs = fnmatch(os.fsencode(pattern), os.fsencode(name), locale, ignores_case=ignores_case)
    assert matches(pattern, name, ignores_case=ignores_case) in (theirs, None)


@given(PAIRS | ODD_PAIRS | st.tuples(texts(*WELL_FORMED).filter(bool), texts(*PARTS, *BYTES)))
@example(("a*a", "a"))
@example((r"\**[", "*["))
@example(("\udcc3*", "é"))
def test_what_matches_has_the_ends_that_the_pattern_has(pair: tuple[str, str]) -> None:
    pattern, name = pair
    with suppress(ValueError):
        if compile_glob(pattern)(name):
            ends = name_ends(pattern)
            assert os.fsencode(name).startswith(ends.first)
            assert os.fsencode(name).endswith(ends.last)


@pytest.mark.parametrize(
    ("pattern", "first", "last"),
    [("*.log", "", ".log"), ("a*b", "a", "b"), ("é?[x]*\udcff", "é", "\udcff"), ("abc", "abc", "abc"), ("?", "", "")],
)
def test_ends_are_what_stands_before_and_behind_all_else(pattern: str, first: str, last: str) -> None:
    assert name_ends(pattern) == (os.fsencode(first), os.fsencode(last))


@given(texts(*WELL_FORMED).filter(bool), st.booleans())
def test_what_is_well_formed_is_not_refused(pattern: str, ignores_case: bool) -> None:
    assert matches(pattern, "a", ignores_case=ignores_case) is not None


@given(texts(*PARTS, *BYTES).filter(bool))
def test_an_escaped_name_matches_itself_alone(name: str) -> None:
    pattern = "".join(f"\\{character}" for character in name)
    assert matches(pattern, name) is True
    assert matches(pattern, name + "x") is False


@pytest.mark.parametrize(
    ("pattern", "name", "is_match"),
    [
        ("*", ".hidden", True),
        ("*", "a\nb", True),
        ("?", "\n", True),
        ("*.log", ".log", True),
        ("a*a", "a", False),
        ("a*b*c", "a-b-b-c", True),
        ("*ab*ab*", "xabab", True),
        ("*ab*ab*", "xab", False),
        ("a/*", "a/b/c", True),
        ("[]]", "]", True),
        ("[]-a]", "^", True),
        ("[a-]", "-", True),
        ("[!]a]", "]", False),
        ("[^a]", "a", False),
        (r"[\]]", "]", True),
        (r"\*", "*", True),
        (r"\*", "x", False),
        ("[draft", "[draft", True),
        ("a]", "a]", True),
        ("[[:digit:][:upper:]_]", "_", True),
        ("*[[:space:]]*", "a b", True),
        ("[[:alpha:]]", "ж", True),
        ("[[:alpha:]]", "1", False),
        ("[[:upper:]]", "ж", False),
        ("[![:alnum:]]", "字", False),
    ],
)
def test_glob(pattern: str, name: str, is_match: bool) -> None:
    assert matches(pattern, name) is is_match


@pytest.mark.parametrize("name", ASCII)
def test_class_has_the_characters_of_the_c_library(name: str) -> None:
    # U+0295 is left out: Unicode 17 took its case away, and Python and the C library have each their own Unicode.
    ranges = (
        (1, 0x1C5),
        (0x1F3, 0x295),
        (0x296, 0x300),
        (0x370, 0x3E2),
        (0x400, 0x480),
        (0x2000, 0x2060),
        (0x5B57, 0x5B58),
    )
    among = map(chr, chain.from_iterable(starmap(range, ranges)))  # but for ligatures of which half is upper case
    pattern = f"[[:{name}:]]"
    says = compile_glob(pattern)
    assert [one for one in among if says(one) is not fnmatch(pattern.encode(), one.encode(), UTF_8)] == []


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("", "an empty pattern"),
        ("a\0b", "contains a NUL"),
        ("a\\", r"ends in a lone \\"),
        ("[[:digits:]]", r"there is no class \[:digits:\]; the classes are alnum, alpha"),
        ("[z-a]", "the range z-a is reversed"),
        ("[[=a=]]", r"\[= begins a class"),
        ("[[.a.]]", r"\[\. begins a class"),
        ("[a[:x]", r"\[: begins a class"),
        ("[+-[:digit:]]", r"\[: begins a class"),
        ("[[", "never closed"),
        ("[a-", "never closed"),
        ("[a\\", "never closed"),
    ],
)
def test_what_nobody_can_have_meant_is_refused(pattern: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        compile_glob(pattern)


@pytest.mark.parametrize("name", ["upper", "lower"])
def test_case_is_not_asked_for_and_ignored(name: str) -> None:
    with pytest.raises(ValueError, match=r"has no meaning where case is ignored"):
        compile_glob(f"[[:{name}:]]", ignores_case=True)


def test_many_stars_take_no_time_in_powers() -> None:
    assert matches("*a" * 100 + "b", "a" * 4096) is False
