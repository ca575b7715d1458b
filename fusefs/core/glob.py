"""Globs as find(1) and fnmatch(3) interpret them: `*` also matches a leading dot, and a slash in a path."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from fnmatch import translate
from functools import cache
from itertools import groupby, takewhile
from typing import NamedTuple

NameTest = Callable[[str], bool]
"""A test of a name or path; bytes that are not UTF-8 are decoded as os.fsdecode does it."""


class NameEnds(NamedTuple):
    """Bytes with which every name that matches a glob begins and ends; other names may do so, too."""

    first: bytes
    last: bytes


ANY_ENDS = NameEnds(b"", b"")


class _Set(NamedTuple):
    """`[…]`, which matches one of several characters, or (negated) any other character."""

    is_negated: bool
    ranges: tuple[tuple[str, str], ...]
    classes: tuple[str, ...]


_Token = str | _Set
"""A character, `*` or `?`, in fnmatch's notation: a special character that stands for itself is in brackets."""
_LITERAL = {character: f"[{character}]" for character in "*?["}
_CHARACTER = {pattern: character for character, pattern in _LITERAL.items()}
_Fold = Callable[[str], str]

_CLASS = r"\[:([a-z]*):\]"
_MEMBER = r"(?:\\.|[^\\])"
_MEMBERS = rf"(?s:({_MEMBER})(?:-(?!\])({_MEMBER}))?)"
"""One character or a range; a dash before the closing bracket stands for itself."""


def compile_glob(pattern: str, *, ignores_case: bool = False) -> NameTest:
    r"""Compile a glob into a test: `*`, `?`, `[a-z]`, `[!a]`, `[^a]`, `[[:digit:]]`, and `\` before any of them.

    `?` matches one UTF-8 character. A name that is not UTF-8 is matched byte by byte, and so are all names if the
    pattern is not UTF-8. Ranges compare code points. Patterns that the C library interprets in an unexpected way are
    refused.
    Raises  ValueError with a message for the user
    Source  fnmatch(3), glob(7). Unlike glibc 2.36, we do not also match a UTF-8 name byte by byte
    """
    if not pattern:
        raise ValueError("an empty pattern matches nothing")
    if "\0" in pattern:
        raise ValueError(f"{pattern!r} contains a NUL character, which no name can contain")
    folds = _fold if _is_utf8(pattern) else _fold_ascii
    tokens = _tokenize(pattern, folds if ignores_case else None)
    matches = _by_text(pattern, tokens, ignores_case) or _by_regex(pattern, tokens, ignores_case)
    return (lambda name: matches(folds(name))) if ignores_case else matches


def name_ends(pattern: str) -> NameEnds:
    """Return the literal beginning and end of a case-sensitive glob; bytes that are not UTF-8 stand for themselves."""
    tokens = _tokenize(pattern, None)
    first, last = (_join_literals(takewhile(_is_literal, some)) for some in (tokens, tokens[::-1]))
    return NameEnds(*(text.encode("utf-8", "surrogateescape") for text in (first, last[::-1])))


def _is_literal(token: _Token) -> bool:
    return not isinstance(token, _Set) and token not in ("*", "?")


def _join_literals(tokens: Iterable[_Token]) -> str:
    """Join tokens that are all single characters into a text."""
    return "".join(_CHARACTER.get(token, token) for token in tokens if isinstance(token, str))


def _tokenize(pattern: str, folds: _Fold | None) -> list[_Token]:
    """Split a pattern into tokens. folds: removes the case of a text; None: case matters. Raises  ValueError"""
    tokens: list[_Token] = []
    at = 0
    while at < len(pattern):
        character = pattern[at]
        at += 1
        if character in "*?":
            tokens.append(character)
        elif character == "[":
            token, at = _read_set(pattern, at, folds)
            tokens.append(token)
        else:
            if character == "\\":
                if at == len(pattern):
                    raise ValueError(rf"{pattern!r} ends in a lone \: write \\ for the character itself")
                character = pattern[at]
                at += 1
            character = folds(character) if folds else character
            tokens.append(_LITERAL.get(character, character))
    return tokens


def _read_set(pattern: str, begin: int, folds: _Fold | None) -> tuple[_Token, int]:
    """Read the set whose `[` precedes `begin`; return its token and end. An unclosed `[` is a plain character."""
    is_negated = pattern.startswith(("!", "^"), begin)
    at = first = begin + is_negated
    ranges: list[tuple[str, str]] = []
    classes: list[str] = []
    while at == first or not pattern.startswith("]", at):
        if match := re.compile(_CLASS).match(pattern, at):
            classes.append(_checked_class(pattern, match[1], ignores_case=folds is not None))
        elif match := re.compile(_MEMBERS).match(pattern, at):
            ranges.append(_checked_range(pattern, match, folds))
        elif ("[", "[") in ranges or pattern.endswith(("-", "\\")):
            raise ValueError(rf"{pattern!r} has a [ that is never closed: write \[ for the character itself")
        else:
            return _LITERAL["["], begin
        at = match.end()
    return _Set(is_negated, tuple(ranges), tuple(classes)), at + 1


def _checked_class(pattern: str, name: str, *, ignores_case: bool) -> str:
    if name not in ASCII:
        raise ValueError(f"{pattern!r}: there is no class [:{name}:]; the classes are {', '.join(ASCII)}")
    if ignores_case and name in ("lower", "upper"):
        raise ValueError(f"{pattern!r}: [:{name}:] has no meaning where case is ignored: write [:alpha:]")
    return name


def _checked_range(pattern: str, match: re.Match[str], folds: _Fold | None) -> tuple[str, str]:
    for group in range(1, 3):
        if match[group] == "[" and pattern.startswith((":", "=", "."), match.end(group)):
            what = (
                f"{pattern!r}: [{pattern[match.end(group)]} begins a class, as in [[:digit:]], or a locale-specific set"
            )
            raise ValueError(rf"{what}: write \[ for the character itself")
    low, high = (text[-1] for text in match.groups(default=match[1]))
    if folds:
        low, high = folds(low), folds(high)
    if high < low:
        raise ValueError(f"{pattern!r}: the range {match[0]} is reversed")
    return low, high


def _by_text(pattern: str, tokens: Sequence[_Token], ignores_case: bool) -> NameTest | None:
    """Return a fast test with string methods for a pattern `x`, `x*`, `*x`, `x*y` or `*x*`, or None for any other.

    In UTF-8, comparing characters gives the same result as comparing bytes. For names that are not UTF-8, this is not
    true if case is ignored; the pattern must then be ASCII.
    """
    if not _is_utf8(pattern) or (ignores_case and not pattern.isascii()):
        return None
    if any(isinstance(token, _Set) or token == "?" for token in tokens):
        return None
    texts = [""]
    for token in tokens:
        if token == "*":
            texts.append("")
        else:
            texts[-1] += _join_literals([token])
    match texts:
        case [text]:
            return text.__eq__
        case ["", text]:
            return lambda name: name.endswith(text)
        case [text, ""]:
            return lambda name: name.startswith(text)
        case [first, last]:
            least = len(first) + len(last)
            return lambda name: len(name) >= least and name.startswith(first) and name.endswith(last)
        case ["", text, ""]:
            return lambda name: text in name
    return None


def _by_regex(pattern: str, tokens: Sequence[_Token], ignores_case: bool) -> NameTest:
    in_bytes = _compile(_tokenize(_bytewise(pattern), _fold_ascii if ignores_case else None), ASCII.__getitem__)
    in_characters = cache(
        lambda: _compile(tokens, class_members)
    )  # compiled on demand: most names are ASCII, and computing the classes is slow
    is_ascii, has_characters = pattern.isascii(), _is_utf8(pattern)

    def matches(name: str) -> bool:
        if is_ascii and name.isascii():
            return in_bytes(name) is not None
        if has_characters and _is_utf8(name):
            return in_characters()(name) is not None
        return in_bytes(_bytewise(name)) is not None

    return matches


def _compile(tokens: Sequence[_Token], in_class: Callable[[str], str]) -> Callable[[str], re.Match[str] | None]:
    """Compile tokens to a regular expression. It is fast, since fnmatch's translation never backtracks over `*`."""
    sets = (_format_set(token, in_class) for token in tokens if isinstance(token, _Set))
    text = translate("".join(token if isinstance(token, str) else "\0" for token in tokens))
    return re.compile(re.sub("\0", lambda _found: next(sets), text)).fullmatch


def _format_set(one: _Set, in_class: Callable[[str], str]) -> str:
    ranges = "".join(f"{re.escape(low)}-{re.escape(high)}" for low, high in one.ranges)
    return f"[{'^' * one.is_negated}{ranges}{''.join(map(in_class, one.classes))}]"


def _is_utf8(name: str) -> bool:
    """Whether a name that os.fsdecode decoded was UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bytewise(name: str) -> str:
    """Convert a name that os.fsdecode decoded to a text with one character for each byte."""
    return name.encode("utf-8", "surrogateescape").decode("latin-1")


def _fold(name: str) -> str:
    """Fold the case of a name, keeping its length; in a name that is not UTF-8, only ASCII letters are folded."""
    if not name.isascii() and not _is_utf8(name):
        return _fold_ascii(name)
    low = name.lower()
    if len(low) == len(name) and "\u03a3" not in name:  # lower() has a special form for a Sigma at the end of a word
        return low
    return "".join(character.lower()[0] for character in name)


def _fold_ascii(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").lower().decode("utf-8", "surrogateescape")


# Character classes, such as [:alpha:], as regular expressions.

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
"""For each class, the content of a regular expression's set, for characters of one byte."""
_FIXED_SPACES = "\xa0\u2007\u202f"
"""No-break spaces: the C library counts them as visible characters."""
_IDEOGRAPHS = range(0x20000, 0x40000)
"""Two planes that contain only ideographs: testing each character would take longer than a whole sweep."""
_OF_IDEOGRAPHS = frozenset({"alnum", "alpha", "graph", "print"})


@cache
def class_members(name: str) -> str:
    """Return the content of a regular expression's set for a class in all of Unicode, similar to the C library's.

    The first call for each class takes a while. Combining marks (such as vowel signs in Hindi) are not letters here.
    """
    belongs = _BEYOND_ASCII.get(name)
    if belongs is None:
        return ASCII[name]
    parts = [ASCII[name]]
    for is_in, group in groupby(map(chr, range(0x80, _IDEOGRAPHS.start)), belongs):
        if is_in:
            first, *others = group
            parts.append(f"{first}-{others[-1]}" if others else first)
    if name in _OF_IDEOGRAPHS:
        parts.append(f"{chr(_IDEOGRAPHS.start)}-{chr(_IDEOGRAPHS.stop - 1)}")
    return "".join(parts)


def _is_alpha(character: str) -> bool:
    is_letter = character.isalpha() or unicodedata.category(character) in ("Nd", "Nl")
    return is_letter or character.isupper() or character.islower()


def _is_print(character: str) -> bool:
    return unicodedata.category(character) not in ("Cc", "Cn", "Cs", "Zl", "Zp")


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
    "space": lambda character: _is_blank(character) or unicodedata.category(character) in ("Zl", "Zp"),
    "upper": lambda character: character.isupper() or character.istitle(),
}
