"""POSIX ACLs as the kernel takes them in xattrs.

Source  include/uapi/linux/posix_acl_xattr.h
"""

from __future__ import annotations

import struct

ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
NOBODY = 0xFFFFFFFF
"""The id of an entry that is not for a named user or group."""
USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 1, 2, 4, 8, 16, 32


def acl(*entries: tuple[int, int, int]) -> bytes:
    """(tag, permissions, id) each, sorted by tag."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
