"""POSIX ACLs as the kernel takes them in xattrs, and a file's capabilities.

Source  include/uapi/linux/posix_acl_xattr.h, capability.h
"""

import struct

ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
CAPABILITY = "security.capability"
CAN_BIND = bytes.fromhex("0100000200040000000000000000000000000000")
"""cap_net_bind_service=ep, as setcap writes it."""
NOBODY = 0xFFFFFFFF
"""The id of an entry that is not for a named user or group."""
USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 1, 2, 4, 8, 16, 32


def acl(*entries: tuple[int, int, int]) -> bytes:
    """(tag, permissions, id) each, sorted by tag."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
