"""Directories of a tree of any depth, opened with few fds and without `..`; and which of them root may enter.

What stays open on a long way down spares walking it from the top for each directory below. That would take the square
of its length: minutes for a chain of 10,000 directories.

Root's commands never carry anything across the boundary between users: one rule for all of them.
Taking (plan, sweep): from a directory of root's root goes into any; from one user's directory into another user's only
if that one was in that place before (`SeenDirectories`): a user may have moved it there since. The reaper does the same
by times of change (reaper/not_removed.py).
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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Generic, NamedTuple, Self, TypeVar

from fusefs.core.errors import AcrossUsers
from fusefs.core.identity import Identity, Likelihood, compare
from fusefs.core.names import Name, RelPath, join, split
from fusefs.core.printable_names import printable
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.kernel import OTHERS_WRITE, Kernel
from fusefs.linux.runtime_directories import lasting_dir, make_dir, read_file, replace_file
from fusefs.linux.syscalls import WALK_MAX_BYTES
from fusefs.store.backing_and_mount import DIRECTORY, READABLE, BackingAndMount, check_wholly, suppress_errno

D = TypeVar("D", bound=AbstractContextManager[object])
_FDS_MAX = 64
_NEAR_BYTES = 512
_APART = 1000
"""Bytes of path between two directories that stay open for `DeepOpener`, about; a shorter path needs none."""
_MOST = 32
Make = Callable[[BackingAndMount, bytes, bytes], None]
"""Makes the directories of a path that are missing: below this one, which has that path, as far as this leads on."""
MakeLike = Callable[[Fd, Name, Fd], None]
"""Makes one directory: in this one, of that name, like the other (O_PATH both); unless it appears before."""


class _OpenDirectories(Generic[D]):
    """The open directories on a way down from a top directory, which stays its owner's.

    When there are too many, every other one is closed. So they lie dense at the end and ever sparser towards the top.

    A mark says how far down a directory is: the length of the path to it, with one slash a name. The top's is 0.
    """

    def __init__(self, top: D, n_max: int) -> None:
        self._top = top
        self._n_max = n_max
        self._open: dict[int, D] = {}  # by mark, ascending

    def __enter__(self) -> Self:
        """Own what is open for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close all of it."""
        self._close_below(0)

    @property
    def mark(self) -> int:
        """Where the last one is."""
        return next(reversed(self._open), 0)

    def _last(self) -> D:
        return self._open[self.mark] if self._open else self._top

    def _keep(self, mark: int, directory: D) -> None:
        self._open[mark] = directory
        if len(self._open) > self._n_max:
            for every_other in list(self._open)[:-1:2]:
                self._open.pop(every_other).__exit__(None, None, None)

    def _close_below(self, mark: int) -> None:
        while self.mark > mark:
            self._open.popitem()[1].__exit__(None, None, None)


class Descent(_OpenDirectories[Fd]):
    """Where a walk of a tree is, which goes down by names, and back to directories that it came through.

    Going back to a directory that was closed walks there from the nearest one above, by its names, and keeps some on
    the way open again: a chain of n directories costs about n log n steps, not n².
    """

    def __init__(self, kernel: Kernel, top: Fd) -> None:
        """top: stays its owner's."""
        super().__init__(top, _FDS_MAX)
        self._kernel = kernel
        self._path = bytearray()

    @property
    def fd(self) -> Fd:
        """The directory where we are, readable; ours to close."""
        return self._last()

    def descend(self, name: Name) -> None:
        """Go into a directory of this one.

        Raises  OSError, and we are where we were: gone, no directory, a mount, not ours to open
        """
        self._keep(self.mark + 1 + len(name), self._kernel.open_dir(self.fd, name))
        self._path += b"/" + name

    def go_back(self, mark: int) -> None:
        """Go to a directory above. The caller looks whether it is the same as before: names may have moved.

        Raises  OSError, and we are somewhere above it
        """
        self._close_below(mark)
        del self._path[mark:]
        while (here := self.mark) < mark:
            stop = self._next_stop(here, mark)
            self._keep(stop, self._kernel.open_dir(self.fd, bytes(self._path[here + 1 : stop])))

    def _next_stop(self, here: int, mark: int) -> int:
        """Half the way that is left, as we are likely to come back to directories just above; at most a stride."""
        left = mark - here
        if left <= _NEAR_BYTES:
            return mark
        stop = self._path.rfind(b"/", here + 1, here + 1 + min(WALK_MAX_BYTES, max(left // 2, _NEAR_BYTES)))
        if stop < 0:  # FUSE may have names as long as that
            stop = self._path.find(b"/", here + 1)
        return stop if stop >= 0 else mark


class DeepOpener(_OpenDirectories[BackingAndMount]):
    """Opens directories of a tree by their paths, one after the other, from what is open on the way to the last one.

    A directory on the way that is moved meanwhile is still where it was for us. So all are closed when the way
    below them has cost as much as the way to them, which makes it no more than twice as long.
    """

    def __init__(self, kernel: Kernel, root: BackingAndMount) -> None:
        """root: where the paths begin; stays its owner's."""
        super().__init__(root, _MOST)
        self._kernel = kernel
        self._way = b""
        """To the last one that is open, with a slash at its end; what follows it doesn't count."""
        self._walked = 0

    def beneath(self, path: bytes, make: Make | None = None, flags: int = DIRECTORY) -> BackingAndMount:
        """A directory by its path from the root, empty for that itself; its caller's. See `BackingAndMount.beneath`.

        make    asked for what is missing
        Raises  OSError
        """
        at = self._reach(path, make)
        return self._step(path, at, len(path), make, flags)

    def wholly(self, path: bytes, make: Make | None = None) -> BackingAndMount:
        """A directory below the root, on both sides if the root is. Raises  OSError: ESTALE as `wholly_beneath` does"""
        return check_wholly(self._top, self.beneath(path, make), path)

    def remove(self, path: bytes) -> None:
        """Remove an empty directory, where others see that. Raises  OSError"""
        upper, _, name = path.rpartition(b"/")
        with self.wholly(upper) as above:
            self._kernel.rmdir(above.names(), name)

    def _reach(self, path: bytes, make: Make | None) -> int:
        """Where in the path it goes on from the last directory on the way that is open now."""
        if self._walked > len(path):
            self._close_below(0)
            self._walked = 0
        while (at := self.mark) and not path.startswith(self._way[:at]):
            self._close_below(at - 1)
        while (end := path.find(b"/", at + _APART)) > 0:
            self._keep(end + 1, self._step(path, at, end, make, DIRECTORY))
            self._way = path[: (at := end + 1)]
        self._walked += len(path) - at
        return at

    def _step(self, path: bytes, at: int, end: int, make: Make | None, flags: int) -> BackingAndMount:
        above = self._last()
        try:
            return above.beneath(self._kernel, path[at:end], flags)
        except FileNotFoundError:
            if make is None:
                raise
            make(above, path[: max(at - 1, 0)], path[at:end])
        return above.beneath(self._kernel, path[at:end], flags)


class DeepOpeners:
    """`DeepOpener` of several trees, for as long as a piece of work takes."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._into: dict[BackingAndMount, DeepOpener] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for paths in self._into.values():
            paths.__exit__()
        self._into.clear()

    def into(self, root: BackingAndMount) -> DeepOpener:
        """That of a tree, whose root stays open longer than it is used."""
        if root not in self._into:
            self._into[root] = DeepOpener(self._kernel, root)
        return self._into[root]


def walk_inwards(start: RelPath) -> Iterator[tuple[RelPath, list[Name] | None]]:
    """Each directory of a tree by its path, twice: before those in it, and once more when they are done.

    It remembers names alone: the paths of all directories of a chain take the square of its length.
    Returns  with the path, the first time, a list: the caller adds the names of those in it that are to be entered too
    """
    path, pending = start, list[list[Name]]()
    while True:
        names = list[Name]()
        yield path, names
        pending.append(names)
        while not pending[-1]:
            pending.pop()
            yield path, None
            if not pending:
                return
            path = RelPath(os.path.dirname(path))
        path = join(path, pending[-1].pop())


def make_missing(kernel: Kernel, above: Fd, way: bytes, missing: bytes, models: DeepOpener, make: MakeLike) -> None:
    """Make what is missing of a path below a directory, like the directories of another tree.

    way      the path of the directory itself, the same in the other tree
    models   of the other tree
    Raises   OSError: ENOENT if that has none there any more
    """
    names = split(missing)
    here, n_there = _deepest(kernel, above, names)
    with closed_on_error(here):
        like = models.beneath(join(way, *names[:n_there])).fd
    for name in names[n_there:]:
        with here, like, closed_on_error(kernel.open_beneath(like, name, DIRECTORY)) as model:
            make(here, name, model)
            here, like = kernel.open_beneath(here, name, DIRECTORY), model
    here.close()
    like.close()


def _deepest(kernel: Kernel, above: Fd, names: list[Name]) -> tuple[Fd, int]:
    """The deepest directory of a path that is there, and how many parts of the path lead to it."""
    for count in range(len(names) - 1, 0, -1):
        with suppress(FileNotFoundError):
            return kernel.open_beneath(above, join(*names[:count]), DIRECTORY), count
    return kernel.open_beneath(above, b".", DIRECTORY), 0


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
        raise AcrossUsers(f"{printable(path) or '.'} (owned or writable by another user)")


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
            return False  # it may be another one of that number
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
    is_taken, within = True, [whose]
    with DeepOpener(kernel, BackingAndMount(top)) as opener:
        for path, names in walk_inwards(RelPath(b"")):
            if names is None:
                within.pop()
                continue
            with opener.beneath(path, flags=READABLE) as here:
                inside = whose_is(kernel, here.fd, within[-1], seen)
                within.append(inside or 0)
                if inside is None:
                    is_taken &= kernel.is_empty(here.fd)
                    continue
                with kernel.scan(here.fd) as entries:
                    names += [Name(os.fsencode(one.name)) for one in entries if one.is_dir(follow_symlinks=False)]
    return is_taken
