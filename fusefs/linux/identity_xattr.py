"""A mark on a directory, for filesystems where nothing else tells whether it is the one that was there before."""

from __future__ import annotations

import os
from contextlib import suppress

from fusefs.core.identity import MARK, Identity, Likelihood, compare
from fusefs.core.names import is_hex

XATTR = "user.trashd.fresh"
_N_DIGITS = 32


def needs_mark(identity: Identity) -> bool:
    """Whether nothing that an identity has proves anything, not even that it is itself."""
    return compare(identity, identity) is Likelihood.UNKNOWN


def mark(fd: int) -> None:
    """Mark a directory of ours, which is open for reading, if its filesystem has attributes for that."""
    with suppress(OSError):
        os.setxattr(fd, XATTR, os.urandom(16).hex().encode())


def unmark(fd: int) -> None:
    """Take the mark off again. Raises  OSError"""
    os.removexattr(b"/proc/self/fd/%d" % fd, XATTR)


def read_mark(fd: int) -> str:
    """The mark of what an fd of any kind holds, as a handle; empty if there is none, or none that could be ours."""
    try:
        digits = os.getxattr(b"/proc/self/fd/%d" % fd, XATTR).decode("ascii", "replace")
    except OSError:
        return ""
    return MARK + digits if len(digits) == _N_DIGITS and is_hex(digits) else ""
