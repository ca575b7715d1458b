"""Processes beside a test: clients of a mount, which may hang, and those that do something until they are ended."""

import contextlib
import errno
import os
import select
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from tests.support.other_users import become

Work = Callable[[], None]


class EndsWorkers:
    """A hook that ends a forked worker before its n-th unlink; the process that made it never."""

    def __init__(self, n: int) -> None:
        self.left = n
        self.pid = os.getpid()

    def __call__(self, call: str) -> None:
        self.left -= call == "unlink"
        if self.left < 0 and os.getpid() != self.pid:
            os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def workers(works: Sequence[Work]) -> Iterator[list[int]]:
    """Each in a process of its own, killed at the end.

    Yields   their process ids
    Raises   AssertionError: one of them ended before, by an exception (told on stderr) or by itself
    """
    pids: list[int] = []
    try:
        for work in works:
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                _work(work)
            pids.append(pid)
        yield pids
    finally:
        ended = [pid for pid in pids if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert not ended, "a worker ended before the test"


def _work(work: Work) -> NoReturn:
    try:
        work()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


@contextmanager
def process_of(uid: int, act: Callable[[], object]) -> Iterator[int]:
    """Yield the pid of a process of a user that has called `act`, and that waits until the block ends."""
    reader, writer = os.pipe()

    def hold() -> None:
        become(uid)
        act()
        os.write(writer, b"x")
        signal.pause()

    with workers([hold]) as [pid]:
        os.close(writer)
        has_done = os.read(reader, 1)
        os.close(reader)
        assert has_done, "the process could not act"
        yield pid


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Open, read and close a file again and again for the time of the `with`, once at least.

    Raises  AssertionError if the reader ever met anything but the file with something in it
    """
    read_fd, ready_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        _read_for_ever(os.fsencode(path), ready_fd)
    os.close(ready_fd)
    try:
        os.read(read_fd, 1)  # the reader has read once, or has ended
        yield
    finally:
        os.close(read_fd)
        os.kill(pid, signal.SIGTERM)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == -signal.SIGTERM, f"the reader missed {path}: {os.strerror(code)}"


def _read_for_ever(path: bytes, ready_fd: int) -> NoReturn:
    """Read a file again and again; exit with the errno of the first error.

    ready_fd  gets a byte after the first read
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    is_ready = False
    try:
        while True:
            fd = os.open(path, os.O_RDONLY)
            if not os.read(fd, 1):
                os._exit(255)
            os.close(fd)
            if not is_ready:
                is_ready = bool(os.write(ready_fd, b"."))
    except OSError as error:
        os._exit(error.errno or 255)
    finally:
        os._exit(254)


LIMIT_S = 60.0


@contextmanager
def clients(acts: Sequence[Callable[[], object]]) -> Iterator[list[int]]:
    """Processes that do something once, each ending with its errno, or 255 where something else went wrong; they are
    there when they are waited for.
    """
    pids = []
    for act in acts:
        pid = os.fork()
        if pid == 0:
            code = 255
            try:
                act()
                code = 0
            except BaseException as error:  # nothing of it gets into the parent's frames, which are here, too
                code = (isinstance(error, OSError) and error.errno) or 255
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    try:
        yield pids
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)


def kernel_stacks() -> str:
    """Return how many threads of each program wait where in the kernel; after a hang in CI nothing else is left."""
    waits: Counter[str] = Counter()
    for task in Path("/proc").glob("[0-9]*/task/*"):
        with contextlib.suppress(OSError):  # it may have ended
            calls = [line.split()[-1].partition("+")[0] for line in (task / "stack").read_text().splitlines()]
            waits[f"{(task / 'comm').read_text().strip()}: {' '.join(calls[:6])}"] += 1
    return "\n".join(f"{n} {where}" for where, n in waits.most_common())


def ends(pid: int) -> int:
    """A client's errno; it must end in time."""
    fd = os.pidfd_open(pid)
    try:
        assert select.select([fd], [], [], LIMIT_S)[0], f"client {pid} hangs; threads wait in:\n{kernel_stacks()}"
    finally:
        os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def finish(acts: Sequence[Callable[[], object]]) -> None:
    """Have clients do something to its end, at which none may have failed."""
    with clients(acts) as pids:
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0] * len(acts), [errno.errorcode.get(code, code) for code in codes]


def is_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def in_time(act: Callable[[], object]) -> None:
    """Something that has to end while other things hang."""
    with clients([act]) as (pid,):
        assert ends(pid) == 0
