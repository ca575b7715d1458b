"""Writes purge lists, which show each user in advance which of their files a plan will take.

`<user>.list` belongs to that user; no other user can read it. A line is a time, a tab and a path. Users may write
anything into their own lists, so no decision depends on the content, and no error in a list stops a plan.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from fusefs.core.errors import Incomplete, NotFound, Refused, from_os
from fusefs.core.human_units import format_utc
from fusefs.core.names import Name
from fusefs.core.printable_names import printable, shell_word
from fusefs.linux.children import user_name
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import OTHERS_WRITE, Kernel
from fusefs.linux.user_ids import read_subordinates
from fusefs.sweep.open_directories import MatchedDirectory, open_directory
from fusefs.sweep.request import Identified, identify

_DIR = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ENDING, _NEW = b".list", b".list.new"
_MODE = 0o640
_BUFFER_MAX_BYTES = 1 << 20
_MOST_BYTES = 1 << 22
"""Limit for the lists of one user and of their subordinate UIDs together: they use space on root's disk."""
_BYTES_OF_A_LIST = 1 << 12
"""The least space that a list takes on disk: one block."""
_HEAD = (
    b"# trashd plan takes these files then, unless they are used before. In paths \\\\ is a backslash, \\xNN a byte.\n"
)
"""The first line identifies a purge list; a file that begins differently is not one."""
_HEADS = (
    _HEAD,
    # of 0.3.0 and earlier
    b"# What trashd plan takes then, if nobody uses it before. In paths \\\\ is a backslash, \\xNN a byte.\n",
)
_LACKING = b"# Incomplete: some directories could not be read this time.\n"
_HINT = "remove it, or name another directory for the purge lists"
_MORE = b"# \xe2\x80\xa6 and %d more: this list has reached its size limit.\n"


class CountedPurges:
    """The purge lists of a dry run, which only count the entries that would be listed.

    way       the lists' directory and all directories above it
    is_whole  False if some directory could not be read
    """

    def __init__(self, way: frozenset[Identified] = frozenset()) -> None:
        self._users: set[int] = set()
        self.way = way
        self.is_whole = True
        self.n_entries = 0

    def add(self, uid: int, _path: bytes, _goes_ns: int) -> None:
        self._users.add(uid)
        self.n_entries += 1

    def lack(self) -> None:
        """Note that something could not be read, so that each list is marked as incomplete."""
        self.is_whole = False

    def publish(self) -> int:
        return len(self._users)


class PurgeLists(CountedPurges):
    """The purge lists in one directory, which contains nothing else."""

    def __init__(self, kernel: Kernel, directory: Fd, path: bytes, way: frozenset[Identified] = frozenset()) -> None:
        """directory: as opened by `open_lists`; path: the directory's path for messages"""
        super().__init__(way)
        self._kernel = kernel
        self._directory = directory
        self._path = path
        self._holder_of = read_subordinates().holder_of
        self._lines: dict[int, list[bytes]] = {}
        self._bytes_of: Counter[int] = Counter()
        self._more_of: Counter[int] = Counter()
        self._begun: dict[int, Name] = {}
        self._n_bytes = 0
        self._error: OSError | None = None

    def add(self, uid: int, path: bytes, goes_ns: int) -> None:
        """List a user's file or unit. goes_ns: when it expires, in nanoseconds since the epoch

        A write error is raised later, by `publish`, so that no sweep fails because of it.
        """
        if self._error is not None:
            return
        when = format_utc(goes_ns, "%Y-%m-%dT%H:%M:%SZ", "9999-12-31T23:59:59Z")  # UTC to the second
        line = b"%s\t%s\n" % (when.encode(), line_path(path))
        self.n_entries += 1
        is_begun = uid in self._begun or uid in self._lines
        holder, n_bytes = self._holder_of(uid), len(line) + (0 if is_begun else _BYTES_OF_A_LIST)
        if self._bytes_of[holder] + n_bytes > _MOST_BYTES:
            self._more_of[uid] += 1
            return
        self._bytes_of[holder] += n_bytes
        self._lines.setdefault(uid, []).append(line)
        self._n_bytes += len(line)
        if self._n_bytes > _BUFFER_MAX_BYTES:
            try:
                self._flush()
            except OSError as error:
                self._error = error

    def publish(self) -> int:
        """Put all lists in place, and return their number; remove earlier lists of users who have no list now.

        If some directory could not be read, earlier lists remain, because their users may still have files there.

        Raises  OSError: none, or only some, of the old lists have been replaced
                Refused: one of root's files is in the way, and would be lost
                Incomplete: all lists are in place, except those that the error names
        """
        if self._error is not None:
            raise self._error
        left = _find_others(self._kernel, self._directory, self._path)
        self._flush()
        published = set[bytes]()
        for uid, new in self._begun.items():
            name = _file_name(uid) + _ENDING
            if name in left:
                continue
            try:
                self._give(uid, new)
            except OSError as error:
                if error.errno != errno.EDQUOT:
                    raise
                left[name] = "the user's disk quota is used up"
                continue
            self._kernel.rename(self._directory, new, self._directory, name)
            published.add(name)
        for name in self._kernel.list(self._directory):
            is_over = name.endswith(_NEW) or (self.is_whole and name.endswith(_ENDING))
            if is_over and name not in published and name not in left:
                self._kernel.unlink(self._directory, name)
        self._kernel.fsync(self._directory)
        self._begun = {}
        if left:
            name, why = min(left.items())
            more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
            raise Incomplete(f"{printable(os.path.join(self._path, name))}{more} could not be replaced: {why}", _HINT)
        return len(published)

    def drop(self) -> None:
        """Remove the lists that were not published."""
        for new in self._begun.values():
            with suppress(FileNotFoundError):
                self._kernel.unlink(self._directory, new)
        self._begun = {}

    def _give(self, uid: int, new: Name) -> None:
        """Complete a list, and give it to its user. Raises  OSError; EDQUOT affects only that user"""
        with self._open(new, os.O_WRONLY | os.O_APPEND) as fd:
            if self._more_of[uid]:
                os.write(fd, _MORE % self._more_of[uid])
            if not self.is_whole:
                os.write(fd, _LACKING)
            if os.geteuid() == 0:
                self._kernel.chown(fd, uid, -1)
            os.fchmod(fd, _MODE)
            self._kernel.fsync(fd)

    def _flush(self) -> None:
        """Write the collected lines. Close each file at once, since there may be too many to keep them all open."""
        for uid, lines in self._lines.items():
            with self._begin(uid) as fd, open(fd, "ab", closefd=False) as file:
                file.writelines(lines)
        self._lines = {}
        self._n_bytes = 0

    def _begin(self, uid: int) -> Fd:
        """Open a user's new list to append to it.

        Its name is unique to this run: if two runs overlap, one publishes its lists and the other fails.
        """
        new = self._begun.get(uid)
        if new is not None:
            return self._open(new, os.O_WRONLY | os.O_APPEND)
        new = Name(b"%s.%s%s" % (_file_name(uid), os.urandom(6).hex().encode(), _NEW))
        with ExitStack() as owned:
            fd = owned.enter_context(self._kernel.create(self._directory, new, os.O_WRONLY | os.O_APPEND))
            self._begun[uid] = new
            os.write(fd, _HEAD)
            owned.pop_all()
        return fd

    def _open(self, name: bytes, flags: int) -> Fd:
        return self._kernel.open_beneath(self._directory, name, flags | os.O_NOFOLLOW)


@contextmanager
def open_lists(kernel: Kernel, path: bytes, *, writes: bool) -> Iterator[CountedPurges]:
    """Open the purge lists of a directory; lists that are not published are removed at the end.

    writes  create the directory if it is missing; if False, nothing is changed
    Raises  Refused: other users could put links there, or a file there would be lost
            NotFound: the parent directory is missing; TrashdError: another error from the kernel
    """
    try:
        fd = _open(kernel, path, makes=writes)
    except OSError as error:
        if not writes and error.errno == errno.ENOENT:
            yield CountedPurges(_way_to(kernel, path))
            return
        raise from_os(error, path) from error
    with fd:
        try:
            _find_others(kernel, fd, path)
        except OSError as error:
            if writes or error.errno != errno.EACCES:  # a user can read only their own list
                raise from_os(error, path) from error
        way = _way_to(kernel, path)
        if not writes:
            yield CountedPurges(way)
            return
        lists = PurgeLists(kernel, fd, path, way)
        try:
            yield lists
        finally:
            lists.drop()


def _open(kernel: Kernel, path: bytes, *, makes: bool) -> Fd:
    """Open the lists' directory, which no other user must be able to write to or replace. Raises  Refused, OSError"""
    upper, name = os.path.split(path.rstrip(b"/"))
    with _found_above(kernel, upper) as above:
        st = kernel.fstat(above.fd)
        if not _is_ours(st) or (st.st_mode & OTHERS_WRITE and not st.st_mode & stat.S_ISVTX):
            raise _others_can_change(above.path)
        is_made = False
        if makes:
            with suppress(FileExistsError):
                kernel.mkdir(above.fd, name)
                is_made = True
        fd = Fd(os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above.fd))
        with ExitStack() as owned:
            owned.enter_context(fd)
            st = kernel.fstat(fd)
            if not _is_ours(st) or st.st_mode & OTHERS_WRITE:
                raise _others_can_change(path)
            if is_made:
                kernel.chmod(fd, 0o755)  # users must be able to read their lists, whatever our umask
            owned.pop_all()
        return fd


def _way_to(kernel: Kernel, path: bytes) -> frozenset[Identified]:
    """Identify a directory, if it exists, and all directories above it."""
    upper, name = os.path.split(path.rstrip(b"/"))
    way: set[Identified] = set()
    with ExitStack() as owned:
        fd = owned.enter_context(_found_above(kernel, upper)).fd
        with suppress(FileNotFoundError):
            fd = owned.enter_context(Fd(os.open(name, _DIR, dir_fd=fd)))
        while (here := identify(kernel, fd)) not in way:
            way.add(here)
            fd = owned.enter_context(Fd(os.open(b"..", _DIR, dir_fd=fd)))
    return frozenset(way)


@contextmanager
def _found_above(kernel: Kernel, path: bytes) -> Iterator[MatchedDirectory]:
    """Open the lists' parent directory through a path that no other user can change. Raises  NotFound; Refused"""
    with ExitStack() as owned:
        try:
            above = owned.enter_context(open_directory(kernel, path))
        except Refused as error:
            where, _, why = error.detail.rpartition(": ")
            if why == os.strerror(errno.ENOENT):  # a parent directory is missing
                raise NotFound(
                    where,
                    "create it with mkdir -p; only the last directory of the path is created automatically",
                ) from error
            raise
        yield above


def _find_others(kernel: Kernel, directory: Fd, path: bytes) -> dict[bytes, str]:
    """Return other users' files that are named like lists but are not lists, and the reason why each is kept.

    Raises  Refused: such a file belongs to root or to us, and would be replaced or removed; OSError
    """
    others: dict[bytes, str] = {}
    is_roots = kernel.fstat(directory).st_uid == 0
    for name in kernel.list(directory):
        if not name.endswith((_ENDING, _NEW)):
            continue
        with suppress(FileNotFoundError), kernel.open_beneath(directory, name) as found:
            st = kernel.fstat(found)
            # In root's directory, only root can have given a file this owner and name. The owner may have changed it.
            if is_roots and stat.S_ISREG(st.st_mode) and name.startswith(_file_name(st.st_uid) + b"."):
                continue
            if _is_list(kernel, found, st, name):
                continue
            if _is_ours(st):
                hint = "name another directory: in a directory of purge lists, files that end in .list may be removed"
                raise Refused(f"{printable(os.path.join(path, name))}: not a purge list made by trashd", hint)
            others[name] = "not a purge list made by trashd"
    return others


def _is_list(kernel: Kernel, found: Fd, st: os.stat_result, name: bytes) -> bool:
    """Return whether a file begins like a purge list, although one that is still being written may be shorter.

    Raises  OSError
    """
    if not stat.S_ISREG(st.st_mode):
        return False  # opening a pipe could block forever
    try:
        with kernel.reopen(found, os.O_RDONLY | os.O_NONBLOCK) as fd:
            begins = kernel.read(fd, max(map(len, _HEADS)))
    except BlockingIOError:
        return False  # the user holds a lease on the file
    return any(begins.startswith(head) or (name.endswith(_NEW) and head.startswith(begins)) for head in _HEADS)


def _is_ours(st: os.stat_result) -> bool:
    return st.st_uid in (0, os.geteuid())


def _others_can_change(path: bytes) -> Refused:
    hint = f"chown root {shell_word(path)}; chmod go-w {shell_word(path)}"
    return Refused(f"{printable(path)}: other users can change this directory for purge lists", hint)


def line_path(path: bytes) -> bytes:
    r"""Encode a path for a line: control characters and bad UTF-8 as `\xNN`, backslashes as `\\`."""
    return printable(path.replace(b"\\", b"\\\\")).encode()


def _file_name(uid: int) -> bytes:
    name = os.fsencode(user_name(uid))
    is_plain = name and b"/" not in name and not name.startswith(b".")
    return name if is_plain and not name.isdigit() else b"%d" % uid  # a number means a user without a name
