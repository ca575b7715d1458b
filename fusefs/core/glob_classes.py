"""Classes of characters in globs, such as [:alpha:], as a regular expression has them."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import cache
from itertools import groupby

ASCII = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "blank": r"\t ",
    "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9",
    "graph": "!-~",
    "lower": "a-z",
    "print": " -~",
    "punct": r"!-/:-@\[-`{-~",
    "space": r"\t-\r ",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}
"""The classes as the inside of a regular expression's set, for characters that are a byte each."""
CASED = frozenset({"lower", "upper"})
"""Those of case alone."""
_FIXED_SPACES = "\xa0\u2007\u202f"
"""Spaces at which no line may break: the C library counts them among what is seen."""
_IDEOGRAPHS = range(0x20000, 0x40000)
"""Two planes that hold nothing else; looking each of them up would take longer than a whole sweep."""
_OF_IDEOGRAPHS = frozenset({"alnum", "alpha", "graph", "print"})


@cache
def in_class(name: str) -> str:
    """A class as the inside of a regular expression's set, beyond ASCII too, near to what the C library has.

    It takes a while for each class once. Signs that only combine (as vowels do in Hindi) are no letters here.
    """
    belongs = _BEYOND_ASCII.get(name)
    if belongs is None:
        return ASCII[name]
    found = [ASCII[name]]
    for is_in, group in groupby(map(chr, range(0x80, _IDEOGRAPHS.start)), belongs):
        if is_in:
            first, *others = group
            found.append(f"{first}-{others[-1]}" if others else first)
    if name in _OF_IDEOGRAPHS:
        found.append(f"{chr(_IDEOGRAPHS.start)}-{chr(_IDEOGRAPHS.stop - 1)}")
    return "".join(found)


def _is_upper(character: str) -> bool:
    return character.isupper() or character.istitle()


def _is_alpha(character: str) -> bool:
    is_letter = character.isalpha() or unicodedata.category(character) in ("Nd", "Nl")
    return is_letter or character.isupper() or character.islower()


def _is_print(character: str) -> bool:
    return unicodedata.category(character) not in ("Cc", "Cn", "Cs", "Zl", "Zp")


def _is_space(character: str) -> bool:
    return unicodedata.category(character) in ("Zl", "Zp", "Zs") and character not in _FIXED_SPACES


def _is_blank(character: str) -> bool:
    return unicodedata.category(character) == "Zs" and character not in _FIXED_SPACES


def _is_graph(character: str) -> bool:
    return _is_print(character) and not _is_blank(character)


_BEYOND_ASCII: dict[str, Callable[[str], bool]] = {
    "alnum": _is_alpha,
    "alpha": _is_alpha,
    "blank": _is_blank,
    "cntrl": lambda character: unicodedata.category(character) in ("Cc", "Zl", "Zp"),
    "graph": _is_graph,
    "lower": str.islower,
    "print": _is_print,
    "punct": lambda character: _is_graph(character) and not _is_alpha(character),
    "space": _is_space,
    "upper": _is_upper,
}
