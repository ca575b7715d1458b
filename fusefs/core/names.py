"""Names and ids: what a container is called, and the types that keep bytes, ids and paths apart."""

from __future__ import annotations

from typing import NewType

Name = NewType("Name", bytes)
"""One path component; never empty, `.`, `..`, and without `/` or NUL."""

RelPath = NewType("RelPath", bytes)
"""Names joined by `/`, relative to the directory that holds the store; no leading slash, no `.` or `..`."""

ContainerId = NewType("ContainerId", str)
"""UTC time to the millisecond, a slug of the victim's name, random; sorts by time, at most 200 bytes."""

VolumeId = NewType("VolumeId", str)
"""32 hexadecimal digits, random, one for each store."""

STORE = Name(b".trashd")
"""The store that root makes for all users of a volume."""
_OF_USER = STORE + b"-"
_MOST_UID = (1 << 32) - 2
N_HEX = 12
"""Hexadecimal digits at the end of a name whose plain form something else has."""
ID_MAX_BYTES = 200
ID_RANDOM_CHARS = 12
"""At the end of an id, by which alone people may name it."""
_SLUG_MAX = 120
_SLUG = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_HEX = frozenset("0123456789abcdef")
_HEX_BYTES = frozenset(b"0123456789abcdef")
_TIME_CHARS = len("YYYYMMDDTHHMMSS.mmmZ-")
_VOLUME_ID_CHARS = 32


def make_id(utc: str, milliseconds: int, victim: bytes, random: bytes) -> ContainerId:
    """A container's id from the clock, the victim's name and chance, all handed in.

    utc      as `%Y%m%dT%H%M%S`
    victim   any bytes; each character that is not a plain letter, digit, dot, dash or underscore becomes `_`
    random   6 bytes
    """
    slug = "".join(c if c in _SLUG else "_" for c in victim.decode("utf-8", "replace")[:_SLUG_MAX])
    return ContainerId(f"{utc}.{milliseconds:03d}Z-{slug}-{random.hex()}")


def is_container_id(text: str) -> bool:
    """Whether the text has the form of an id: a directory of any other name in the store is not ours."""
    slug, random = text[_TIME_CHARS : -ID_RANDOM_CHARS - 1], text[-ID_RANDOM_CHARS - 1 :]
    if not text.isascii() or not len(slug) + _TIME_CHARS + 1 + ID_RANDOM_CHARS == len(text) <= ID_MAX_BYTES:
        return False
    is_time = (text[:8] + text[9:15] + text[16:19]).isdigit() and text[8] + text[15] + text[19:21] == "T.Z-"
    return is_time and len(slug) <= _SLUG_MAX and _SLUG.issuperset(slug) and random[0] == "-" and is_hex(random[1:])


def successor(container: ContainerId, random: bytes) -> ContainerId:
    """What a container is called in the directory of its state that takes this one's place.

    random  6 bytes
    """
    return ContainerId(container[:-ID_RANDOM_CHARS] + random.hex())


def is_of(called: ContainerId, container: ContainerId) -> bool:
    """Whether a container that is called so may be the one with that id, or have taken its place."""
    return called[:-ID_RANDOM_CHARS] == container[:-ID_RANDOM_CHARS]


def is_volume_id(text: str) -> bool:
    """Whether a text has the form of a volume's id."""
    return len(text) == _VOLUME_ID_CHARS and is_hex(text)


def is_hex(text: str) -> bool:
    """Whether a text has hexadecimal digits alone, small ones."""
    return _HEX.issuperset(text)


def whose(name: bytes) -> int | None:
    """The user in a name of the form `<uid>` or `<uid>.<12 hex digits>`; None for any other name."""
    digits, dot, suffix = name.partition(b".")
    if not digits.isdigit() or len(digits) > len(str(_MOST_UID)) or digits != b"%d" % int(digits):
        return None
    if dot and (len(suffix) != N_HEX or not _HEX_BYTES.issuperset(suffix)):
        return None
    return uid if (uid := int(digits)) <= _MOST_UID else None


def user_store(uid: int) -> Name:
    """The name of the store that a user makes; where something else has it, a dot and 12 hex digits follow."""
    return Name(_OF_USER + b"%d" % uid)


def whose_store(name: bytes) -> int | None:
    """The user whose own store has such a name; None for any other name, that of root's store among them."""
    return whose(name[len(_OF_USER) :]) if name.startswith(_OF_USER) else None


def split(path: bytes) -> list[Name]:
    """The components of a relative path.

    Raises  ValueError for an absolute path, an empty one, `.`, `..`, an empty component or a NUL:
            records and pointers are written by users
    """
    names = path.split(b"/")
    if any(name in (b"", b".", b"..") or b"\0" in name for name in names):
        raise ValueError("not a plain relative path")
    return [Name(name) for name in names]


def ends_in_dots(path: bytes) -> bool:
    """Whether a path's last component is `.` or `..`, which name a directory but not its entry in its parent."""
    return path.rstrip(b"/").rpartition(b"/")[2] in (b".", b"..")


def join(*parts: bytes) -> RelPath:
    """Relative parts put together; empty ones vanish."""
    return RelPath(b"/".join(part for part in parts if part))
