"""What a power cut would have left: crash states from a log, and a check of each on a mount of its own.

A state is a moment of the log. What was written before the last flush is on the disk; of what was written
since, any part may be there. Marks seen before that moment are what the outside world had been told.
"""

import contextlib
import ctypes
import dataclasses
import os
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.loop_devices import LoopDevice, loop_device
from tests.support.write_log_disk import (
    MOUNTED,
    Flush,
    Log,
    Mark,
    Write,
    forget_btrfs_devices,
    mount_fs,
    unmount,
)

Check = Callable[[Path, Sequence[str]], str | None]

_PAGE = 4096  # torn states tear a write at pages: no disk of today writes less at once
_ZERO_PAGE = bytes(_PAGE)
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_FSCK = {
    "ext4": ("e2fsck", "-fn"),
    "xfs": ("xfs_repair", "-n"),
    # --force: a mount elsewhere has the same fsid, that of another process's state
    "btrfs": ("btrfs", "check", "--readonly", "--force"),
}
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class CrashState:
    """One possible disk after a power cut.

    kind     "flush": all writes before the flush that ended an epoch
             "lost": the same disk, but the workload had come to the end of the next epoch: none arrived
             "torn": a random part of the writes of an unfinished epoch
    n_base   all writes among the first n_base events of the log are on the disk
    extra    writes that came on top, in order
    marks    all marks that had been set, in order
    """

    kind: str
    n_base: int
    extra: tuple[Write, ...]
    marks: tuple[str, ...]

    @property
    def label(self) -> str:
        return f"{self.kind}@{self.n_base}+{len(self.extra)}"


def crash_states(
    log: Log, n_torn: int, seed: int, since: str = MOUNTED, share: tuple[int, int] = (0, 1)
) -> Iterator[CrashState]:
    """Each state that the log allows at a flush boundary, and up to n_torn torn ones for each epoch.

    An epoch is what lies between two flushes; what follows the last flush is one too. The same arguments
    give the same states. States before a mark are left out, and those that are as the one before.

    Args:
        share: (i, n): of the torn states each n-th one, beginning with another one for each i and each epoch.
    """
    rng = random.Random(seed)
    events = log.events
    marks: list[str] = []
    start = n_writes = n_epochs = 0
    last: tuple[int, int] | None = None
    while start <= len(events):
        end = next((i for i in range(start, len(events)) if isinstance(events[i], Flush)), len(events))
        marks_before = tuple(marks)
        marks += [event.text for event in events[start:end] if isinstance(event, Mark)]
        if since in marks_before:
            if last != (n_writes, len(marks_before)):
                yield CrashState("flush", start, (), marks_before)
            if len(marks) > len(marks_before):
                yield CrashState("lost", start, (), tuple(marks))
            last = (n_writes, len(marks))
            torn = list(_torn_states(log, start, end, marks_before, n_torn, rng))
            yield from torn[(n_epochs + share[0]) % share[1] :: share[1]]
            n_epochs += 1
        n_writes += sum(isinstance(event, Write) for event in events[start:end])
        start = end + 1


def _torn_states(
    log: Log, start: int, end: int, marks_before: tuple[str, ...], n_torn: int, rng: random.Random
) -> Iterator[CrashState]:
    """Up to n_torn different states of the epoch events[start:end]; half of them at its very end."""
    epoch = log.events[start:end]
    if not any(isinstance(event, Write) for event in epoch):
        return
    visited: set[tuple[tuple[int, int], ...]] = set()
    for attempt in range(n_torn):
        stop = len(epoch) if attempt % 2 == 0 else rng.randint(1, len(epoch))
        share = rng.choice((0.2, 0.5, 0.8))
        pieces = list(_pieces(epoch[:stop], whole=attempt % 4 < 2))
        chosen = [piece for piece in pieces if rng.random() < share]
        marks = (*marks_before, *(event.text for event in epoch[:stop] if isinstance(event, Mark)))
        key = ((-1, len(marks)), *((piece.offset, len(piece.data)) for piece in chosen))
        if chosen and key not in visited:
            visited.add(key)
            yield CrashState("torn", start, tuple(chosen), marks)


def _pieces(epoch: Sequence[object], *, whole: bool) -> Iterator[Write]:
    """The writes of an epoch, whole or cut at pages."""
    for event in epoch:
        if not isinstance(event, Write):
            continue
        if whole:
            yield event
            continue
        at = 0
        while at < len(event.data):
            length = min(_PAGE - (event.offset + at) % _PAGE, len(event.data) - at)
            yield Write(event.offset + at, event.data[at : at + length])
            at += length


@dataclass(frozen=True, slots=True)
class StateFailure:
    state: CrashState
    text: str

    def __str__(self) -> str:
        return f"{self.state.label} after {list(self.state.marks[-3:])}: {self.text}"


@dataclass(frozen=True, slots=True)
class Result:
    n_by_kind: Counter[str]
    n_fscks: int
    failures: tuple[StateFailure, ...]
    elapsed_s: float

    @property
    def n_states(self) -> int:
        return self.n_by_kind.total()

    def __str__(self) -> str:
        head = f"{self.n_states} states {dict(self.n_by_kind)}, {self.n_fscks} fscks, {self.elapsed_s:.1f} s"
        return "\n".join([f"{head}, {len(self.failures)} bad", *map(str, self.failures[:10])])


class _Disk:
    """The disk as it was at a moment of the log: pages that are not there are zero."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._n_applied = 0
        self._pages: dict[int, bytes] = {}

    def advance(self, n_events: int) -> None:
        """Apply all writes among the first n_events events; never goes back."""
        if n_events < self._n_applied:
            raise ValueError("states must come in the order of the log")
        for piece in _pieces(self._log.events[self._n_applied : n_events], whole=False):
            number, within = divmod(piece.offset, _PAGE)
            page = piece.data
            if len(page) != _PAGE:
                old = self._pages.get(number, _ZERO_PAGE)
                page = old[:within] + piece.data + old[within + len(piece.data) :]
            if page == _ZERO_PAGE:
                self._pages.pop(number, None)
            else:
                self._pages[number] = page
        self._n_applied = n_events

    def runs(self) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) of each run of pages that are not zero."""
        numbers = sorted(self._pages)
        first = 0
        for i in range(1, len(numbers) + 1):
            if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
                run = numbers[first:i]
                yield run[0] * _PAGE, b"".join([self._pages[number] for number in run])
                first = i


class _Replayer:
    """One image in memory with one loop device on it, rewritten for each state."""

    def __init__(self, log: Log, fstype: str, image_fd: int, device: LoopDevice, mountpoint: Path) -> None:
        self._size_bytes = log.size_bytes
        self._fstype = fstype
        self._image_fd = image_fd
        self._device = device
        self._mountpoint = mountpoint
        self._disk = _Disk(log)
        self._runs: list[tuple[int, bytes]] = []
        self._n_base = -1

    def try_state(self, state: CrashState, check: Check, *, fsck: bool) -> str | None:
        """None if the state mounts, passes the check and (if asked for) fsck; else what is wrong."""
        self._write_image(state)
        if self._fstype == "btrfs":
            forget_btrfs_devices()
        try:
            mount_fs(self._fstype, self._device.path, self._mountpoint)
        except OSError as error:
            return f"does not mount: {error}"
        try:
            trouble = check(self._mountpoint, state.marks)
        finally:
            unmount(self._mountpoint)
            self._device.wait_unused()
        return trouble or (self._fsck() if fsck else None)

    def _write_image(self, state: CrashState) -> None:
        """Make the image equal to the state; nothing of the last one is left, nor of what its check wrote."""
        if state.n_base != self._n_base:
            self._disk.advance(state.n_base)
            self._runs = list(self._disk.runs())
            self._n_base = state.n_base
        mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        if _libc.fallocate64(self._image_fd, mode, ctypes.c_int64(0), ctypes.c_int64(self._size_bytes)):
            raise OSError(ctypes.get_errno(), "punching a hole into the image")
        for offset, data in self._runs:
            os.pwrite(self._image_fd, data, offset)
        for write in state.extra:
            os.pwrite(self._image_fd, write.data, write.offset)
        self._device.drop_cache()

    def _fsck(self) -> str | None:
        command = [*_FSCK[self._fstype], str(self._device.path)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        return f"fsck {done.returncode}: {(done.stdout + done.stderr)[-400:]}" if done.returncode else None


@contextlib.contextmanager
def _replayer(log: Log, fstype: str) -> Iterator[_Replayer]:
    image_fd = os.memfd_create("crash-state")
    try:
        os.ftruncate(image_fd, log.size_bytes)
        with tempfile.TemporaryDirectory(prefix="replay-") as name, loop_device(image_fd) as device:
            yield _Replayer(log, fstype, image_fd, device, Path(name))
    finally:
        os.close(image_fd)


def check_states(
    log: Log,
    fstype: str,
    check: Check,
    *,
    n_torn: int = 2,
    fsck_stride: int = 10,
    stop_after: int | None = None,
    since: str = MOUNTED,
    share: tuple[int, int] = (0, 1),
) -> Result:
    """Mount each crash state of the log and check it.

    check        gets the mountpoint (writable, journal recovered) and the marks; says what is wrong or None.
                 What it raises ends the run: it is an error in the test, not a crash state that fails
    fsck_stride  fsck after every so many states (never if 0), after the check has done what it wanted
    stop_after   end after so many failures: enough for a negative control
    since        the mark before which states don't matter
    share        which of the torn states, as `crash_states` takes it
    """
    began = time.monotonic()
    n_by_kind: Counter[str] = Counter()
    n_fscks = 0
    failures: list[StateFailure] = []
    with _replayer(log, fstype) as replayer:
        for number, state in enumerate(crash_states(log, n_torn, 1, since, share)):
            fsck = fsck_stride > 0 and number % fsck_stride == 0
            trouble = replayer.try_state(state, check, fsck=fsck)
            n_by_kind[state.kind] += 1
            n_fscks += fsck
            if trouble is not None:
                bare = tuple(Write(write.offset, b"") for write in state.extra)  # a failure is printed
                failures.append(StateFailure(dataclasses.replace(state, extra=bare), trouble))
                if len(failures) == stop_after:
                    break
    return Result(n_by_kind, n_fscks, tuple(failures), time.monotonic() - began)
