"""What clients of NFS are made to do (uml_machine); these run in there. Names of errnos stand for errors."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

from fusefs.core.errors import TrashdError
from fusefs.linux.kernel import Kernel
from fusefs.linux.syscalls import open_unnamed, statx
from fusefs.store.orphans import tend_all
from tests.support import store_verbs
from tests.support.uml_guest import Line

DONE = "done"
CHANGES = frozenset(
    {
        "mkdir",
        "create",
        "tmpfile",
        "write",
        "link",
        "rename",
        "renameat2",
        "exchange",
        "unlink",
        "rmdir",
        "fsync",
        "flock",
    }
)
_OFD_SETLK = 37
_WRITE_LOCK = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
_EXCHANGE = 2
_LIBC = ctypes.CDLL(None, use_errno=True)


def tried(act: Callable[[], object]) -> str:
    """DONE, or the name of the errno."""
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return DONE


class AtChange:
    """A hook that tells the n-th call (from 0) that changes something, and waits before it."""

    def __init__(self, line: Line, n: int) -> None:
        self.line, self.left = line, n

    def __call__(self, call: str) -> None:
        if call in CHANGES:
            self.left -= 1
            if self.left == -1:
                self.stop(call)

    def stop(self, call: str) -> None:
        self.line.tell(call)
        self.line.wait()


class _Dying(AtChange):
    """Ends the process there instead, and its locks with it."""

    def stop(self, call: str) -> None:
        os._exit(store_verbs.DyingAt.EXIT_CODE)


def _ended(act: Callable[[], str]) -> str:
    try:
        return act()
    except TrashdError as error:
        return f"{type(error).__name__}: {error.message()}"
    except OSError as error:
        return f"OSError: {error}"


def swap_stopping(line: Line, path: str, n: int) -> str:
    """`trashd swap` that stops before its n-th change. Returns  the id, or how it failed"""
    return _ended(lambda: store_verbs.swap(Path(path), Kernel(AtChange(line, n))).id)


def swap_dying(line: Line, path: str, n: int) -> None:
    """`trashd swap` whose process ends before its n-th change."""
    store_verbs.swap(Path(path), Kernel(_Dying(line, n)))


def changes(_line: Line, volume: str, name: str) -> dict[str, list[str]]:
    """What a swap, a restore and a reap of a tree change, in order."""
    seen: dict[str, list[str]] = {"swap": [], "restore": [], "reap": []}
    swapped = store_verbs.swap(Path(volume, name), Kernel(seen["swap"].append)).id
    store_verbs.restore(Path(volume), swapped, Kernel(seen["restore"].append))
    store_verbs.reap_now(Path(volume), store_verbs.swap(Path(volume, name)).id, Kernel(seen["reap"].append))
    return {verb: [call for call in calls if call in CHANGES] for verb, calls in seen.items()}


def restore_stopping(line: Line, volume: str, identifier: str, n: int) -> str:
    """`trashd restore`, likewise."""
    return _ended(lambda: str(store_verbs.restore(Path(volume), identifier, Kernel(AtChange(line, n)))))


def reap_stopping(line: Line, volume: str, identifier: str, n: int) -> str:
    """`trashd reap --now`, likewise."""
    return _ended(lambda: str(store_verbs.reap_now(Path(volume), identifier, Kernel(AtChange(line, n)))))


def repair_stopping(line: Line, volume: str, boot: str, n: int) -> str:
    """`trashd doctor --repair --ended`, likewise; what it takes over goes first."""
    return _ended(lambda: str(tend_all(Kernel(AtChange(line, n)), [os.fsencode(volume)], [boot])))


def restore(_line: Line, volume: str, identifier: str) -> str:
    """`trashd restore`; where the tree is now, or how it failed."""
    return _ended(lambda: os.fsdecode(store_verbs.restore(Path(volume), identifier).path))


def swap(_line: Line, path: str) -> str:
    """The id that `trashd swap` gives."""
    return store_verbs.swap(Path(path)).id


def swap_gap_ns(_line: Line, path: str) -> int:
    """How long a swap's name was missing, as it says."""
    return store_verbs.swap(Path(path)).gap_ns or 0


def bare_pair_ns(_line: Line, path: str) -> int:
    """How long a name is missing by two bare renames, each of which is done when it is told."""
    fresh, aside = (f"{path}.{os.urandom(4).hex()}" for _ in range(2))
    os.mkdir(fresh)
    begun = time.monotonic_ns()
    os.rename(path, aside)
    os.rename(fresh, path)
    return time.monotonic_ns() - begun


def states(_line: Line, volume: str) -> list[tuple[str, str]]:
    """Ids and states of the containers."""
    return [(entry.id, entry.state.value) for entry in store_verbs.entries(Path(volume))]


def move_by_fd(line: Line, directory: str, outside: str, name: str) -> tuple[str, str]:
    """Open a directory; at a word rename `outside` into it, and `name` out of it, by that fd. Tells  that it is open"""
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    line.tell("open")
    line.wait()
    into = tried(lambda: os.rename(outside, name, dst_dir_fd=held))
    out = tried(lambda: os.rename(name, f"{outside}.out", src_dir_fd=held))
    return into, out


def open_then_rename(line: Line, directory: str, source: str, target: str) -> str:
    """Open and list a directory, so that all is in the cache; at a word rename a path to another."""
    held = _open_and_look(line, directory)
    result = tried(lambda: os.rename(source, target))
    os.close(held)
    return result


def rename_into_fd(line: Line, directory: str, source: str, name: str) -> str:
    """Likewise, to a name in that directory, by its fd."""
    held = _open_and_look(line, directory)
    return tried(lambda: os.rename(source, name, dst_dir_fd=held))


def make_in_fd(line: Line, directory: str, name: str, _other: str) -> str:
    """Likewise, mkdir there."""
    held = _open_and_look(line, directory)
    return tried(lambda: os.mkdir(name, dir_fd=held))


def _open_and_look(line: Line, directory: str) -> int:
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    os.listdir(held)
    line.tell("open")
    line.wait()
    return held


def rename(_line: Line, source: str, target: str) -> str:
    return tried(lambda: os.rename(source, target))


def rmdir(_line: Line, path: str) -> str:
    return tried(lambda: os.rmdir(path))


def make_directories(_line: Line, *paths: str) -> None:
    for path in paths:
        os.makedirs(path, exist_ok=True)


def write_file(_line: Line, path: str) -> None:
    """A file with something in it."""
    Path(path).write_text("content")


def is_there(_line: Line, path: str) -> bool:
    return os.path.lexists(path)


def everything(_line: Line, folder: str) -> list[tuple[str, int]]:
    """All that lies below a directory, and its inode numbers."""
    found = [folder, *(os.path.join(upper, name) for upper, dirs, files in os.walk(folder) for name in (*dirs, *files))]
    return sorted((path, os.lstat(path).st_ino) for path in found)


def wait_for_lasting(_line: Line, pattern: str) -> None:
    """Until something matches (glob), and no power cut would undo it. Raises  TimeoutError"""
    end = time.monotonic() + 20
    while not glob.glob(pattern):
        if time.monotonic() > end:
            raise TimeoutError(pattern)
        time.sleep(0.01)
    os.sync()


def forget_caches(_line: Line) -> None:
    """The next look at anything asks the server."""
    Path("/proc/sys/vm/drop_caches").write_text("3")


def renamed(_line: Line, folder: str, flags: int) -> str:
    """renameat2 of one directory with something in it to another (EXCHANGE) or to a free name."""
    for name in "xy" if flags == _EXCHANGE else "x":
        os.makedirs(f"{folder}/{name}/inner")
    words = [os.fsencode(f"{folder}/{name}") for name in "xy"]
    if _LIBC.renameat2(-100, words[0], -100, words[1], flags):
        return errno.errorcode[ctypes.get_errno()]
    return DONE


def made_unnamed(_line: Line, folder: str) -> str:
    with Kernel().open_path(os.fsencode(folder)) as fd:
        return tried(lambda: os.close(open_unnamed(fd)))


def birth_ns(_line: Line, path: str) -> int:
    """The birth time, 0: none."""
    with Kernel().open_path(os.fsencode(path)) as fd:
        return statx(fd, asks=True).btime_ns


class _Handle(ctypes.Structure):
    _fields_ = (("n_bytes", ctypes.c_uint), ("type", ctypes.c_int), ("bytes", ctypes.c_ubyte * 128))


def handle(_line: Line, path: str) -> tuple[int, bytes]:
    found, mount_id = _Handle(n_bytes=128), ctypes.c_int()
    if _LIBC.name_to_handle_at(-100, os.fsencode(path), ctypes.byref(found), ctypes.byref(mount_id), 0):
        raise OSError(ctypes.get_errno(), path)
    return found.type, bytes(found.bytes[: found.n_bytes])


def ino_by_handle(_line: Line, volume: str, kind: int, data: bytes) -> int:
    """open_by_handle_at; the inode number of what it opens."""
    asked = _Handle(n_bytes=len(data), type=kind)
    ctypes.memmove(asked.bytes, data, len(data))
    anchor = os.open(volume, os.O_RDONLY)
    fd = _LIBC.open_by_handle_at(anchor, ctypes.byref(asked), os.O_RDONLY)
    if fd < 0:
        raise OSError(ctypes.get_errno(), volume)
    return os.fstat(fd).st_ino


def ino(_line: Line, path: str) -> int:
    return os.stat(path).st_ino


def _lock(fd: int, kind: str) -> None:
    if kind == "flock":
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    elif kind == "fcntl":
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        fcntl.fcntl(fd, _OFD_SETLK, _WRITE_LOCK)


def hold_lock(line: Line, path: str, kind: str) -> str:
    """Lock a file; at a word write to it by that fd. Tells  that it has the lock"""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    _lock(fd, kind)
    line.tell("locked")
    line.wait()

    def write() -> None:
        os.pwrite(fd, b"late", 0)
        os.fsync(fd)

    return tried(write)


def try_lock(_line: Line, path: str, kind: str) -> str:
    """Lock without waiting."""
    fd = os.open(path, os.O_RDWR)
    return tried(lambda: _lock(fd, kind))


def wait_for_lock(_line: Line, path: str, limit_s: float) -> float:
    """Seconds until another's flock was free. Raises  TimeoutError"""
    begun = time.monotonic()
    fd = os.open(path, os.O_RDWR)  # may wait as well: for what the server has lent of the file (a delegation)
    while tried(lambda: _lock(fd, "flock")) != DONE:
        if time.monotonic() - begun > limit_s:
            raise TimeoutError(path)
        time.sleep(0.1)
    return time.monotonic() - begun


def until_seen_ino(line: Line, path: str, limit_s: float) -> tuple[float, int]:
    """Look at a name in a loop until it is another inode.

    Tells     when it has looked first
    Returns   after how many seconds, and how many looks on the way found nothing
    """
    first, missing, begun = os.stat(path).st_ino, 0, time.monotonic()
    line.tell("looked")
    while time.monotonic() - begun < limit_s:
        try:
            if os.stat(path).st_ino != first:
                return time.monotonic() - begun, missing
        except FileNotFoundError:
            missing += 1
        time.sleep(0.002)
    raise TimeoutError(path)


def unlink_by_fd(line: Line, directory: str, name: str) -> str:
    """At a word unlink a name in a directory that was opened before."""
    held = _open_and_look(line, directory)
    return tried(lambda: os.unlink(name, dir_fd=held))


def silly_names(_line: Line, folder: str) -> tuple[list[str], str, str]:
    """What is in a directory whose one file was unlinked while it was open; rmdir of it then; rmdir after close."""
    os.mkdir(folder)
    fd = os.open(f"{folder}/file", os.O_RDWR | os.O_CREAT)
    os.unlink(f"{folder}/file")
    names, while_open = os.listdir(folder), tried(lambda: os.rmdir(folder))
    os.close(fd)
    return names, while_open, tried(lambda: os.rmdir(folder))


def read_late(line: Line, path: str) -> list[str]:
    """Open a file, and read it at each of two words of the test, not from memory. Returns  what there was, or errnos"""
    fd = os.open(path, os.O_RDONLY)
    line.tell("open")
    said = []
    for _ in range(2):
        line.wait()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            said.append(os.pread(fd, 100, 0).decode())
        except OSError as error:
            said.append(errno.errorcode[error.errno or 0])
        line.tell("read")
    return said
