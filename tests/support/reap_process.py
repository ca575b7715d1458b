"""A reap with a session of its own: stopped, killed, waited for to its last process; and what it reports."""

import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import NoReturn

from fusefs.core.container_states import State
from fusefs.core.errors import TrashdError
from fusefs.core.names import VolumeId, make_id
from fusefs.core.record import Method, Record
from fusefs.core.record_decoding import decode_record
from fusefs.core.results import Reaped, Report
from fusefs.linux import syscalls
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.reaper.late_arrivals import LateArrivals
from fusefs.reaper.reap import DEFAULT_REMOVAL, RemovalOptions, remove_contents
from tests.support.proc_stat import all_stats
from tests.support.store_verbs import entries, place, reap_now

DONE, QUARANTINED, LOST, BROKEN = 0, 3, 10, 11
"""Exit codes of a reap that ended by itself."""
KILLED = -signal.SIGKILL

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Reaping:
    """A running reap: its first process, which leads the session, and ours that waits for all of them."""

    pid: int
    guard: int
    guard_fd: int  # a pidfd

    def processes(self) -> list[int]:
        """What lives of it, the first process included."""
        return [pid for pid, state in session(self.pid) if state != "Z"]

    def workers(self) -> list[int]:
        """What lives of it, without the first process."""
        return [pid for pid in self.processes() if pid != self.pid]

    def signal_all(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def signal_one(self, pid: int, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def has_ended(self, within_s: float = 0) -> bool:
        """Whether every process has ended; waits that long for it."""
        return bool(select.select([self.guard_fd], [], [], within_s)[0])

    def is_stopped(self) -> bool:
        """Whether nothing of it runs any more, and something is left to go on."""
        states = {state for _, state in session(self.pid)} - {"Z"}
        return states == {"T"}

    def stop(self) -> bool:
        """Stop every process where it is; False if there is none left."""
        self.signal_all(signal.SIGSTOP)
        while not self.has_ended():
            if self.is_stopped():
                return True
            os.sched_yield()
        return False

    def wait(self) -> int:
        """How the first process ended, once all have: an exit code, or KILLED."""
        select.select([self.guard_fd], [], [])
        with suppress(ChildProcessError):
            os.close(self.guard_fd)
        code = os.waitstatus_to_exitcode(os.waitpid(self.guard, 0)[1])
        return code - 256 if code > 128 else code


def empty_container(kernel: Kernel, container: Fd, wishes: RemovalOptions = DEFAULT_REMOVAL) -> Report:
    """Remove what is in a container of ours, all of which was given."""
    return remove_contents(kernel, container, all_given(kernel, container), wishes)[0]


def all_given(kernel: Kernel, container: Fd) -> LateArrivals:
    """Says of whatever is in a container of ours that it was given."""
    identifier = make_id("20260101T000000", 0, b"job", bytes(6))
    record = Record(identifier, VolumeId("0" * 32), Method.REMOVED, None, None, None, None, "", "", 0, 0)
    return LateArrivals(kernel, container, os.geteuid(), record, without_doubt=True)


def session(leader: int) -> list[tuple[int, str]]:
    return [(pid, fields[0]) for pid, fields in all_stats() if int(fields[3]) == leader]


def start(body: Callable[[], int]) -> Reaping:
    """Run `body`, which returns an exit code, in a session of its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    ours, theirs = os.pipe()
    guard = os.fork()
    if guard == 0:
        try:
            os.close(ours)
            _guard(theirs, body)
        finally:
            os._exit(BROKEN)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        pid = int(pipe.readline())
    return Reaping(pid, guard, os.pidfd_open(guard))


def _guard(pid_fd: int, body: Callable[[], int]) -> NoReturn:
    """Start the first process; become the parent of what outlives its own; end as the first one did."""
    syscalls.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    first = os.fork()
    if first == 0:
        code = BROKEN
        try:
            os.setsid()
            os.write(pid_fd, b"%d\n" % os.getpid())
            os.close(pid_fd)
            code = body()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    os.close(pid_fd)
    code = BROKEN
    try:
        while True:
            pid, status = os.wait()
            if pid == first:
                code = os.waitstatus_to_exitcode(status)
    except ChildProcessError:
        os._exit(code % 256)


def start_reap(volume: Path, identifier: str) -> Reaping:
    """Start `trashd reap --now ID`."""
    return start(lambda: code_of(lambda: reap_now(volume, identifier)))


def code_of(reap: Callable[[], Reaped]) -> int:
    """How a reap ended, as an exit code."""
    try:
        reaped = reap()
    except TrashdError:
        return LOST
    if reaped.lost:
        return LOST
    return QUARANTINED if reaped.report.n_failed else DONE


def start_and_stop(volume: Path, identifier: str, after_s: float) -> Reaping | None:
    """A reap that was stopped in the middle of its work, that long after its claim; None if it was faster."""
    reaping = start_reap(volume, identifier)
    while not is_claimed(volume, identifier):
        if reaping.has_ended():
            break
        os.sched_yield()
    reaping.has_ended(after_s)
    if reaping.stop() and _is_under_way(volume, identifier):
        return reaping
    reaping.signal_all(signal.SIGCONT)
    reaping.wait()
    return None


def is_claimed(volume: Path, identifier: str) -> bool:
    return any((volume / ".trashd" / "u").glob(f"*/{State.REAPING.value}/{identifier}/record.json"))


def _is_under_way(volume: Path, identifier: str) -> bool:
    """Whether something of a claimed tree is left: between that and the record's end there is a moment."""
    return any((volume / ".trashd" / "u").glob(f"*/{State.REAPING.value}/{identifier}/tree"))


def state_of(volume: Path, identifier: str) -> State | None:
    """Where a container is; None if it is gone."""
    return next((entry.state for entry in entries(volume) if entry.id == identifier), None)


@contextmanager
def beside(act: Callable[[int], None], pause_s: float = 0.0) -> Iterator[Callable[[], int]]:
    """Another process that calls act(0), act(1) and so on, until one raises OSError or the block ends.

    pause_s  after each call: a busy loop leaves nothing to a service, whose priority is idle
    Yields  how many it has done by now
    """
    done = memoryview(mmap(-1, 8)).cast("Q")
    pid = os.fork()
    if pid == 0:
        try:
            for n in range(1 << 62):
                act(n)
                done[0] = n + 1
                if pause_s:
                    select.select([], [], [], pause_s)
        except OSError:
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(BROKEN)
    fd = os.pidfd_open(pid)
    try:
        while not done[0] and not select.select([fd], [], [], 0)[0]:
            os.sched_yield()
        yield lambda: done[0]
    finally:
        os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(fd)
    assert code in (0, KILLED)


def reasons(reaped: Reaped) -> dict[bytes, int]:
    """The errno of each entry that could not be removed, without the directories above it: those are not empty."""
    told = {failure.name: failure.errno for failure in reaped.report.failures}
    assert reaped.report.n_failed >= len(told)
    return {
        name: number
        for name, number in told.items()
        if not any(other.startswith(name + b"/") for other in told if other != name)
    }


def assert_quarantined(volume: Path, reaped: Reaped) -> None:
    """It is in quarantine, and its record says what the report says."""
    assert state_of(volume, reaped.id) is State.QUARANTINE
    record = decode_record((place(volume, reaped.id) / "record.json").read_bytes())
    assert record.partial
    assert {(one.name, one.errno) for one in record.failures} == {(f.name, f.errno) for f in reaped.report.failures}


def left_in(volume: Path, identifier: str) -> set[str]:
    """What is left of a tree: paths from it, directories that only lead there too."""
    tree = place(volume, identifier) / "tree"
    return {str(path.relative_to(tree)) for path in tree.rglob("*")}
