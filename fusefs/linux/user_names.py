"""Users and groups as people type them."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable

from fusefs.core.printable_names import printable

_ID_MAX = (1 << 32) - 2
"""The largest id; the number after it means "no id" to the kernel."""


def uid_of(text: str) -> int:
    """A user's number, by name or number; a name that looks like a number is a name, as for find and chown.

    Raises  ValueError with a message: there is none
    """
    return _number(text, "user", lambda name: pwd.getpwnam(name).pw_uid)


def gid_of(text: str) -> int:
    """A group's number, by name or number; a name that looks like a number is a name."""
    import grp

    return _number(text, "group", lambda name: grp.getgrnam(name).gr_gid)


def _number(text: str, what: str, find: Callable[[str], int]) -> int:
    try:
        return find(text)
    except (KeyError, UnicodeEncodeError):  # a lone surrogate that no name can have
        pass
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(_ID_MAX)) and int(text) <= _ID_MAX):
        raise ValueError(f"there is no {what} {printable(os.fsencode(text))}")
    return int(text)
