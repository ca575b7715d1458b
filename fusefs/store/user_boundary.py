"""The boundary between users, which root's commands never carry anything across: one rule for all of them.

Taking (plan, sweep): from a directory of root's root goes into any; from one user's directory into another user's only
if that one was in that place before (`SeenDirectories`): a user may have moved it there since. The reaper does the same
by times of change (reaper/removal_stops.py).
Giving (move, restore): root puts something into a directory that is there only if nobody gets by that what that user
could not have had: the name of a directory proves nothing about who made it.

Other users than root need no such rule: the kernel asks for their rights.
Source  the unsafe transitions of systemd-tmpfiles(8), src/basic/fs-util.c
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from typing import NamedTuple, Self

from fusefs.core.errors import AcrossUsers
from fusefs.core.identity import Identity, Likelihood, compare
from fusefs.core.names import Name, RelPath
from fusefs.core.printable_names import printable
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import OTHERS_WRITE, Kernel
from fusefs.linux.runtime_directories import lasting_dir, make_dir, read_file, replace_file
from fusefs.store.backing_and_mount import READABLE, BackingAndMount, suppress_errno
from fusefs.store.deep_path import DeepOpener, walk_inwards

_HEAD = b"trashd directories seen 1\n"
_DIGEST_BYTES, _UID_BYTES = 16, 4
_ENTRY_BYTES = _DIGEST_BYTES + _UID_BYTES
_SEEN_MAX, _SEEN_MAX_EACH = 65_536, 8_192
"""Directories that are remembered, and those of them in one user's: more of them are never entered."""
_NOTES_MAX_BYTES = 16 << 20


def is_bounded() -> bool:
    """Whether we are root, whom the kernel refuses nothing."""
    return os.geteuid() == 0


# Giving.


def may_give(kernel: Kernel, there: Fd, owner: int, like: Fd | None = None, recorded: Identity | None = None) -> bool:
    """Whether we may put something into a directory that is there.

    It may be root's, or the owner's, if nobody else can write in it. The owner's may be open to others as well if the
    directory that the thing comes from is open to the same: they could take it away before, too. The owner's closed
    directory is none for what lay in an open one, where others may have put it.
    owner     of the directory that the thing comes from, or of the thing if that is not known
    like      that directory, if it is there
    recorded  the directory that it was taken from
    Raises    OSError
    """
    if not is_bounded() or (recorded and compare(kernel.identify(there), recorded) is Likelihood.SAME):
        return True
    st = kernel.fstat(there)
    if _is_closed(st) and st.st_uid == 0:
        return True
    if st.st_uid != owner:
        return False
    if like is None:
        return _is_closed(st)
    source = kernel.fstat(like)
    if _is_closed(st) and _is_closed(source):
        return True
    return (st.st_gid, st.st_mode) == (source.st_gid, source.st_mode) and _acls(kernel, there) == _acls(kernel, like)


def check_giving(
    kernel: Kernel, there: Fd, path: bytes, owner: int, like: Fd | None = None, recorded: Identity | None = None
) -> None:
    """Raise AcrossUsers unless `may_give`. path: of the directory, for people"""
    if not may_give(kernel, there, owner, like, recorded):
        raise AcrossUsers(f"{printable(path) or '.'} is another user's, or others can write in it")


def _is_closed(st: os.stat_result) -> bool:
    """Whether nobody but root and its owner can take something out of a directory, or put something into it.

    Into a sticky one of root's everybody can put something; no more than that.
    """
    return not st.st_mode & OTHERS_WRITE or (st.st_uid == 0 and bool(st.st_mode & stat.S_ISVTX))


def _acls(kernel: Kernel, fd: Fd) -> dict[str, bytes]:
    acls = (name for name in kernel.xattr_names(fd.path()) if name.startswith("system."))
    return {name: kernel.read_xattr(fd.path(), name) for name in acls}


# Taking.


class SeenDirectories(NamedTuple):
    """Directories of users in other users' directories: those that an earlier run has seen, and those of this one.

    Workers that are forked note what they see in the same file, which has no name.
    rule  whose run: what one rule has seen says nothing to another
    """

    before: frozenset[bytes]
    notes: Fd
    rule: bytes = b""

    def __enter__(self) -> Self:
        """Own the notes for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close them."""
        self.notes.close()

    def was_there(self, kernel: Kernel, fd: Fd, whose: int) -> bool:
        """Whether an earlier run saw a directory (its handle) in the directory that it is in; the next one will know.

        whose   the user in whose directory it is
        Raises  OSError
        """
        import hashlib  # a swap is spared it

        with _open_parent(fd) as above:
            both = (kernel.identify(above), kernel.identify(fd))
        if not all(one.handle or one.btime_ns for one in both):
            return False  # nothing tells it from another one of that number
        place = (self.rule, os.fstatvfs(fd).f_fsid, *both)
        digest = hashlib.blake2b(repr(place).encode(), digest_size=_DIGEST_BYTES).digest()
        if os.fstat(self.notes).st_size < _NOTES_MAX_BYTES:
            os.write(self.notes, digest + whose.to_bytes(_UID_BYTES, "little"))
        return digest in self.before

    def save(self) -> None:
        """Let the next run know; nothing is touched if there is nothing to know. Raises  OSError"""
        size = os.fstat(self.notes).st_size
        noted = _entries(os.pread(self.notes, size, 0))
        if not noted:
            return
        path = _path()
        each: Counter[bytes] = Counter()
        kept = list[bytes]()
        for entry in dict.fromkeys([*noted, *_read(path)]):
            each[entry[_DIGEST_BYTES:]] += 1
            if each[entry[_DIGEST_BYTES:]] <= _SEEN_MAX_EACH:
                kept.append(entry)
        make_dir(os.path.dirname(path))
        replace_file(path, _HEAD + b"".join(kept[:_SEEN_MAX]), 0o600)


def load_seen() -> SeenDirectories:
    """What earlier runs of root's plans have seen; its caller's. Raises  OSError"""
    before = frozenset(entry[:_DIGEST_BYTES] for entry in _read(_path()))
    return SeenDirectories(before, Fd(os.memfd_create("trashd-seen")))


def _path() -> bytes:
    return os.path.join(lasting_dir(), b"plan-directories")


def _read(path: bytes) -> list[bytes]:
    """The entries of the file, if it is root's alone; what can't be understood has none: then nothing was seen."""
    with suppress_errno(errno.ENOENT, errno.EPERM, errno.EFBIG):
        text = read_file(path, len(_HEAD) + _SEEN_MAX * _ENTRY_BYTES, owner=os.geteuid())
        if text.startswith(_HEAD):
            return _entries(text[len(_HEAD) :])
    return []


def _entries(text: bytes) -> list[bytes]:
    return [text[at : at + _ENTRY_BYTES] for at in range(0, len(text) - _ENTRY_BYTES + 1, _ENTRY_BYTES)]


def whose_is(kernel: Kernel, fd: Fd, whose: int, seen: SeenDirectories | None = None) -> int | None:
    """Whose the things in a directory are to root who comes to it; None: it is not entered.

    A directory of root's that lies in a user's is that user's: who could have moved it there?
    whose   the same of the directory that it is in; 0: of root's, from which root goes anywhere
    seen    without it no run was earlier
    Raises  OSError
    """
    uid = kernel.fstat(fd).st_uid
    if whose == 0 or uid in (0, whose):
        return uid or whose
    return uid if seen is not None and seen.was_there(kernel, fd, whose) else None


def is_parent(kernel: Kernel, inode: tuple[int, int], fd: Fd) -> bool:
    """Whether a directory is in the one with that st_dev and st_ino. Raises  OSError"""
    with _open_parent(fd) as above:
        st = kernel.fstat(above)
    return (st.st_dev, st.st_ino) == inode


def _open_parent(fd: Fd) -> Fd:
    return Fd(os.open(b"..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd))


def may_take_whole(kernel: Kernel, top: Fd, whose: int, seen: SeenDirectories | None) -> bool:
    """Whether root may take a directory with all that it holds: there is none in it that `whose_is` would not enter.

    An empty one may go: who could have moved it there could have removed it.
    top     open for reading
    whose   of the directory that it is in
    Raises  OSError
    """
    is_taken = True
    within: list[int] = []
    with DeepOpener(kernel, BackingAndMount(top)) as opener:

        def enter(path: RelPath) -> list[Name]:
            nonlocal is_taken
            with opener.beneath(path, flags=READABLE) as here:
                inside = whose_is(kernel, here.fd, within[-1] if within else whose, seen)
                within.append(inside or 0)
                if inside is None:
                    is_taken &= kernel.is_empty(here.fd)
                    return []
                with kernel.scan(here.fd) as entries:
                    return [Name(os.fsencode(one.name)) for one in entries if one.is_dir(follow_symlinks=False)]

        walk_inwards(RelPath(b""), enter, lambda _path: within.pop())
    return is_taken
