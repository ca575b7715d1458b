"""The extended attributes that are asked of every file, and what is remembered of them: a value, or that there is none.

`ls -l`, `cp -p` and `rsync -A` ask for ACLs, `ls --color` for capabilities, `rsync -X` for all names; and the kernel
asks itself, before it lets a process in, runs a program or writes.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from struct import Struct
from typing import Final

ACCESS_ACL, DEFAULT_ACL = b"system.posix_acl_access", b"system.posix_acl_default"
ACLS: Final = frozenset({ACCESS_ACL, DEFAULT_ACL})
CAPABILITY, LABEL = b"security.capability", b"security.selinux"
NAMES: Final = b""
"""Stands for the list of all names; its value is these, each ended by a zero byte, as listxattr(2) tells them."""

Answers = Mapping[bytes, bytes | int]
"""By name what it was answered: the value, or an errno."""
UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
"""After one of these answers there is no need to ask about the next file."""

_ABSENT: Final = UNSUPPORTED | {errno.ENODATA}
"""There is none; any other error may be over the next time."""
ASKED_OF_ALL: Final = (NAMES, ACCESS_ACL, DEFAULT_ACL, CAPABILITY, LABEL)
"""Numbered as in mount/native/prefetch.c."""
_NUMBERS: Final = {name: number for number, name in enumerate(ASKED_OF_ALL)}
_LONGEST_BYTES = 4096
_ONE = Struct("=IBi")
"""The uid that was told; the number of the name; and the bytes of the value that follows, or a negative errno."""

Known = dict[tuple[int, bytes], bytes | int]
"""Answers by the uid that was told, and the name; uid 0: every user would be told the same, or it is root's."""


def is_asked_of_all(name: bytes) -> bool:
    """Whether it is one of these: of others, some of which change by themselves, nothing is remembered."""
    return name in _NUMBERS


def pack(known: Known) -> bytes:
    """A few bytes for what may be remembered of some answers: no errors, nothing long, no other names.

    And no file's capabilities: what a program may is asked each time that it is run.
    ENOSYS is told as EOPNOTSUPP: to the kernel's FUSE it would mean all that there are.
    """
    parts = []
    for (uid, name), answer in known.items():
        if name not in _NUMBERS:
            continue
        if isinstance(answer, int):
            if answer in _ABSENT:
                number = errno.EOPNOTSUPP if answer in UNSUPPORTED else answer
                parts.append(_ONE.pack(uid, _NUMBERS[name], -number))
        elif name != CAPABILITY and len(answer) <= _LONGEST_BYTES:
            parts.append(_ONE.pack(uid, _NUMBERS[name], len(answer)) + answer)
    return b"".join(parts)


def unpack(packed: bytes, at: int = 0) -> Known:
    """What was packed, from an offset on."""
    known: Known = {}
    while at < len(packed):
        uid, number, size = _ONE.unpack_from(packed, at)
        at += _ONE.size
        if size < 0:
            known[uid, ASKED_OF_ALL[number]] = -size
        else:
            known[uid, ASKED_OF_ALL[number]] = packed[at : at + size]
            at += size
    return known
