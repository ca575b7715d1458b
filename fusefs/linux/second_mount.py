"""What two mounts of one filesystem see of each other: locks, handles, birth times, names, and for how long they lie.

Each is tried both ways, in a directory of ours that both show. A mount of another client is best; a second one on this
machine tells the same of most filesystems.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import NamedTuple

from fusefs.core.names import Name
from fusefs.linux import syscalls
from fusefs.linux.child_processes import child
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.statx import open_handle
from fusefs.linux.trial_directory import trial

_SHORTEST_S, _SHARE = 0.002, 0.5
"""Between two looks: a share of the time that it has taken so far. Who looks more often renews what is cached, and may
see the old for ever: GlusterFS told of a directory that was replaced for 55 s when asked each 20 ms, for 1.4 s when
asked each 1.3 s (measured).
"""
_NFS, _NFS_CACHE_S = (b"nfs", b"nfs4"), 60.0
"""acregmax and acdirmax, nfs(5), if the mount says nothing."""
_LOCK, _FILE, _NEW, _OLD, _DIR, _NEXT, _ASIDE, _NAME, _FULL, _MARK = (
    trial(name) for name in ("lock", "file", "new", "old", "dir", "next", "aside", "name", "full", "mark")
)
_NO_FLAG = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class SeenBeside(NamedTuple):
    """What two mounts were seen to share.

    locks        each sees that a process has locked a file by the other, and that it has no more
    handles      each opens what the other has given a handle of; None: only root can try
    birth_times  a file has one, the same through both
    noreplace    RENAME_NOREPLACE refuses a name that the other has taken since this one last looked; False also where
                 there is no such flag
    cache_s      for how long one went on telling what the other had changed, at most
    lying        what it still told when nobody waited any longer
    """

    locks: bool
    handles: bool | None
    birth_times: bool
    noreplace: bool
    cache_s: float
    lying: tuple[str, ...] = ()


class NeverSeen(Exception):
    """What one of them made, the other does not show."""


def see_beside(kernel: Kernel, here: Fd, there: Fd, limit_s: float, *, exchanges: bool) -> SeenBeside:
    """Try two mounts, both ways.

    here, there  one empty directory of ours, opened for reading on both
    limit_s      how long to wait for anything
    exchanges    whether directories are replaced by RENAME_EXCHANGE there
    Raises  NeverSeen; OSError
    """
    both = ((here, there, trial("here")), (there, here, trial("there")))
    locks, handles, births, refusals = [], [], [], []
    names: list[_Case] = []
    contents: list[_Case] = []
    with ExitStack() as owned:
        for one, other, name in both:
            kernel.mkdir(one, name)
            made = owned.enter_context(kernel.open_dir(one, name))
            seen = owned.enter_context(_opened(kernel, other, name, limit_s))
            locks.append(_shares_locks(kernel, made, seen, limit_s))
            handles.append(_opens_handles(kernel, made, seen))
            births.append(_same_birth(kernel, made, seen, limit_s))
            refusals.append(_refuses_anew(kernel, made, seen, limit_s))
            *of_names, of_content = _prepared(kernel, made, seen, owned, limit_s, exchanges=exchanges)
            names += of_names
            contents.append(of_content)
        # A write may take its time on a server, in which nobody would look at the names.
        waited = [_wait_out(cases, limit_s) for cases in (names, contents)]
    opened = None if None in handles else all(handles)
    cache_s, lying = max(found[0] for found in waited), waited[0][1] + waited[1][1]
    return SeenBeside(all(locks), opened, all(births), all(refusals), cache_s, lying)


def kernels_cache_s(fstype: bytes, options: frozenset[str]) -> float:
    """How long the kernel's own cache may lie at most: NFS begins with 3 s and doubles that while nothing changes, so
    that a trial sees less than there is. 0 where no more is known than what is seen.

    options  of the mount
    Source   nfs(5); fs/nfs/inode.c, nfs_attribute_cache_expired
    """
    if fstype not in _NFS or "noac" in options:
        return 0.0
    told = dict(one.partition("=")[::2] for one in options)
    return max(float(told.get(name) or _NFS_CACHE_S) for name in ("acregmax", "acdirmax"))


def wait_until(is_right: Callable[[], bool], limit_s: float) -> float | None:
    """Seconds until something was so; None: it was not, in that time. OSError counts as not so."""
    began = time.monotonic()
    while True:
        with suppress(OSError):
            if is_right():
                return time.monotonic() - began
        waited = time.monotonic() - began
        if waited > limit_s:
            return None
        time.sleep(_pause_s(waited))


def _pause_s(waited_s: float) -> float:
    return max(waited_s * _SHARE, _SHORTEST_S)


@contextmanager
def _opened(kernel: Kernel, dir_fd: Fd, name: Name, limit_s: float) -> Iterator[Fd]:
    """A directory that was made by the other mount. Raises  NeverSeen"""
    _seen(partial(_is_there, kernel, dir_fd, name), limit_s)
    with kernel.open_dir(dir_fd, name) as fd:
        yield fd


def _seen(is_right: Callable[[], bool], limit_s: float) -> None:
    """Wait until it is so. Raises  NeverSeen"""
    if wait_until(is_right, limit_s) is None:
        raise NeverSeen


def _is_there(kernel: Kernel, dir_fd: int, name: Name) -> bool:
    try:
        kernel.stat(dir_fd, name)
    except FileNotFoundError:
        return False
    return True


def _is_gone(kernel: Kernel, dir_fd: int, name: Name) -> bool:
    return not _is_there(kernel, dir_fd, name)


def _make_file(kernel: Kernel, dir_fd: Fd, name: Name, content: bytes = b"") -> None:
    with kernel.create(dir_fd, name) as fd:
        kernel.write(fd, content)
        kernel.fsync(fd)


def _read(kernel: Kernel, dir_fd: Fd, name: Name) -> bytes:
    with kernel.open_beneath(dir_fd, name, os.O_RDONLY | os.O_NOFOLLOW) as fd:
        content = kernel.read(fd, 64)
        return content if kernel.fstat(fd).st_size == len(content) else b""


def _shares_locks(kernel: Kernel, made: Fd, seen: Fd, limit_s: float) -> bool:
    """Whether a child process is refused a lock that we have by the other mount, and gets it after that."""
    _make_file(kernel, made, _LOCK)
    _seen(partial(_is_there, kernel, seen, _LOCK), limit_s)
    with kernel.open_beneath(made, _LOCK, os.O_RDWR | os.O_NOFOLLOW) as fd:
        try:
            if not kernel.lock(fd) or _child_gets_lock(seen):
                return False
        except OSError as error:
            if error.errno != errno.ENOLCK:
                raise
            return False
    return wait_until(partial(_child_gets_lock, seen), limit_s) is not None


def _child_gets_lock(dir_fd: Fd) -> bool:
    """Raises  OSError as opening or locking did"""

    def body() -> None:
        kernel = Kernel()
        with kernel.open_beneath(0, _LOCK, os.O_RDWR | os.O_NOFOLLOW) as fd:
            if not kernel.lock(fd):
                raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))

    _pid, status = os.waitpid(child(signal.SIGKILL, body, dir_fd), 0)
    code = os.waitstatus_to_exitcode(status)
    if code in (0, errno.EWOULDBLOCK):
        return code == 0
    raise OSError(code if code > 0 else errno.EINTR, "a child process could not try the lock")


def _opens_handles(kernel: Kernel, made: Fd, seen: Fd) -> bool | None:
    content = os.urandom(8).hex().encode()
    _make_file(kernel, made, _FILE, content)
    with kernel.open_beneath(made, _FILE) as fd:
        handle = syscalls.handle_of(fd)
    if not handle:
        return False
    try:
        with open_handle(seen, handle, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            return kernel.read(fd, len(content) + 1) == content  # numbers may agree and mean another file
    except PermissionError:
        return None
    except OSError:
        return False


def _same_birth(kernel: Kernel, made: Fd, seen: Fd, limit_s: float) -> bool:
    _seen(partial(_is_there, kernel, seen, _FILE), limit_s)
    with kernel.open_beneath(made, _FILE) as one, kernel.open_beneath(seen, _FILE) as other:
        first, second = (kernel.statx(fd, asks=True).btime_ns for fd in (one, other))
    return first == second != 0


def _refuses_anew(kernel: Kernel, made: Fd, seen: Fd, limit_s: float) -> bool:
    """Whether a directory that one has made since the other last looked keeps its name when that renames onto it.

    A kernel that knows the name refuses by itself. One that remembers there is none leaves it to the filesystem.
    """
    kernel.mkdir(seen, _FULL)
    with kernel.open_dir(seen, _FULL) as full:
        kernel.mkdir(full, _MARK)
    if not _is_gone(kernel, seen, _NAME):
        return False
    kernel.mkdir(made, _NAME)
    with kernel.open_dir(made, _NAME) as theirs:
        try:
            kernel.reach("renameat2")
            syscalls.renameat2(seen, _FULL, seen, _NAME, syscalls.RENAME_NOREPLACE)
        except FileExistsError:
            is_kept = partial(kernel.is_named, theirs, made, _NAME)
            return wait_until(is_kept, limit_s) is not None
        except OSError as error:
            if error.errno not in _NO_FLAG:
                raise
    return False


class _Case(NamedTuple):
    """A change by one mount after the other has looked.

    what      it is, for people
    look      by the other, before
    change    by the one
    is_right  whether the other sees it
    """

    what: str
    look: Callable[[], bool]
    change: Callable[[], None]
    is_right: Callable[[], bool]


def _prepared(kernel: Kernel, made: Fd, seen: Fd, owned: ExitStack, limit_s: float, *, exchanges: bool) -> list[_Case]:
    """Every case, each in a directory of its own: a look at one must not tell the kernel of another.

    The last one is of contents, all others of names.
    """

    def place(name: str) -> tuple[Fd, Fd]:
        kernel.mkdir(made, trial(name))
        one = owned.enter_context(kernel.open_dir(made, trial(name)))
        return one, owned.enter_context(_opened(kernel, seen, trial(name), limit_s))

    return [
        _replaced_directory(kernel, *place("replaced"), exchanges=exchanges),
        _made_again(kernel, *place("again")),
        _missing(kernel, *place("missing")),
        _gone(kernel, *place("gone")),
        _listed(kernel, *place("listed")),
        _replaced_file(kernel, *place("record")),
        _rewritten(kernel, *place("rewritten")),
    ]


def _lists(kernel: Kernel, dir_fd: Fd, name: Name, wanted: Name) -> bool:
    """Whether a directory, opened anew by its name, has one entry, as a listing and as a look say."""
    with kernel.open_dir(dir_fd, name) as fd:
        return kernel.list(fd) == [wanted] and _is_there(kernel, fd, wanted)


def _replaced_directory(kernel: Kernel, one: Fd, other: Fd, *, exchanges: bool) -> _Case:
    for name, inner in ((_DIR, _OLD), (_NEXT, _NEW)):
        kernel.mkdir(one, name)
        with kernel.open_dir(one, name) as fd:
            kernel.mkdir(fd, inner)

    def change() -> None:
        if exchanges:
            kernel.exchange(one, _NEXT, one, _DIR)
        else:
            kernel.rename(one, _DIR, one, _ASIDE)
            kernel.rename(one, _NEXT, one, _DIR)

    look, right = (partial(_lists, kernel, other, _DIR, inner) for inner in (_OLD, _NEW))
    return _Case("a directory that was replaced", look, change, right)


def _made_again(kernel: Kernel, one: Fd, other: Fd) -> _Case:
    def look() -> bool:
        with kernel.open_dir(other, _DIR) as fd:
            return kernel.list(fd) == []

    def change() -> None:
        kernel.rmdir(one, _DIR)
        kernel.mkdir(one, _DIR)
        with kernel.open_dir(one, _DIR) as fd:
            kernel.mkdir(fd, _NEW)

    kernel.mkdir(one, _DIR)
    return _Case("a directory that was made again", look, change, partial(_lists, kernel, other, _DIR, _NEW))


def _missing(kernel: Kernel, one: Fd, other: Fd) -> _Case:
    look, right = partial(_is_gone, kernel, other, _NAME), partial(_is_there, kernel, other, _NAME)
    return _Case("a name that was missing", look, partial(kernel.mkdir, one, _NAME), right)


def _gone(kernel: Kernel, one: Fd, other: Fd) -> _Case:
    kernel.mkdir(one, _NAME)
    look, right = partial(_is_there, kernel, other, _NAME), partial(_is_gone, kernel, other, _NAME)
    return _Case("a name that is gone", look, partial(kernel.rmdir, one, _NAME), right)


def _listed(kernel: Kernel, one: Fd, other: Fd) -> _Case:
    kernel.mkdir(one, _DIR)

    def lists(names: list[bytes]) -> bool:
        with kernel.open_dir(other, _DIR) as fd:
            return kernel.list(fd) == names

    def change() -> None:
        with kernel.open_dir(one, _DIR) as fd:
            kernel.mkdir(fd, _NEW)

    return _Case("the names in a directory", partial(lists, []), change, partial(lists, [_NEW]))


def _replaced_file(kernel: Kernel, one: Fd, other: Fd) -> _Case:
    for name, content in ((_FILE, b"old"), (_NEW, b"the new one")):
        _make_file(kernel, one, name, content)
    look, right = (partial(_reads, kernel, other, content) for content in (b"old", b"the new one"))
    return _Case("a file that was replaced", look, partial(kernel.rename, one, _NEW, one, _FILE), right)


def _rewritten(kernel: Kernel, one: Fd, other: Fd) -> _Case:
    _make_file(kernel, one, _FILE, b"old")

    def change() -> None:
        with kernel.open_beneath(one, _FILE, os.O_RDWR | os.O_NOFOLLOW) as fd:
            kernel.write(fd, b"new")
            kernel.fsync(fd)

    look, right = (partial(_reads, kernel, other, content) for content in (b"old", b"new"))
    return _Case("a file that was written to", look, change, right)


def _reads(kernel: Kernel, dir_fd: Fd, content: bytes) -> bool:
    return _read(kernel, dir_fd, _FILE) == content


def _wait_out(cases: list[_Case], limit_s: float) -> tuple[float, tuple[str, ...]]:
    """Have all changed after a look, and wait until all are seen: for how long one was not, and what never was.

    Raises  NeverSeen: not even what was before
    """
    longest_s, unseen = 0.0, dict[_Case, float]()
    for case in cases:
        _seen(case.look, limit_s)
        case.change()
        unseen[case] = time.monotonic()
        longest_s = max(longest_s, _drop_seen(unseen))
    began = time.monotonic()
    while unseen:
        waited = time.monotonic() - began
        if waited > limit_s:
            return limit_s, tuple(dict.fromkeys(case.what for case in unseen))
        time.sleep(_pause_s(waited))
        longest_s = max(longest_s, _drop_seen(unseen))
    return round(longest_s, 3), ()


def _drop_seen(unseen: dict[_Case, float]) -> float:
    """Take out what is seen by now; how long the longest took of those."""
    seen = [case for case in unseen if _is_so(case.is_right)]
    now = time.monotonic()
    return max((now - unseen.pop(case) for case in seen), default=0.0)


def _is_so(look: Callable[[], bool]) -> bool:
    with suppress(OSError):
        return look()
    return False
