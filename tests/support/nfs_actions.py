"""What clients of NFS are made to do (uml_machine); these run in there. Names of errnos stand for errors."""

import errno
import fcntl
import glob
import os
import time
from collections.abc import Callable
from pathlib import Path

from fusefs.core.errors import TrashdError
from fusefs.linux.kernel import Kernel
from fusefs.store.orphans import tidy_all_folders
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
        self.line.report(call)
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
    return _ended(lambda: str(tidy_all_folders(Kernel(AtChange(line, n)), [os.fsencode(volume)], [boot])))


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


def hold_lock(line: Line, path: str) -> str:
    """Lock a file; at a word write to it by that fd. Tells  that it has the lock"""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    line.report("locked")
    line.wait()

    def write() -> None:
        os.pwrite(fd, b"late", 0)
        os.fsync(fd)

    return tried(write)


def wait_for_lock(_line: Line, path: str, limit_s: float) -> float:
    """Seconds until another's flock was free. Raises  TimeoutError"""
    begun = time.monotonic()
    fd = os.open(path, os.O_RDWR)  # may wait as well: for what the server has lent of the file (a delegation)
    while tried(lambda: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)) != DONE:
        if time.monotonic() - begun > limit_s:
            raise TimeoutError(path)
        time.sleep(0.1)
    return time.monotonic() - begun


def read_late(line: Line, path: str) -> list[str]:
    """Open a file, and read it at each of two words of the test, not from memory. Returns  what there was, or errnos"""
    fd = os.open(path, os.O_RDONLY)
    line.report("open")
    said = []
    for _ in range(2):
        line.wait()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            said.append(os.pread(fd, 100, 0).decode())
        except OSError as error:
            said.append(errno.errorcode[error.errno or 0])
        line.report("read")
    return said
