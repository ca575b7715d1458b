"""Globs as fnmatch(3) reads them for find: `*` matches a leading dot too, and a slash in a path."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cache
from itertools import takewhile
from typing import NamedTuple

Matches = Callable[[str], bool]
"""Whether a name, or a path, is one of those that are meant; invalid UTF-8 in it as os.fsdecode has it."""


class NameEnds(NamedTuple):
    """How each name begins and ends that a glob matches; there may be others that do."""

    first: bytes
    last: bytes


ANY_ENDS = NameEnds(b"", b"")


class _Wild(Enum):
    """What stands for characters that are not named."""

    ANY = "?"
    MANY = "*"


class _Set(NamedTuple):
    """`[…]`: one character of several, or one of all others."""

    is_negated: bool
    ranges: tuple[tuple[str, str], ...]
    classes: tuple[str, ...]


_Token = str | _Wild | _Set
_Fold = Callable[[str], str]

_CLASS = r"\[:([a-z]*):\]"
_MEMBER = r"(?:\\.|[^\\])"
_MEMBERS = rf"(?s:({_MEMBER})(?:-(?!\])({_MEMBER}))?)"
"""One, or a range of them; a dash before the end is itself."""


def compile_glob(pattern: str, *, ignores_case: bool = False) -> Matches:
    r"""What says whether a name matches: `*`, `?`, `[a-z]`, `[!a]`, `[^a]`, `[[:digit:]]`, `\` before any of them.

    A `?` is a character of UTF-8. A name that is no UTF-8 is taken byte by byte, and so are all names by a pattern
    that is none. Ranges go by code points. What the C library reads in a way that can't be meant is refused.
    Raises  ValueError with a message for the person who typed it
    Source  fnmatch(3), glob(7). glibc 2.36 takes a name byte by byte too if it didn't match as UTF-8: we don't
    """
    if not pattern:
        raise ValueError("an empty pattern matches nothing")
    if "\0" in pattern:
        raise ValueError(f"{pattern!r} has a NUL in it, which no name has")
    folds = _fold if _is_utf8(pattern) else _fold_ascii
    tokens = _read(pattern, folds if ignores_case else None)
    matches = _by_text(pattern, tokens, ignores_case) or _by_regex(pattern, tokens, ignores_case)
    return (lambda name: matches(folds(name))) if ignores_case else matches


def name_ends(pattern: str) -> NameEnds:
    """What a glob that heeds case says of its names' ends; what is no UTF-8 stands for itself, as in names."""
    tokens = _read(pattern, None)
    first, last = (_text_before(some) for some in (tokens, tokens[::-1]))
    return NameEnds(*(text.encode("utf-8", "surrogateescape") for text in (first, last[::-1])))


def _text_before(tokens: Sequence[_Token]) -> str:
    """The characters that stand before all others."""
    return "".join(map(str, takewhile(lambda token: isinstance(token, str), tokens)))


def _read(pattern: str, folds: _Fold | None) -> list[_Token]:
    """The parts of a pattern, without their case if `folds` says so. Raises  ValueError"""
    tokens: list[_Token] = []
    at = 0
    while at < len(pattern):
        character = pattern[at]
        at += 1
        if character in "*?":
            tokens.append(_Wild(character))
        elif character == "[":
            token, at = _read_set(pattern, at, folds)
            tokens.append(token)
        else:
            if character == "\\":
                if at == len(pattern):
                    raise ValueError(rf"{pattern!r} ends in a lone \: write \\ for the character itself")
                character = pattern[at]
                at += 1
            tokens.append(folds(character) if folds else character)
    return tokens


def _read_set(pattern: str, begin: int, folds: _Fold | None) -> tuple[_Token, int]:
    """What begins with the `[` before an index, and where it ends; a `[` that is never closed means itself."""
    import re  # most globs do without

    is_negated = pattern.startswith(("!", "^"), begin)
    at = first = begin + is_negated
    ranges: list[tuple[str, str]] = []
    classes: list[str] = []
    while at == first or not pattern.startswith("]", at):
        if found := re.compile(_CLASS).match(pattern, at):
            classes.append(_checked_class(pattern, found[1], ignores_case=folds is not None))
        elif found := re.compile(_MEMBERS).match(pattern, at):
            ranges.append(_checked_range(pattern, found, folds))
        elif ("[", "[") in ranges or pattern.endswith(("-", "\\")):
            raise ValueError(rf"{pattern!r} has a [ that is never closed: write \[ for the character itself")
        else:
            return "[", begin
        at = found.end()
    return _Set(is_negated, tuple(ranges), tuple(classes)), at + 1


def _checked_class(pattern: str, name: str, *, ignores_case: bool) -> str:
    from fusefs.core.glob_classes import ASCII, CASED

    if name not in ASCII:
        raise ValueError(f"{pattern!r}: there is no class [:{name}:]; there are {', '.join(ASCII)}")
    if ignores_case and name in CASED:
        raise ValueError(f"{pattern!r}: [:{name}:] means nothing where case is ignored: write [:alpha:]")
    return name


def _checked_range(pattern: str, found: re.Match[str], folds: _Fold | None) -> tuple[str, str]:
    for group in range(1, 3):
        if found[group] == "[" and pattern.startswith((":", "=", "."), found.end(group)):
            what = f"{pattern!r}: [{pattern[found.end(group)]} begins a class, as in [[:digit:]], or what a locale says"
            raise ValueError(rf"{what}: write \[ for the character itself")
    low, high = (text[-1] for text in found.groups(default=found[1]))
    if folds:
        low, high = folds(low), folds(high)
    if high < low:
        raise ValueError(f"{pattern!r}: the range {found[0]} is the wrong way round")
    return low, high


def _by_text(pattern: str, tokens: Sequence[_Token], ignores_case: bool) -> Matches | None:
    """What most patterns come to: a name itself, its beginning, its end. None for others.

    UTF-8 is found by characters wherever it is found by bytes; but case is another thing in names that are none.
    """
    if not _is_utf8(pattern) or (ignores_case and not pattern.isascii()):
        return None
    if any(isinstance(token, _Set) or token is _Wild.ANY for token in tokens):
        return None
    match ["".join(map(str, run)) for run in _runs(tokens)]:
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


def _by_regex(pattern: str, tokens: Sequence[_Token], ignores_case: bool) -> Matches:
    from fusefs.core.glob_classes import ASCII, in_class  # most globs do without

    in_bytes = _compile(_read(_bytewise(pattern), _fold_byte if ignores_case else None), ASCII.__getitem__)
    in_characters = cache(lambda: _compile(tokens, in_class))  # most names are ASCII, and its classes take a while
    is_ascii, has_characters = pattern.isascii(), _is_utf8(pattern)

    def matches(name: str) -> bool:
        if is_ascii and name.isascii():
            return in_bytes(name) is not None
        if has_characters and _is_utf8(name):
            return in_characters()(name) is not None
        return in_bytes(_bytewise(name)) is not None

    return matches


def _fold_byte(character: str) -> str:
    return character.lower() if character.isascii() else character


def _compile(tokens: Sequence[_Token], in_class: Callable[[str], str]) -> Callable[[str], re.Match[str] | None]:
    """A regular expression; what stands between two `*` is looked for once, so that it takes no time in powers."""
    import re

    first, *others = ("".join(_one(token, in_class) for token in run) for run in _runs(tokens))
    if others:
        first += "".join(f"(?>.*?{run})" for run in others[:-1] if run) + ".*" + others[-1]
    return re.compile(first, re.DOTALL).fullmatch


def _runs(tokens: Sequence[_Token]) -> Iterator[list[str | _Set | _Wild]]:
    """The tokens between the `*`, of which none may be there."""
    run: list[str | _Set | _Wild] = []
    for token in tokens:
        if token is _Wild.MANY:
            yield run
            run = []
        else:
            run.append(token)
    yield run


def _one(token: _Token, in_class: Callable[[str], str]) -> str:
    """The regular expression for what stands for one character."""
    import re

    if isinstance(token, _Wild):
        return "."
    if isinstance(token, str):
        return re.escape(token)
    ranges = "".join(f"{re.escape(low)}-{re.escape(high)}" for low, high in token.ranges)
    return f"[{'^' * token.is_negated}{ranges}{''.join(map(in_class, token.classes))}]"


def _is_utf8(name: str) -> bool:
    """Whether a name, as os.fsdecode has it, was UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bytewise(name: str) -> str:
    """The bytes of a name as os.fsdecode has it, a character each."""
    return name.encode("utf-8", "surrogateescape").decode("latin-1")


def _fold(name: str) -> str:
    """A name without its case, a character for a character; one that is no UTF-8 has case in its ASCII alone."""
    if not name.isascii() and not _is_utf8(name):
        return _fold_ascii(name)
    low = name.lower()
    if len(low) == len(name) and "\u03a3" not in name:  # a Sigma at the end of a word has a low form of its own
        return low
    return "".join(character.lower()[0] for character in name)


def _fold_ascii(name: str) -> str:
    """A name without the case of its ASCII letters."""
    return name.encode("utf-8", "surrogateescape").lower().decode("utf-8", "surrogateescape")
