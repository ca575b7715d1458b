"""What a user can do to a file, a directory or a name: the calls of the battery, each by path or by fd."""

import ctypes
import mmap
import os
import stat
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from fusefs.linux.syscalls import (
    AT_EMPTY_PATH,
    AT_FDCWD,
    FALLOC_FL_KEEP_SIZE,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    check_result,
    fallocate,
    name_to_handle_at,
    renameat2,
)
from tests.support.acls import (
    ACCESS,
    CAN_BIND,
    CAPABILITY,
    DEFAULT,
    GROUP_OBJ,
    MASK,
    NOBODY,
    OTHER,
    USER,
    USER_OBJ,
    acl,
)
from tests.support.privileges import HE, OTHERS, TEAM, Credentials

_FALLOC_FL_PUNCH_HOLE = 2
_RENAME_WHITEOUT = 4
_SOON = os.O_NONBLOCK | os.O_CLOEXEC
PROGRAM = "/usr/bin/id"

_libc = ctypes.CDLL(None, use_errno=True)


class At(NamedTuple):
    """Where a user does something: f is the thing, g a file beside it, n a name that is free; e is beside d."""

    who: Credentials
    d: str  # the directory that f, g and n are in, as a prefix of paths
    e: str  # another one, in which g is, and f and n are free
    what: str | int  # f: its path, or an fd of it
    fd: int = -1  # that fd, also where the path is below /proc


Do = Callable[[At], object]
NAME, FD, GIVEN, PROC = "path", "fd", "root's fd", "/proc/self/fd"
BY_PATH, BY_FD = (NAME, PROC), (FD, GIVEN)
ANY = (*BY_PATH, *BY_FD)
FILE, DIRECTORY, LINK, FIFO, DEVICE = "file", "directory", "link", "fifo", "device"
OPENABLE = (FILE, FILE, FILE, FILE, DIRECTORY)
ALL = (*OPENABLE, LINK, FIFO, DEVICE)
THING, NAMES, KERNEL = "the thing", "names", "the kernel"
"""What a call comes to, through a mount: the daemon with the inode that the kernel has found; the same with names in
directories that it has found; or the kernel alone, which answers from what it knows."""


class Act(NamedTuple):
    """One call, or a few that belong together."""

    do: Do
    kinds: tuple[str, ...] = (FILE,)  # of f, each as often as it is wanted
    by: tuple[str, ...] = (NAME,)  # how f may be named
    reaches: str = THING
    sets_times: bool = False


def _with(at: At, flags: int, use: Callable[[int], object], mode: int = 0o666) -> object:
    fd = os.open(str(at.what), flags | _SOON, mode)
    try:
        return use(fd)
    finally:
        os.close(fd)


def _result_or_error(use: Callable[[], object]) -> object:
    """Return a call's result, or the text of its error; for calls that follow one that succeeded."""
    try:
        return use()
    except OSError as error:
        return error.strerror


def _used(fd: int) -> object:
    """Return the results of a read and a write through the fd, or the names in its directory."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        return _result_or_error(lambda: sorted(os.listdir(fd)))
    return _result_or_error(lambda: os.read(fd, 3)), _result_or_error(lambda: os.write(fd, b"w"))


def _open(flags: int, at: At) -> object:
    return _with(at, flags, _used)


def _make(flags: int, mode: int, at: At) -> object:
    return _with(at._replace(what=at.d + "n"), flags | os.O_CREAT, _used, mode)


def _tmpfile(mode: int, at: At) -> object:
    return _with(at._replace(what=at.d), os.O_TMPFILE | os.O_RDWR, _used, mode)


def _tmpfile_linked(mode: int, at: At) -> object:
    def link(fd: int) -> object:
        os.link(f"/proc/self/fd/{fd}", at.d + "n", follow_symlinks=True)
        return _used(fd)

    return _with(at._replace(what=at.d), os.O_TMPFILE | os.O_RDWR, link, mode)


def _empty_path(at: At) -> None:
    check_result(_libc.linkat(at.what, b"", AT_FDCWD, os.fsencode(at.d + "n"), AT_EMPTY_PATH))


def _rename(flags: int, new: str, at: At) -> None:
    to = at.e + new[2:] if new.startswith("e/") else at.d + new
    renameat2(AT_FDCWD, os.fsencode(at.d + "f"), AT_FDCWD, os.fsencode(to), flags)


def _mmap(at: At) -> None:
    def change(fd: int) -> None:
        with mmap.mmap(fd, 0) as mapped:
            mapped[0] = ord("m")
            mapped.flush()

    _with(at, os.O_RDWR, change)


def _copy(at: At) -> object:
    """From g into an fd of f."""
    source = os.open(at.d + "g", os.O_RDONLY | _SOON)
    try:
        return os.copy_file_range(source, at.fd, 1)
    finally:
        os.close(source)


def _execute(at: At) -> bytes:
    """The user that the program finds itself to be."""
    path = f"/proc/self/fd/{at.fd}" if isinstance(at.what, int) else at.what
    fds = [at.fd] if at.fd >= 0 else []
    done = subprocess.run([path], pass_fds=fds, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return done.stdout


def _go_in(at: At) -> object:
    before = os.open(".", os.O_PATH)
    try:
        os.chdir(at.what)
        return _result_or_error(lambda: sorted(os.listdir(".")))
    finally:
        os.fchdir(before)
        os.close(before)


def _stat(at: At) -> object:
    st = os.stat(at.what)
    return stat.filemode(st.st_mode), st.st_uid, st.st_gid, st.st_nlink


def _list_long(at: At) -> object:
    return [
        (one.name, _result_or_error(partial(_mode, one))) for one in sorted(os.scandir(at.d), key=lambda one: one.name)
    ]


def _mode(entry: os.DirEntry[str]) -> str:
    return stat.filemode(entry.stat(follow_symlinks=False).st_mode)


def _acl(at: At) -> bytes:
    mine = USER, 6, at.who.named(OTHERS)
    return acl((USER_OBJ, 6, NOBODY), mine, (GROUP_OBJ, 4, NOBODY), (MASK, 6, NOBODY), (OTHER, 0, NOBODY))


def _chmod(mode: int, at: At) -> None:
    os.chmod(at.what, mode)


def _mkdir(mode: int, at: At) -> None:
    os.mkdir(at.d + "n", mode)


def _mknod(mode: int, rdev: int, at: At) -> None:
    os.mknod(at.d + "n", mode, rdev)


def _truncate(size: int, at: At) -> None:
    os.truncate(at.what, size)


def _set(name: str, value: bytes | None, at: At) -> None:
    os.setxattr(at.what, name, _acl(at) if value is None else value)


def _remove(name: str, at: At) -> None:
    os.removexattr(at.what, name)


def _get(name: str, at: At) -> object:
    return os.getxattr(at.what, name)


def _access(mode: int, at: At) -> bool:
    return os.access(at.what, mode, effective_ids=True)


def _by_names(do: Do, kinds: tuple[str, ...] = (FILE,), by: tuple[str, ...] = (NAME,)) -> Act:
    return Act(do, kinds, by, NAMES)


def _looking(do: Do, kinds: tuple[str, ...] = OPENABLE, by: tuple[str, ...] = ANY) -> Act:
    return Act(do, kinds, by, KERNEL)


_CHANGING = {
    **{
        f"chmod {mode:o}": Act(partial(_chmod, mode), OPENABLE, ANY)
        for mode in (0o600, 0o640, 0o777, 0o1777, 0o2755, 0o4755, 0o6777)
    },
    "chown to himself": Act(lambda at: os.chown(at.what, os.getuid(), -1), OPENABLE, ANY),
    "chown to himself and his group": Act(lambda at: os.chown(at.what, os.getuid(), os.getgid()), OPENABLE, ANY),
    "chown to root": Act(lambda at: os.chown(at.what, 0, -1), OPENABLE, ANY),
    "chown to another": Act(lambda at: os.chown(at.what, at.who.named(OTHERS), -1), OPENABLE, ANY),
    "chown to the owner": Act(lambda at: os.chown(at.what, at.who.named(HE), -1), OPENABLE, ANY),
    "chown to nobody else": Act(lambda at: os.chown(at.what, -1, -1), OPENABLE, ANY),
    "chgrp to the team": Act(lambda at: os.chown(at.what, -1, at.who.named(TEAM)), OPENABLE, ANY),
    "chgrp to his own": Act(lambda at: os.chown(at.what, -1, os.getgid()), OPENABLE, ANY),
    "chgrp to root": Act(lambda at: os.chown(at.what, -1, 0), OPENABLE, ANY),
    "chgrp of a link": Act(lambda at: os.chown(at.d + "f", -1, at.who.named(TEAM), follow_symlinks=False), (LINK,)),
    "times, now": Act(lambda at: os.utime(at.what), OPENABLE, ANY, sets_times=True),
    "times, long ago": Act(lambda at: os.utime(at.what, (1, 2)), OPENABLE, ANY, sets_times=True),
    "times, this second": Act(lambda at: os.utime(at.what, (time.time(),) * 2), OPENABLE, ANY, sets_times=True),
    "set user.new": Act(partial(_set, "user.new", b"1"), ALL, ANY),
    "set user.old": Act(partial(_set, "user.old", b"2"), OPENABLE, ANY),
    "remove user.old": Act(partial(_remove, "user.old"), OPENABLE, ANY),
    "set an ACL": Act(partial(_set, ACCESS, None), OPENABLE, ANY),
    "remove the ACL": Act(partial(_remove, ACCESS), OPENABLE, ANY),
    "set a default ACL": Act(partial(_set, DEFAULT, None), (DIRECTORY,), ANY),
    "remove the default ACL": Act(partial(_remove, DEFAULT), (DIRECTORY,), ANY),
    "set a capability": Act(partial(_set, CAPABILITY, CAN_BIND), OPENABLE, ANY),
    "remove the capability": Act(partial(_remove, CAPABILITY), OPENABLE, ANY),
    "set trusted.new": Act(partial(_set, "trusted.new", b"1"), OPENABLE, ANY),
    "set security.new": Act(partial(_set, "security.new", b"1"), OPENABLE, ANY),
    "truncate": Act(partial(_truncate, 0), (FILE,), BY_PATH),
    "extend": Act(partial(_truncate, 9), (FILE,), BY_PATH),
    "ftruncate": Act(partial(_truncate, 1), (FILE,), BY_FD),
}
_OPENING = {
    "open r": Act(partial(_open, os.O_RDONLY), ALL, BY_PATH),
    "open w": Act(partial(_open, os.O_WRONLY), ALL, BY_PATH),
    "open rw": Act(partial(_open, os.O_RDWR), ALL, BY_PATH),
    "open r, truncating": Act(partial(_open, os.O_RDONLY | os.O_TRUNC), (FILE,), BY_PATH),
    "open w, truncating": Act(partial(_open, os.O_WRONLY | os.O_TRUNC), (FILE,), BY_PATH),
    "open to append": Act(partial(_open, os.O_WRONLY | os.O_APPEND), (FILE,), BY_PATH),
    "open, no access time": Act(partial(_open, os.O_RDONLY | os.O_NOATIME), OPENABLE, BY_PATH),
    "open w, creating": Act(partial(_open, os.O_WRONLY | os.O_CREAT), (FILE, FILE, LINK, FIFO), BY_PATH),
    "open rw, creating, truncating": Act(partial(_open, os.O_RDWR | os.O_CREAT | os.O_TRUNC), (FILE,), BY_PATH),
    "open w, creating anew": Act(partial(_open, os.O_WRONLY | os.O_CREAT | os.O_EXCL), ALL),
    "write": Act(lambda at: os.pwrite(at.fd, b"w", 0), (FILE,), BY_FD),
    "write nothing": Act(lambda at: os.pwrite(at.fd, b"", 0), (FILE,), BY_FD),
    "read": Act(lambda at: os.pread(at.fd, 3, 0), (FILE,), BY_FD),
    "write by mmap": Act(_mmap, (FILE,), BY_PATH),
    "allocate": Act(lambda at: fallocate(at.fd, 0, 0, 100), (FILE,), BY_FD),
    "punch a hole": Act(lambda at: fallocate(at.fd, FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, 0, 1), (FILE,), BY_FD),
    "copy into it": Act(_copy, (FILE,), BY_FD),
    "sync": Act(lambda at: os.fsync(at.fd), OPENABLE, BY_FD),
    "execute": Act(_execute, (FILE,), (NAME, PROC, GIVEN)),
}
_NAMING = {
    **{
        f"create {mode:o}": _by_names(partial(_make, os.O_RDWR, mode))
        for mode in (0o666, 0o400, 0o2775, 0o2767, 0o6777)
    },
    "create anew": _by_names(partial(_make, os.O_WRONLY | os.O_EXCL, 0o644)),
    "unnamed": _by_names(partial(_tmpfile, 0o600)),
    **{f"unnamed {mode:o}, linked": _by_names(partial(_tmpfile_linked, mode)) for mode in (0o666, 0o2775, 0o6777)},
    **{f"mkdir {mode:o}": _by_names(partial(_mkdir, mode)) for mode in (0o777, 0o1777, 0o2755)},
    **{
        f"mknod {name}": _by_names(partial(_mknod, mode, rdev))
        for name, mode, rdev in (
            ("fifo", stat.S_IFIFO | 0o666, 0),
            ("socket", stat.S_IFSOCK | 0o666, 0),
            ("file", stat.S_IFREG | 0o2775, 0),
            ("device", stat.S_IFCHR | 0o666, os.makedev(1, 3)),
            ("whiteout", stat.S_IFCHR, 0),
        )
    },
    "symlink": _by_names(lambda at: os.symlink("f", at.d + "n")),
    "link": _by_names(lambda at: os.link(at.d + "f", at.d + "n", follow_symlinks=False), ALL),
    "link elsewhere": _by_names(lambda at: os.link(at.d + "f", at.e + "n", follow_symlinks=False), ALL),
    "link by /proc": _by_names(
        lambda at: os.link(str(at.what), at.d + "n", follow_symlinks=True), (FILE, FILE, LINK, DEVICE), (PROC,)
    ),
    "link by fd": _by_names(_empty_path, (FILE,), BY_FD),
    "unlink": _by_names(lambda at: os.unlink(at.d + "f"), ALL),
    "unlink elsewhere": _by_names(lambda at: os.unlink(at.e + "g")),
    "rmdir": _by_names(lambda at: os.rmdir(at.d + "f"), (*(DIRECTORY,) * 3, FILE)),
    "rename": _by_names(partial(_rename, 0, "n"), ALL),
    "rename over": _by_names(partial(_rename, 0, "g"), ALL),
    "rename elsewhere": _by_names(partial(_rename, 0, "e/n"), (*ALL, DIRECTORY)),
    "rename over elsewhere": _by_names(partial(_rename, 0, "e/g"), ALL),
    "rename, replacing nothing": _by_names(partial(_rename, RENAME_NOREPLACE, "n"), ALL),
    "rename, not replacing": _by_names(partial(_rename, RENAME_NOREPLACE, "g"), ALL),
    "exchange": _by_names(partial(_rename, RENAME_EXCHANGE, "g"), ALL),
    "exchange elsewhere": _by_names(partial(_rename, RENAME_EXCHANGE, "e/g"), (*ALL, DIRECTORY)),
    "rename with whiteout": _by_names(partial(_rename, _RENAME_WHITEOUT, "n"), ALL),
    "rename over with whiteout": _by_names(partial(_rename, _RENAME_WHITEOUT, "e/g"), ALL),
}
_LOOKING = {
    "open, path only": _looking(partial(_open, os.O_PATH), ALL, BY_PATH),
    "get user.old": _looking(partial(_get, "user.old")),
    "get the ACL": _looking(partial(_get, ACCESS)),
    "list attributes": _looking(lambda at: sorted(os.listxattr(at.what))),
    "readlink": _looking(lambda at: os.readlink(at.d + "f"), (LINK,), (NAME,)),
    "list": _looking(lambda at: sorted(os.listdir(at.d)), (FILE,), (NAME,)),
    "list f": _looking(lambda at: sorted(os.listdir(at.what)), (DIRECTORY,), (NAME, *BY_FD)),
    "list, long": _looking(_list_long, (FILE,), (NAME,)),
    "stat": _looking(_stat, ALL),
    "go in": _looking(_go_in, (DIRECTORY,)),
    "access r": _looking(partial(_access, os.R_OK), OPENABLE, BY_PATH),
    "access w": _looking(partial(_access, os.W_OK), OPENABLE, BY_PATH),
    "access x": _looking(partial(_access, os.X_OK), OPENABLE, BY_PATH),
    "access rw of d": _looking(lambda at: os.access(at.d, os.R_OK | os.W_OK, effective_ids=True), (FILE,), (NAME,)),
    "handle": _looking(lambda at: bool(name_to_handle_at(AT_FDCWD, os.fsencode(at.d + "f"))), OPENABLE, (NAME,)),
}
ACTS: Mapping[str, Act] = MappingProxyType({**_CHANGING, **_OPENING, **_NAMING, **_LOOKING})
"""All of them, by what a report calls them."""
