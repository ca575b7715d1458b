"""Looks at many names at a time by one thread, where the kernel has io_uring: `statx.peek_closely`, in parts.

Opening a name, and asking for attributes and extended attributes, may have to wait for the filesystem: threads of the
kernel do. What is left (the handle, and closing) has not, and is done here.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import cache
from typing import Generic, Self, TypeVar

from fusefs.core.common_xattrs import CAPABILITY
from fusefs.core.inode_attributes import Attributes
from fusefs.linux.fd import Fd
from fusefs.linux.io_uring import GETXATTR, OPENAT, READ, STATX, IoUring
from fusefs.linux.statx import BY_FD, BY_NAME, TO_PEEK, WANTED, StatxReader, close_path, peek_closely

T = TypeVar("T")

Peeked = tuple[Attributes, bytes, dict[bytes, bytes | int]]
"""Attributes, the handle or nothing, and extended attributes: each one's value, or an errno."""

DEPTH = 4
"""Looks under way, each with an fd, for one that is at work: what waits its turn is ready, and none waits for us."""
_MANY, _GLANCE_S = 32, 0.001
"""Worth waking for; and how long to wait for so many."""
_NAME_SIZE, _VALUE_SIZE = 256, 1024
"""What an extended attribute has beyond that is not told."""
_XATTR_AT, _VALUE_AT, _ROOM = _NAME_SIZE, 2 * _NAME_SIZE, 2 * _NAME_SIZE + _VALUE_SIZE
"""What a look has for the kernel to read and write: its name, later its path; an xattr's name, and its value."""
_TICKS = 8
_BELL = 1 << 32
_TRIAL_LIMIT_S = 5.0


class _StatxStep(Enum):
    """Of a look, in this order; some need not be opened, and of most nothing is asked."""

    OPEN = auto()
    LOOK = auto()
    ASK = auto()


class _StatxSlot:
    """A place for a look.

    room      what the kernel reads and writes, and its address
    told_at   where the kernel writes attributes
    step      what the kernel does
    is_close  extended attributes are looked for
    fd        what was opened; -1: nothing
    seen      attributes and handle; None: not yet
    answers   to what was asked so far
    left      extended attributes to be asked for; the first one is being asked for
    """

    __slots__ = ("_looker", "answers", "fd", "is_close", "left", "room", "room_at", "seen", "step", "told_at")

    def __init__(self, room: memoryview, room_at: int) -> None:
        self._looker = StatxReader()
        self.told_at = self._looker.address
        self.room = room
        self.room_at = room_at
        self.begin()

    def begin(self, *, is_close: bool = False) -> None:
        """Nothing is known of the next one."""
        self.is_close = is_close
        self.step = _StatxStep.OPEN
        self.fd = -1
        self.seen: tuple[Attributes, bytes] | None = None
        self.answers: dict[bytes, bytes | int] = {}
        self.left: Sequence[bytes] = ()

    def see(self, *, with_handle: bool) -> Attributes:
        """Take the attributes that the kernel has written, and ask for the handle. Raises  OSError of the handle"""
        self.seen = self._looker.peeked(self.fd) if with_handle else (self._looker.seen(), b"")
        return self.seen[0]

    def put(self, at: int, text: bytes) -> int:
        """Have a text somewhere in the room; its address."""
        self.room[at : at + len(text) + 1] = text + b"\0"
        return self.room_at + at


class StatxUring(Generic[T]):
    """Looks under way. For the thread alone that makes it."""

    def __init__(
        self,
        bell: int,
        n_at_a_time: int,
        xattrs_of: Callable[[Attributes], Sequence[bytes]] = lambda _seen: (),
        *,
        has_handles: bool,
    ) -> None:
        """Begin with none.

        bell         an eventfd, which stays the caller's: counting it up ends the wait for results
        xattrs_of    extended attributes that are asked for closely, by what there is
        has_handles  handles are asked for
        Raises       OSError: there is no io_uring for us, or not now
        """
        n_slots = DEPTH * n_at_a_time
        self._ring = IoUring(n_slots + 1, n_at_a_time)
        self._rooms = ctypes.create_string_buffer(_ROOM * n_slots)
        rooms, rooms_at = memoryview(self._rooms).cast("B"), ctypes.addressof(self._rooms)
        self._nothing = ctypes.create_string_buffer(1)
        self._slots = [_StatxSlot(rooms[at : at + _ROOM], rooms_at + at) for at in range(0, n_slots * _ROOM, _ROOM)]
        self._free = list(range(n_slots))
        self._under_way: dict[int, T] = {}
        self._lost: list[T] = []
        self._xattrs_of = xattrs_of
        self._has_handles = has_handles
        self._bell = bell
        self._ticks = ctypes.create_string_buffer(_TICKS)
        self._listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._ring.close()

    @property
    def n_under_way(self) -> int:
        """Looks that were begun, and have not ended."""
        return len(self._under_way) + len(self._lost)

    def has_room(self) -> bool:
        """Whether another one may be begun."""
        return bool(self._free)

    def begin(self, dir_fd: int, name: bytes, which: T, *, is_close: bool = False) -> None:
        """Begin to look at a name.

        dir_fd    must stay open until the look has ended
        which     is told with what was found
        is_close  extended attributes are looked for
        """
        if len(name) >= _NAME_SIZE:
            self._lost.append(which)
            return
        number = self._free.pop()
        self._under_way[number] = which
        slot = self._slots[number]
        slot.begin(is_close=is_close)
        name_at = slot.put(0, name)
        if self._has_handles or is_close:
            self._ring.submit(OPENAT, dir_fd, number, address=name_at, flags=TO_PEEK)
        else:
            self._look(number, dir_fd, name_at, BY_NAME)

    def ended(self, timeout_s: float = math.inf) -> list[tuple[T, Peeked | None]]:
        """Looks that have ended, and what they found; None: it can't be told.

        Returns  maybe none: some have come half-way, the bell was rung, or the time is over
        """
        ended: list[tuple[T, Peeked | None]] = [(which, None) for which in self._lost]
        self._lost.clear()
        n_wanted = min(_MANY, len(self._under_way))
        results = self._ring.enter(n_wanted, 0 if ended else _GLANCE_S) if n_wanted else []
        for token, result in results or ([] if ended else self._ring.enter(1, timeout_s)):
            if token == _BELL:
                self._listen()
            elif not self._goes_on(token, self._slots[token], result):
                ended.append((self._under_way.pop(token), self._found(token)))
        return ended

    def _goes_on(self, number: int, slot: _StatxSlot, result: int) -> bool:
        """Take what came of a step, and begin the next one, if there is one."""
        step = slot.step
        if step is not _StatxStep.ASK and result < 0:
            return False
        if step is _StatxStep.OPEN:
            slot.fd = result
            self._look(number, result, ctypes.addressof(self._nothing), BY_FD)
            return True
        if step is _StatxStep.LOOK:
            try:
                seen = slot.see(with_handle=self._has_handles)
            except OSError:
                return False
            slot.left = self._xattrs_of(seen) if slot.is_close else ()
        else:
            slot.answers[slot.left[0]] = slot.room[_VALUE_AT : _VALUE_AT + result].tobytes() if result >= 0 else -result
            slot.left = slot.left[1:]
        if slot.left:
            self._ask(number, slot)
        return bool(slot.left)

    def _look(self, number: int, fd: int, name_at: int, flags: int) -> None:
        slot = self._slots[number]
        slot.step = _StatxStep.LOOK
        self._ring.submit(STATX, fd, number, address=name_at, length=WANTED, offset=slot.told_at, flags=flags)

    def _ask(self, number: int, slot: _StatxSlot) -> None:
        slot.step = _StatxStep.ASK
        path_at, xattr_at = slot.put(0, b"/proc/self/fd/%d" % slot.fd), slot.put(_XATTR_AT, slot.left[0])
        value_at = slot.room_at + _VALUE_AT
        self._ring.submit(GETXATTR, -1, number, address=xattr_at, length=_VALUE_SIZE, offset=value_at, path=path_at)

    def _found(self, number: int) -> Peeked | None:
        """What a look has found that has ended, whose place is free now."""
        self._free.append(number)
        slot = self._slots[number]
        if slot.fd >= 0:
            close_path(slot.fd)
        return None if slot.seen is None else (*slot.seen, slot.answers)

    def _listen(self) -> None:
        self._ring.submit(READ, self._bell, _BELL, address=ctypes.addressof(self._ticks), length=_TICKS)


@cache
def are_possible() -> bool:
    """Whether such looks can be made here: one was, at the root directory, and found what `peek_closely` finds."""
    found: list[object] = []
    trial = threading.Thread(target=_try, args=[found], daemon=True)  # its ring, and the kernel's threads, end with it
    trial.start()
    trial.join(_TRIAL_LIMIT_S)
    return bool(found)


def _try(found: list[object]) -> None:
    try:
        with Fd(os.open("/", os.O_PATH | os.O_CLOEXEC)) as root, Fd(os.eventfd(0, os.EFD_CLOEXEC)) as bell:
            with StatxUring[None](bell, 1, lambda _seen: [CAPABILITY], has_handles=True) as peeks:
                peeks.begin(root, b".", None, is_close=True)
                ended = peeks.ended(_TRIAL_LIMIT_S)
                while not ended:
                    ended = peeks.ended(_TRIAL_LIMIT_S)
            (_, seen), expected = ended[0], peek_closely(root, b".", lambda _seen: [CAPABILITY])
    except OSError:
        return
    if seen is not None and (seen[0].ino, *seen[1:]) == (expected[0].ino, *expected[1:]):
        found.append(seen)
