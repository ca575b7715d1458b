"""The names of containers and stores, and types that keep bytes, IDs and paths apart."""

from __future__ import annotations

from typing import NewType

Name = NewType("Name", bytes)
"""One path component; never empty, `.` or `..`; without `/` or NUL."""

RelPath = NewType("RelPath", bytes)
"""Names joined by `/`, relative to the directory that holds the store; no leading slash, no `.` or `..`."""

ContainerId = NewType("ContainerId", str)
"""UTC time to the millisecond, a slug of the victim's name, and random digits; sorts by time, at most 200 bytes."""

VolumeId = NewType("VolumeId", str)
"""32 random hexadecimal digits; each store has its own ID."""

STORE = Name(b".trashd")
"""The store that root makes for all users of a volume."""
_OF_USER = STORE + b"-"
_MOST_UID = (1 << 32) - 2
N_HEX = 12
"""The number of hexadecimal digits appended to a name whose plain form is taken."""
ID_MAX_BYTES = 200
ID_RANDOM_CHARS = 12
"""The length of the random part at the end of an ID, which is enough for users to name an orphan."""
_SLUG_MAX = 120
_SLUG = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_HEX = frozenset("0123456789abcdef")
_NOT_NAMES = frozenset((b"", b".", b".."))
_HEX_BYTES = frozenset(b"0123456789abcdef")
_TIME_CHARS = len("YYYYMMDDTHHMMSS.mmmZ-")
_VOLUME_ID_CHARS = 32


def make_id(utc: str, milliseconds: int, victim: bytes, random: bytes) -> ContainerId:
    """Make a container's ID.

    utc      in the form `%Y%m%dT%H%M%S`
    victim   the victim's name; each character that is not an ASCII letter, digit, dot, dash or underscore becomes `_`
    random   6 bytes
    """
    slug = "".join(c if c in _SLUG else "_" for c in victim.decode("utf-8", "replace")[:_SLUG_MAX])
    return ContainerId(f"{utc}.{milliseconds:03d}Z-{slug}-{random.hex()}")


def is_container_id(text: str) -> bool:
    """Whether the text has the form of an ID. Directories in a store with other names were not made by trashd."""
    slug, random = text[_TIME_CHARS : -ID_RANDOM_CHARS - 1], text[-ID_RANDOM_CHARS - 1 :]
    if not text.isascii() or not len(slug) + _TIME_CHARS + 1 + ID_RANDOM_CHARS == len(text) <= ID_MAX_BYTES:
        return False
    is_time = (text[:8] + text[9:15] + text[16:19]).isdigit() and text[8] + text[15] + text[19:21] == "T.Z-"
    return is_time and len(slug) <= _SLUG_MAX and _SLUG.issuperset(slug) and random[0] == "-" and is_hex(random[1:])


def successor_id(container: ContainerId, random: bytes) -> ContainerId:
    """Return an ID for a container that replaces this one: the same ID with another random part.

    random  6 bytes
    """
    return ContainerId(container[:-ID_RANDOM_CHARS] + random.hex())


def may_be_same_container(called: ContainerId, container: ContainerId) -> bool:
    """Whether two IDs are equal except for the random part: either container may have replaced the other."""
    return called[:-ID_RANDOM_CHARS] == container[:-ID_RANDOM_CHARS]


def is_volume_id(text: str) -> bool:
    return len(text) == _VOLUME_ID_CHARS and is_hex(text)


def is_hex(text: str) -> bool:
    """Whether a text consists of lower-case hexadecimal digits."""
    return _HEX.issuperset(text)


def parse_uid_name(name: bytes) -> int | None:
    """Return the UID in a name of the form `<uid>` or `<uid>.<12 hex digits>`, or None for any other name."""
    digits, dot, suffix = name.partition(b".")
    if not digits.isdigit() or len(digits) > len(str(_MOST_UID)) or digits != b"%d" % int(digits):
        return None
    if dot and (len(suffix) != N_HEX or not _HEX_BYTES.issuperset(suffix)):
        return None
    return uid if (uid := int(digits)) <= _MOST_UID else None


def user_store_name(uid: int) -> Name:
    """Return the name of a user's own store. If it is taken, the store's name ends in a dot and 12 hex digits."""
    return Name(_OF_USER + b"%d" % uid)


def parse_user_store_name(name: bytes) -> int | None:
    """Return the owner of a user's own store from its name, or None for any other name, such as root's store."""
    return parse_uid_name(name[len(_OF_USER) :]) if name.startswith(_OF_USER) else None


def split_path(path: bytes) -> list[Name]:
    """Split a relative path into its components.

    Raises  ValueError for an absolute or empty path, and for `.`, `..`, an empty component or a NUL in it: users can
            write records and pointers, so their paths must be checked
    """
    names = path.split(b"/")
    if b"\0" in path or not _NOT_NAMES.isdisjoint(names):
        raise ValueError("not a plain relative path")
    return [Name(name) for name in names]


def ends_in_dots(path: bytes) -> bool:
    """Whether a path ends in `.` or `..`, which name a directory, but not the directory's entry in its parent."""
    return path.rstrip(b"/").rpartition(b"/")[2] in (b".", b"..")


def join_path(*parts: bytes) -> RelPath:
    """Join relative paths with `/`; empty ones are dropped."""
    return RelPath(b"/".join(part for part in parts if part))
