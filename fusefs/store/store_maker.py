"""Whether root made a store of root's, or a user did who may move root's directories and gave them a store's names.

That all of it is root's today proves nothing: a mode is today's, and the moves were then. So `init` notes on `.trashd`
which directory it is, in an attribute that no user can set, whatever they may write; a copy has another identity. Users
can read it, so that root's child processes know too. Where the filesystem has no such attributes, or this
root may not set them (in a container), root's registry of stores names what it made.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from enum import Enum

from fusefs.core.identity import Likelihood, compare, from_words, in_words
from fusefs.core.printable_names import shell_word
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.backing_and_mount import FULL, suppress_errno
from fusefs.store.registry_lines import registered

XATTR = "security.trashd"
"""Only a process with CAP_SYS_ADMIN in the user namespace that mounted the filesystem can set one in `security.`.

Source  xattr(7), cap_inode_setxattr() in security/commoncap.c
"""
_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EACCES, errno.E2BIG, errno.EROFS, *FULL)
UNNOTED = (
    "nothing on the store itself says that root made it, only this machine's list of stores (/var/lib/trashd/stores)"
)
"""What is told of a store of root's on which that could not be noted."""


class StoreMaker(Enum):
    """Which user made a store, as far as that can be known.

    COPY     of a store that root made, by a user who could give it root's attribute
    UNKNOWN  not known
    """

    BY_ROOT = "by root"
    COPY = "copy"
    UNKNOWN = "unknown"


_WHOLE = [0, 0, (1 << 32) - 1]
"""Of /proc/self/uid_map in the first user namespace."""


def makes_common() -> bool:
    """Whether the store that the caller makes is one of root's for all users: whether what root notes on it counts.

    Without CAP_SYS_ADMIN, or in a user namespace, nothing can be noted, and in the next container nothing would show
    who made the store. There root makes one of his own, as any user.
    """
    if os.geteuid() != 0:
        return False
    from fusefs.linux.credentials import Capability, may_use  # a swap into a store that is there is spared it

    with open("/proc/self/uid_map", "rb") as ids:
        return may_use(Capability.SYS_ADMIN) and [int(word) for word in ids.read().split()] == _WHOLE


def note_made(kernel: Kernel, fd: Fd) -> bool:
    """Note on an opened `.trashd` that root made it; whether that could be. Raises  OSError"""
    with suppress_errno(*_CANNOT):
        kernel.set_xattr(fd, XATTR, in_words(kernel.identify(fd)).encode())
        return True
    return False


def is_noted(kernel: Kernel, fd: Fd) -> bool:
    """Whether it is noted on an opened `.trashd` that root made this very one. Raises  OSError"""
    return who_made(kernel, fd) is StoreMaker.BY_ROOT


def could_be_noted(kernel: Kernel, fd: Fd) -> bool:
    """Whether the filesystem of an opened `.trashd` keeps the attribute, for a root who may set it.

    A server's, or one in user space, may say that there is none, and take none: of it nobody knows before he tries.
    """
    try:
        os.getxattr(fd, XATTR)
    except OSError as error:
        return error.errno == errno.ENODATA and kernel.is_local(fd)
    return True


def what_unnoted_means(base_path: bytes) -> str:
    """What follows where nothing on the store of a directory says that root made it, and what helps."""
    volume = shell_word(base_path)
    return (
        "where that list is lost, and on other machines, root's commands and service leave it alone until "
        f"trashd init --known {volume}; trashd init {volume} by a root with CAP_SYS_ADMIN, which containers lack, "
        "notes it on the store, if the filesystem keeps attributes (security.*)"
    )


def who_made(kernel: Kernel, fd: Fd, places: Collection[bytes] = ()) -> StoreMaker:
    """Which user made the store of an opened `.trashd` of root's.

    places  paths of the directory that holds it, for which the caller, who is root, believes root's registry of stores
    Raises  OSError
    """
    found, noted = kernel.identify(fd), from_words(kernel.get_xattr(fd, XATTR) or b"")
    if noted is not None and compare(noted, found) is not Likelihood.OTHER:
        return StoreMaker.BY_ROOT
    named = (line.identity for line in (registered() if places else ()) if line.path in places)
    if any(compare(one, found) is not Likelihood.OTHER for one in named):
        return StoreMaker.BY_ROOT
    return StoreMaker.UNKNOWN if noted is None else StoreMaker.COPY


def way_out(base_path: bytes) -> str:
    """What helps where it is not known who made the store of a directory."""
    volume = shell_word(base_path)
    ours = f"if root made it, on another machine or in a copy's original: trashd init --known {volume}"
    other = f"else trashd init --replace {volume} sets it aside in a new one, and its owners empty it"
    return f"look into it; {ours}; {other}"
