"""One call made with another user's ids, groups, capabilities and umask; and back to our own, whatever happens.

The C library's calls for ids take all threads along, and are not for this: what is used here is one thread's alone. The
kernel counts each of these changes as one of privileges: the process is not dumpable and has no parent-death signal
from then on, and nothing of ours rests on either.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, NoReturn, ParamSpec, TypeVar

from fusefs.linux.capabilities import at_rest, take_up, with_effective
from fusefs.linux.syscalls import setfsgid, setfsuid, setgroups

P = ParamSpec("P")
R = TypeVar("R")

NO_GROUP = 0xFFFF_FFFE
"""The last one there can be, which nothing belongs to."""
NO_ID = 0xFFFF_FFFF
"""No id: setfsuid(2) and its like then change nothing, and return the present one."""


class ThreadCredentials(NamedTuple):
    """The credentials that a call is made with.

    uid, gid      of the filesystem; 0: the thread's own. With another uid the kernel takes the thread's capabilities
                  over files away, and gives them back
    groups        supplementary; a thread that acts as others is in none but its own
    capabilities  that are effective, as bits, of those that the thread has; None: what the uid leaves
    umask         None: the thread's own
    Source        setfsuid(2); cap_task_fix_setuid in the kernel's security/commoncap.c
    """

    uid: int = 0
    gid: int = 0
    groups: Sequence[int] = ()
    capabilities: int | None = None
    umask: int | None = None


ITSELF = ThreadCredentials()


def in_group(gid: int) -> ThreadCredentials:
    """Root itself, in another group: a set-group-ID bit is only given by its members. Users are members already."""
    return ITSELF if os.geteuid() else ThreadCredentials(gid=gid)


@cache
def in_no_group() -> ThreadCredentials:
    """Root itself, which keeps no set-group-ID bit for being in the file's group: its own is 0.

    In a user namespace no id is known that nothing belongs to.
    """
    with open("/proc/self/gid_map", "rb") as mapped:
        knows_all = mapped.read().split() == [b"0", b"0", b"4294967295"]
    return in_group(NO_GROUP) if knows_all else ITSELF


def call_as(who: ThreadCredentials, act: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """What one call returns that is made with these credentials. It must neither suspend nor start a thread.

    A thread that doesn't get its own identity back ends the process: nothing may be done as the wrong one.
    Raises  OSError EPERM: these ids can't be had here (another user namespace)
    """
    uid, gid, groups, capabilities, umask = who
    effective = b"" if capabilities is None else with_effective(capabilities)
    if groups and not _may_have_groups():  # there would be no way back, either
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))
    own_uid = own_gid = own_umask = -1
    is_itself = False
    try:
        try:
            if umask is not None:
                own_umask = os.umask(umask)
            if groups:
                setgroups(groups)
            if gid:
                own_gid = setfsgid(gid)
            if uid:
                own_uid = setfsuid(uid)
            if effective:
                take_up(effective)
            # Neither says whether it has worked.
            if (gid and setfsgid(NO_ID) != gid) or (uid and setfsuid(NO_ID) != uid):
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            return act(*args, **kwargs)
        finally:
            if own_uid >= 0:
                setfsuid(own_uid)
            if own_gid >= 0:
                setfsgid(own_gid)
            if effective:
                take_up(at_rest())
            if groups:
                setgroups(())
            if own_umask >= 0:
                os.umask(own_umask)
            is_itself = (own_gid < 0 or setfsgid(NO_ID) == own_gid) and (own_uid < 0 or setfsuid(NO_ID) == own_uid)
    finally:
        if not is_itself:
            _end()


@cache
def _may_have_groups() -> bool:
    """Whether our user namespace allows groups."""
    with open("/proc/self/setgroups", "rb") as said:
        return said.read() != b"deny\n"


def _end() -> NoReturn:
    os.write(2, b"trashd: a thread did not get its own identity back\n")
    os._exit(os.EX_SOFTWARE)
