"""Which directory below `u/` is a user's folder: one look decides, for commands, service and mount alike.

An owner is not who put a directory there: whoever may write in a directory can move it, a group mate too. But moving it
to another parent takes write permission on itself, so what is exactly 0700 only its owner can have put there. What is
not exactly so is refused, and told; nobody ever mends it, for that would bless what somebody planted.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

from fusefs.core.names import Name, printable
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.layout import FOLDER_MODE, FOLDERS, Store, UserFolder
from fusefs.store.sides import DIRECTORY

_HEX = frozenset(b"0123456789abcdef")
N_HEX = 12
_MOST_UID = (1 << 32) - 2
_NO_DIRECTORY = (errno.ENOTDIR, errno.ELOOP)
_MOUNTED = "something is mounted over it"
_NONE = "it is no directory"


class Refusal(NamedTuple):
    """A name below `u/` that is a user's by what it says, and not his folder.

    uid    whose it would be
    owner  whose it is, if that can be seen
    why    a clause for a person
    """

    name: Name
    uid: int
    owner: int | None
    why: str


class Census(NamedTuple):
    """Who has a folder in a store: its inode number by uid; and what is refused."""

    inos: dict[int, int]
    refused: list[Refusal]


class Found(NamedTuple):
    """A user's folder (O_PATH)."""

    name: Name
    fd: Fd


def whose(name: bytes) -> int | None:
    """The user whose folder has such a name, `<uid>` or `<uid>.<12 hex digits>`; None for any other name."""
    digits, dot, suffix = name.partition(b".")
    if not digits.isdigit() or len(digits) > len(str(_MOST_UID)) or digits != b"%d" % int(digits):
        return None
    if dot and (len(suffix) != N_HEX or not _HEX.issuperset(suffix)):
        return None
    return uid if (uid := int(digits)) <= _MOST_UID else None


def find_user(kernel: Kernel, u_fd: Fd, uid: int) -> Found | None:
    """A user's folder in the `u/` of any store, trusted or not, for the caller to close; None if he has none.

    It is `u/<uid>`, or the first of `u/<uid>.<hex>` where that is missing or refused.
    Raises  OSError
    """
    found = _look(kernel, u_fd, uid, plain_name(uid))  # all of u/ is read only if the plain one is not it
    if isinstance(found, Found):
        return found
    return _choose(kernel, u_fd, uid, _names(kernel, u_fd).get(uid, []))[0]


def open_user(store: Store, uid: int) -> UserFolder | None:
    """The same, of an opened store."""
    found = find_user(store.kernel, store.u_fd, uid)
    return None if found is None else UserFolder(store, uid, found.name, found.fd)


def all_users(store: Store, refused: list[Refusal], only: int | None = None) -> Iterator[UserFolder]:
    """The folders of all users, one a user, each opened when it is asked for; whoever takes one closes it.

    refused  gets what is no folder
    only     of this user alone
    Raises   OSError
    """
    for uid, names in _names(store.kernel, store.u_fd).items():
        if only is None or uid == only:
            found, others = _choose(store.kernel, store.u_fd, uid, names)
            refused.extend(others)
            if found is not None:
                yield UserFolder(store, uid, found.name, found.fd)


def take_census(store: Store, only: int | None = None) -> Census:
    """Look once at all that is below `u/`, or at one user's alone. Raises  OSError"""
    census = Census({}, [])
    for folder in all_users(store, census.refused, only):
        with folder:
            census.inos[folder.uid] = store.kernel.fstat(folder.fd).st_ino
    return census


def named_users(store: Store) -> set[int]:
    """The users whose names there are in a store; who has no folder there may have one of them. Raises  OSError"""
    return set(_names(store.kernel, store.u_fd))


def why_refused(folder: UserFolder) -> str:
    """Why a folder that is open is not its user's; empty if it is."""
    kernel = folder.store.kernel
    return why_not(kernel, folder.fd, kernel.fstat(folder.fd), folder.uid)


def plain_name(uid: int) -> Name:
    """The first name that a user's folder may have."""
    return Name(b"%d" % uid)


def _names(kernel: Kernel, u_fd: Fd) -> dict[int, list[Name]]:
    """The names below `u/` that may be users' folders, by uid, the plain one first: anybody makes names there."""
    named: dict[int, list[Name]] = {}
    for name in kernel.list(u_fd):
        uid = whose(name)
        if uid is not None:
            named.setdefault(uid, []).append(Name(name))
    return named


def _choose(kernel: Kernel, u_fd: Fd, uid: int, names: list[Name]) -> tuple[Found | None, list[Refusal]]:
    """The first of a user's names that is his folder, for the caller to close; what is refused."""
    chosen: Found | None = None
    refused: list[Refusal] = []
    with ExitStack() as owned:
        for name in names:
            found = _look(kernel, u_fd, uid, name) if chosen is None else _look_aside(kernel, u_fd, uid, name, chosen)
            if isinstance(found, Refusal):
                refused.append(found)
            elif found is not None:
                chosen = found
                owned.enter_context(chosen.fd)
        owned.pop_all()
    return chosen, refused


def _look(kernel: Kernel, u_fd: Fd, uid: int, name: Name) -> Found | Refusal | None:
    """What has one of a user's names: his folder, or why it is not; None if nothing has it.

    Raises  OSError for what says nothing of it, such as EMFILE
    """
    try:
        fd = kernel.open_beneath(u_fd, name, DIRECTORY)
    except FileNotFoundError:
        return None
    except OSError as error:
        return _refused_unopened(kernel, u_fd, uid, name, error)
    with ExitStack() as owned:
        owned.enter_context(fd)
        st = kernel.fstat(fd)
        why = why_not(kernel, fd, st, uid)
        if why:
            return Refusal(name, uid, st.st_uid, why)
        owned.pop_all()
    return Found(name, fd)


def _look_aside(kernel: Kernel, u_fd: Fd, uid: int, name: Name, chosen: Found) -> Refusal | None:
    """Why a user's name beside his folder is none, seen from outside; None if nothing has it."""
    try:
        st = kernel.stat(u_fd, name)
    except FileNotFoundError:
        return None
    except OSError as error:
        return _refused_unopened(kernel, u_fd, uid, name, error)
    why = not_private(st, uid) or f"it is one too many: u/{printable(chosen.name)} is used"
    return Refusal(name, uid, st.st_uid, why)


def _refused_unopened(kernel: Kernel, u_fd: Fd, uid: int, name: Name, error: OSError) -> Refusal | None:
    if error.errno == errno.EXDEV:
        return Refusal(name, uid, None, _MOUNTED)
    if error.errno not in _NO_DIRECTORY:
        raise error
    try:
        owner = kernel.stat(u_fd, name).st_uid
    except FileNotFoundError:
        return None
    return Refusal(name, uid, owner, f"{_NONE}, but something of uid {owner}")


def why_not(kernel: Kernel, fd: Fd, st: os.stat_result, uid: int) -> str:
    """Why a directory is not a user's folder; empty if it is. What of it is missing is made when it is needed.

    The access ACL of what is exactly 0700 has an empty mask, and lets nobody else in. A default ACL gives nothing
    away either, since all that is made in a folder is 0700 or 0600; it is not looked at.
    """
    why = not_private(st, uid)
    if why or os.geteuid() not in (0, uid):
        return why
    for part in FOLDERS:
        try:
            why = not_private(kernel.stat(fd, part), uid)
        except FileNotFoundError:
            continue
        except PermissionError:
            return ""  # root of another host; its owner's process looks (with_lower)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            why = _MOUNTED
        if why:
            return f"{part.decode()}/ in it: {why}"
    return ""


def not_private(st: os.stat_result, uid: int) -> str:
    """Why something is not a directory that only one user can have put anything into; empty if it is."""
    if not stat.S_ISDIR(st.st_mode):
        return _NONE
    if st.st_uid != uid:
        return f"it belongs to uid {st.st_uid}"
    mode = stat.S_IMODE(st.st_mode)
    return "" if mode == FOLDER_MODE else f"its mode is {mode:04o} instead of {FOLDER_MODE:04o}"
