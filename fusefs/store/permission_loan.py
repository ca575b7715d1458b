"""The loan that a rename may need: an owner's permission on a directory, lent for that moment and taken back."""

from __future__ import annotations

import os
import stat

from fusefs.core.errors import NotPermitted
from fusefs.linux.fd import Fd
from fusefs.store.container import HeldContainer
from fusefs.store.victim_rename import VisibleRename

_LOAN = 0o700


def loan(st: os.stat_result) -> int | None:
    """The mode to go back to, if we own a directory whose mode forbids what a move to another parent needs.

    Moving it changes its `..`, so the kernel asks for write permission on itself; reading its likeness asks for
    read and search. Its owner alone may set both for that moment.
    """
    uid = os.geteuid()
    if uid == 0 or st.st_uid != uid or not stat.S_ISDIR(st.st_mode) or st.st_mode & _LOAN == _LOAN:
        return None
    return stat.S_IMODE(st.st_mode)


def lend(held: HeldContainer, fd: Fd, mode: int | None, visible: VisibleRename | None = None) -> None:
    """Give the owner what the move needs; the record says so already, so that recovery takes it back.

    visible  of a name that others see; the mount would go by the mode that it remembers
    Raises   NotPermitted if the set-group-id bit would be lost by it: chmod drops it for users not in the group
    """
    if mode is None:
        return
    kernel = held.folder.store.kernel
    if mode & stat.S_ISGID and kernel.fstat(fd).st_gid not in (os.getegid(), *os.getgroups()):
        raise NotPermitted("its mode has set-group-id for a group that you are not in, and forbids you to move it")
    kernel.chmod(fd, mode | _LOAN)
    if visible is not None:
        visible.refresh(held)


def take_back(held: HeldContainer, fd: Fd, mode: int | None, visible: VisibleRename | None = None) -> None:
    """The mode as it was before the loan; nothing is touched if it is that already.

    For a set-group-id directory of a group that its owner is not in even the same mode again would drop the bit.
    visible  as for `lend`; a killed process may not have told it
    """
    if mode is None:
        return
    kernel = held.folder.store.kernel
    if stat.S_IMODE(kernel.fstat(fd).st_mode) != mode:
        kernel.chmod(fd, mode)
    if visible is not None:
        visible.refresh(held)
