"""Opens directories in a tree of any depth, with few fds and without `..`, and decides which of them root may enter.

Some directories on a long path stay open, because reaching every directory from the top would take time quadratic in
the depth: minutes for a chain of 10,000 directories.

Root's commands never move files across the boundary between users. The same rules hold for all of these commands.
Taking (plan, sweep): from a directory of root's, root enters any other. From a user's directory, root enters another
user's directory only if an earlier run has seen it in the same place (`SeenDirectories`), since a user may have moved
it there. The reaper uses change times for this (reaper/late_arrivals.py).
Giving (move, restore): root puts files into an existing directory only if no user thereby gets access to anything that
they could not have had before. The name of a directory does not prove who made it.
Other users need no such rules, because the kernel checks their permissions.
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
from fusefs.core.identity import Identity, IdentityMatch, compare
from fusefs.core.names import Name, RelPath, join_path, split_path
from fusefs.core.printable_names import printable
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.kernel import OTHERS_WRITE, Kernel
from fusefs.linux.runtime_directories import make_dir, persistent_dir, read_file, replace_file
from fusefs.linux.syscalls import WALK_MAX_BYTES
from fusefs.store.backing_and_mount import DIRECTORY, READABLE, BackingAndMount, require_both_sides, suppress_errno

D = TypeVar("D", bound=AbstractContextManager[object])
_FDS_MAX = 64
_NEAR_BYTES = 512
_KEEP_OPEN_EVERY_BYTES = 1000
"""The approximate distance, in bytes of path, between directories that `DeepOpener` keeps open.

For a shorter path, it keeps none open.
"""
_MAX_OPEN = 32
MakeDirectories = Callable[[BackingAndMount, bytes, bytes], None]
"""Makes the missing directories of a path. Arguments: an existing directory, its path, and the path below it."""
MakeLike = Callable[[Fd, Name, Fd], None]
"""Makes a directory, unless it has appeared by then. Arguments: its parent, its name, and the directory that is the
model (directories are O_PATH)."""


class _OpenDirectories(Generic[D]):
    """The open directories on the way down from a top directory, which this object does not close.

    If more than `n_max` are open, every other one is closed, so they are dense at the end and sparser towards the top.
    A mark is the depth of a directory: the length of its path, with one slash per name. The top's mark is 0.
    """

    def __init__(self, top: D, n_max: int) -> None:
        self._top = top
        self._n_max = n_max
        self._open: dict[int, D] = {}  # by mark, ascending

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._close_below(0)

    @property
    def mark(self) -> int:
        """The mark of the deepest open directory."""
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
    """The position of a walk in a tree, which descends by names and returns to directories above.

    To return to a directory that was closed, it walks there from the nearest open directory above, and keeps some
    directories on the way open again. A chain of n directories takes about n log n steps, not n².
    """

    def __init__(self, kernel: Kernel, top: Fd) -> None:
        """top: not closed by this object"""
        super().__init__(top, _FDS_MAX)
        self._kernel = kernel
        self._path = bytearray()

    @property
    def fd(self) -> Fd:
        """The current directory, open for reading; the caller must not close it."""
        return self._last()

    def descend(self, name: Name) -> None:
        """Enter a subdirectory. Raises  OSError, also for a mount point; then the position is unchanged"""
        self._keep(self.mark + 1 + len(name), self._kernel.open_dir(self.fd, name))
        self._path += b"/" + name

    def go_back(self, mark: int) -> None:
        """Return to a directory above. The caller must check that it is the same directory: names may have moved.

        Raises  OSError; then the position is somewhere above the directory
        """
        self._close_below(mark)
        del self._path[mark:]
        while (here := self.mark) < mark:
            stop = self._next_stop(here, mark)
            self._keep(stop, self._kernel.open_dir(self.fd, bytes(self._path[here + 1 : stop])))

    def _next_stop(self, here: int, mark: int) -> int:
        """Return the mark of the next directory to keep open: at half the remaining path, but within WALK_MAX_BYTES.

        This keeps more directories near the end, because the walk is likely to return to these.
        """
        remaining_bytes = mark - here
        if remaining_bytes <= _NEAR_BYTES:
            return mark
        stop = self._path.rfind(b"/", here + 1, here + 1 + min(WALK_MAX_BYTES, max(remaining_bytes // 2, _NEAR_BYTES)))
        if stop < 0:  # names on FUSE may be longer
            stop = self._path.find(b"/", here + 1)
        return stop if stop >= 0 else mark


class DeepOpener(_OpenDirectories[BackingAndMount]):
    """Opens directories of a tree by their paths, one after another, starting from directories that are still open.

    If an open directory is moved, it still counts as being where it was. To limit this, all are closed once the paths
    walked below them add up to the length of a full path. This at most doubles the total time.
    """

    def __init__(self, kernel: Kernel, root: BackingAndMount) -> None:
        """root: where the paths begin; not closed by this object"""
        super().__init__(root, _MAX_OPEN)
        self._kernel = kernel
        self._last_path = b""
        """The path of the deepest open directory, with a slash at its end; anything after that is ignored."""
        self._walked = 0

    def beneath(self, path: bytes, make: MakeDirectories | None = None, flags: int = DIRECTORY) -> BackingAndMount:
        """Open a directory by its path from the root (empty for the root itself); the caller closes it.

        The sides are as for `BackingAndMount.beneath`.
        make    called for missing directories
        Raises  OSError
        """
        at = self._reach(path, make)
        return self._step(path, at, len(path), make, flags)

    def open_on_both(self, path: bytes, make: MakeDirectories | None = None) -> BackingAndMount:
        """Open a directory below the root, on the same sides as the root. Raises  OSError, as `require_both_sides`"""
        return require_both_sides(self._top, self.beneath(path, make), path)

    def remove(self, path: bytes) -> None:
        """Remove an empty directory, through the mount if there is one. Raises  OSError"""
        upper, _, name = path.rpartition(b"/")
        with self.open_on_both(upper) as above:
            self._kernel.rmdir(above.names_fd(), name)

    def _reach(self, path: bytes, make: MakeDirectories | None) -> int:
        """Open directories on the path; return the offset in the path that the deepest one has reached."""
        if self._walked > len(path):
            self._close_below(0)
            self._walked = 0
        while (at := self.mark) and not path.startswith(self._last_path[:at]):
            self._close_below(at - 1)
        while (end := path.find(b"/", at + _KEEP_OPEN_EVERY_BYTES)) > 0:
            self._keep(end + 1, self._step(path, at, end, make, DIRECTORY))
            self._last_path = path[: (at := end + 1)]
        self._walked += len(path) - at
        return at

    def _step(self, path: bytes, at: int, end: int, make: MakeDirectories | None, flags: int) -> BackingAndMount:
        above = self._last()
        try:
            return above.beneath(self._kernel, path[at:end], flags)
        except FileNotFoundError:
            if make is None:
                raise
            make(above, path[: max(at - 1, 0)], path[at:end])
        return above.beneath(self._kernel, path[at:end], flags)


class DeepOpeners:
    """A `DeepOpener` for each of several trees, until the end of a block."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._into: dict[BackingAndMount, DeepOpener] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for paths in self._into.values():
            paths.__exit__()
        self._into.clear()

    def opener_of(self, root: BackingAndMount) -> DeepOpener:
        """Return the opener for a tree, whose root must stay open while the opener is used."""
        if root not in self._into:
            self._into[root] = DeepOpener(self._kernel, root)
        return self._into[root]


def walk_inwards(start: RelPath) -> Iterator[tuple[RelPath, list[Name] | None]]:
    """Yield each directory of a tree twice: before the directories in it, and after them.

    Only names are kept, because the paths of all directories in a chain would take space quadratic in its length.
    Yields  the path, and: the first time, a list to which the caller adds the names of subdirectories to enter; the
            second time, None
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
        path = join_path(path, pending[-1].pop())


def make_missing(
    kernel: Kernel, above: Fd, base_path: bytes, missing: bytes, models: DeepOpener, make: MakeLike
) -> None:
    """Make the missing directories of a path below a directory, like the directories of another tree.

    base_path  the path of `above`, which is the same in the other tree
    models     opens directories in the other tree
    make       makes one directory
    Raises     OSError: ENOENT if the other tree lacks one of them
    """
    names = split_path(missing)
    current_fd, n_there = _deepest(kernel, above, names)
    with close_on_error(current_fd):
        like = models.beneath(join_path(base_path, *names[:n_there])).fd
    for name in names[n_there:]:
        with current_fd, like, close_on_error(kernel.open_beneath(like, name, DIRECTORY)) as model:
            make(current_fd, name, model)
            current_fd, like = kernel.open_beneath(current_fd, name, DIRECTORY), model
    current_fd.close()
    like.close()


def _deepest(kernel: Kernel, above: Fd, names: list[Name]) -> tuple[Fd, int]:
    """Open the deepest existing directory of a path; return it, and how many names of the path lead to it."""
    for count in range(len(names) - 1, 0, -1):
        with suppress(FileNotFoundError):
            return kernel.open_beneath(above, join_path(*names[:count]), DIRECTORY), count
    return kernel.open_beneath(above, b".", DIRECTORY), 0


_HEAD = b"trashd directories seen 1\n"
_DIGEST_BYTES, _UID_BYTES = 16, 4
_ENTRY_BYTES = _DIGEST_BYTES + _UID_BYTES
_SEEN_MAX, _SEEN_MAX_EACH = 65_536, 8_192
"""The most directories that are recorded, in all and for one user; any beyond these limits are never entered."""
_NOTES_MAX_BYTES = 16 << 20


def must_check_owners() -> bool:
    """Return whether this module's rules apply, that is, whether we are root, to whom the kernel refuses nothing."""
    return os.geteuid() == 0


# Giving: rules for putting files into a directory.


def may_give(
    kernel: Kernel, target: Fd, owner: int, source_fd: Fd | None = None, recorded: Identity | None = None
) -> bool:
    """Return whether we may put a file into an existing directory.

    The directory may be root's or the owner's if no other user can write to it. It may also be the owner's and open to
    others, if the file comes from a directory that is open to the same users: they could have taken it before. A closed
    directory of the owner's is not accepted for a file from an open one, where other users may have put the file.
    owner      owner of the directory that the file comes from; if that is not known, of the file
    source_fd  that directory, if it exists
    recorded   identity of the directory from which the file was taken
    Raises     OSError
    """
    if not must_check_owners() or (recorded and compare(kernel.identify(target), recorded) is IdentityMatch.SAME):
        return True
    st = kernel.fstat(target)
    if _is_closed(st) and st.st_uid == 0:
        return True
    if st.st_uid != owner:
        return False
    if source_fd is None:
        return _is_closed(st)
    source = kernel.fstat(source_fd)
    if _is_closed(st) and _is_closed(source):
        return True
    return (st.st_gid, st.st_mode) == (source.st_gid, source.st_mode) and _acls(kernel, target) == _acls(
        kernel, source_fd
    )


def check_giving(
    kernel: Kernel, target: Fd, path: bytes, owner: int, source_fd: Fd | None = None, recorded: Identity | None = None
) -> None:
    """Raise AcrossUsers unless `may_give` allows it. path: the directory's path, for messages"""
    if not may_give(kernel, target, owner, source_fd, recorded):
        raise AcrossUsers(f"{printable(path) or '.'} (owned or writable by another user)")


def _is_closed(st: os.stat_result) -> bool:
    """Return whether only root and a directory's owner can move files out of the directory or into it.

    A sticky directory of root's counts, too: all users can put files into it, but not take them out.
    """
    return not st.st_mode & OTHERS_WRITE or (st.st_uid == 0 and bool(st.st_mode & stat.S_ISVTX))


def _acls(kernel: Kernel, fd: Fd) -> dict[str, bytes]:
    acls = (name for name in kernel.xattr_names(fd.path()) if name.startswith("system."))
    return {name: kernel.read_xattr(fd.path(), name) for name in acls}


# Taking: rules for entering users' directories.


class SeenDirectories(NamedTuple):
    """Users' directories in other users' directories: those that earlier runs have seen, and the notes of this run.

    before  digests of those that earlier runs have seen
    notes   a file without a name, to which all forked workers write
    rule    the present rule; directories that other rules have seen don't count
    """

    before: frozenset[bytes]
    notes: Fd
    rule: bytes = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.notes.close()

    def was_there(self, kernel: Kernel, fd: Fd, whose: int) -> bool:
        """Return whether an earlier run saw a directory in its present parent. Note the directory for the next run.

        whose   UID of the user whose directory contains it
        Raises  OSError
        """
        import hashlib  # late: a swap does not need it

        with _open_parent(fd) as above:
            both = (kernel.identify(above), kernel.identify(fd))
        if not all(one.handle or one.btime_ns for one in both):
            return False  # it may be a different directory with the same inode number
        place = (self.rule, os.fstatvfs(fd).f_fsid, *both)
        digest = hashlib.blake2b(repr(place).encode(), digest_size=_DIGEST_BYTES).digest()
        if os.fstat(self.notes).st_size < _NOTES_MAX_BYTES:
            os.write(self.notes, digest + whose.to_bytes(_UID_BYTES, "little"))
        return digest in self.before

    def save(self) -> None:
        """Save the notes for the next run; nothing is written if there are none. Raises  OSError"""
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


def load_seen_directories() -> SeenDirectories:
    """Load the directories that earlier runs of root's plans have seen; the caller closes it. Raises  OSError"""
    before = frozenset(entry[:_DIGEST_BYTES] for entry in _read(_path()))
    return SeenDirectories(before, Fd(os.memfd_create("trashd-seen")))


def _path() -> bytes:
    return os.path.join(persistent_dir(), b"plan-directories")


def _read(path: bytes) -> list[bytes]:
    """Return the entries of a file that only root can write to; return [] if the file is missing or invalid."""
    with suppress_errno(errno.ENOENT, errno.EPERM, errno.EFBIG):
        text = read_file(path, len(_HEAD) + _SEEN_MAX * _ENTRY_BYTES, owner=os.geteuid())
        if text.startswith(_HEAD):
            return _entries(text[len(_HEAD) :])
    return []


def _entries(text: bytes) -> list[bytes]:
    return [text[at : at + _ENTRY_BYTES] for at in range(0, len(text) - _ENTRY_BYTES + 1, _ENTRY_BYTES)]


def attribute_directory(
    kernel: Kernel, fd: Fd, whose: int, seen_directories: SeenDirectories | None = None
) -> int | None:
    """Return the UID to which root attributes a directory's entries, or None if root must not enter it.

    A directory of root's in a user's directory counts as that user's, since the user may have moved it there.
    whose   the result for its parent; 0: root's, from which root may enter any directory
    seen_directories  the directories that earlier runs have seen; None: there are none
    Raises  OSError
    """
    uid = kernel.fstat(fd).st_uid
    if whose == 0 or uid in (0, whose):
        return uid or whose
    return uid if seen_directories is not None and seen_directories.was_there(kernel, fd, whose) else None


def is_parent(kernel: Kernel, inode: tuple[int, int], fd: Fd) -> bool:
    """Return whether a directory's parent has this st_dev and st_ino. Raises  OSError"""
    with _open_parent(fd) as above:
        st = kernel.fstat(above)
    return (st.st_dev, st.st_ino) == inode


def _open_parent(fd: Fd) -> Fd:
    return Fd(os.open(b"..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd))


def may_take_whole(kernel: Kernel, top: Fd, whose: int, seen_directories: SeenDirectories | None) -> bool:
    """Return whether root may take a directory with all its contents, that is, may enter every directory in it.

    An empty directory is no obstacle: a user who could have moved it there could also have removed it.
    top     the directory, open for reading
    whose   the result of `attribute_directory` for its parent
    Raises  OSError
    """
    is_taken, within = True, [whose]
    with DeepOpener(kernel, BackingAndMount(top)) as opener:
        for path, names in walk_inwards(RelPath(b"")):
            if names is None:
                within.pop()
                continue
            with opener.beneath(path, flags=READABLE) as here:
                inside = attribute_directory(kernel, here.fd, within[-1], seen_directories)
                within.append(inside or 0)
                if inside is None:
                    is_taken &= kernel.is_empty(here.fd)
                    continue
                with kernel.scan(here.fd) as entries:
                    names += [Name(os.fsencode(one.name)) for one in entries if one.is_dir(follow_symlinks=False)]
    return is_taken
