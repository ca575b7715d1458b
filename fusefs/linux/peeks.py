"""Looks at many names at a time by one thread, where the kernel has io_uring: `attributes.peek`, in parts.

Opening a name and asking for its attributes may have to wait for the filesystem: threads of the kernel do. What is left
(the handle, and closing) has not, and is done here.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from functools import cache
from typing import Generic, Self, TypeVar

from fusefs.core.attributes import Attributes
from fusefs.linux.attributes import BY_FD, BY_NAME, TO_PEEK, WANTED, Looker, close_path, peek
from fusefs.linux.fd import Fd
from fusefs.linux.uring import OPENAT, READ, STATX, Ring

T = TypeVar("T")

DEPTH = 4
"""Looks under way, each with an fd, for one that is at work: what waits its turn is ready, and none waits for us."""
_MANY, _GLANCE_S = 32, 0.001
"""Worth waking for; and how long to wait for so many."""
_NAME_SIZE = 256
_TICKS = 8
_BELL = 1 << 32
_TRIAL_LIMIT_S = 5.0


class _Slot:
    """A place for a look. fd: what was opened for it"""

    __slots__ = ("fd", "looker", "name_at")

    def __init__(self, name_at: int) -> None:
        self.looker = Looker()
        self.name_at = name_at
        self.fd = -1


class Peeks(Generic[T]):
    """Looks under way. For the thread alone that makes it."""

    def __init__(self, bell: int, n_at_a_time: int, *, has_handles: bool) -> None:
        """Begin with none.

        bell         an eventfd, which stays the caller's: whoever counts it up ends the wait for results
        has_handles  handles are asked for
        Raises       OSError: there is no io_uring for us, or not now
        """
        n_slots = DEPTH * n_at_a_time
        self._ring = Ring(n_slots + 1, n_at_a_time)
        self._names = ctypes.create_string_buffer(_NAME_SIZE * n_slots)
        self._names_at = ctypes.addressof(self._names)
        self._names_seen = memoryview(self._names).cast("B")
        self._nothing = ctypes.create_string_buffer(1)
        self._slots = [_Slot(self._names_at + number * _NAME_SIZE) for number in range(n_slots)]
        self._free = list(range(n_slots))
        self._under_way: dict[int, T] = {}
        self._lost: list[T] = []
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

    def begin(self, dir_fd: int, name: bytes, which: T) -> None:
        """Begin to look at a name.

        dir_fd  must stay open until the look has ended
        which   is told with what was found
        """
        if len(name) >= _NAME_SIZE:
            self._lost.append(which)
            return
        number = self._free.pop()
        self._under_way[number] = which
        slot, at = self._slots[number], number * _NAME_SIZE
        self._names_seen[at : at + len(name) + 1] = name + b"\0"
        if self._has_handles:
            self._ring.submit(OPENAT, dir_fd, number << 1, address=slot.name_at, flags=TO_PEEK)
        else:
            self._ask(number, dir_fd, slot.name_at, BY_NAME)

    def ended(self, timeout_s: float = math.inf) -> list[tuple[T, tuple[Attributes, bytes] | None]]:
        """Looks that have ended, and what they found: attributes, and the handle or nothing; None: it can't be told.

        Returns  maybe none: some have come half-way, the bell was rung, or the time is over
        """
        ended: list[tuple[T, tuple[Attributes, bytes] | None]] = [(which, None) for which in self._lost]
        self._lost.clear()
        n_wanted = min(_MANY, len(self._under_way))
        results = self._ring.enter(n_wanted, 0 if ended else _GLANCE_S) if n_wanted else []
        for token, result in results or ([] if ended else self._ring.enter(1, timeout_s)):
            number = token >> 1
            if token == _BELL:
                self._listen()
            elif token & 1 or result < 0:
                ended.append((self._under_way.pop(number), self._found(number, result)))
            else:
                slot = self._slots[number]
                slot.fd = result
                self._ask(number, result, ctypes.addressof(self._nothing), BY_FD)
        return ended

    def _ask(self, number: int, fd: int, name_at: int, flags: int) -> None:
        into = self._slots[number].looker.address
        self._ring.submit(STATX, fd, number << 1 | 1, address=name_at, length=WANTED, offset=into, flags=flags)

    def _found(self, number: int, result: int) -> tuple[Attributes, bytes] | None:
        """How a look has ended, whose place is free now."""
        self._free.append(number)
        slot = self._slots[number]
        fd, slot.fd = slot.fd, -1
        try:
            if result < 0:
                return None
            return (slot.looker.seen(), b"") if fd < 0 else slot.looker.peeked(fd)
        except OSError:
            return None
        finally:
            if fd >= 0:
                close_path(fd)

    def _listen(self) -> None:
        self._ring.submit(READ, self._bell, _BELL, address=ctypes.addressof(self._ticks), length=_TICKS)


@cache
def are_possible() -> bool:
    """Whether such looks can be made here: one was, at the root directory, and found what `peek` finds."""
    found: list[object] = []
    trial = threading.Thread(target=_try, args=[found], daemon=True)  # its ring, and the kernel's threads, end with it
    trial.start()
    trial.join(_TRIAL_LIMIT_S)
    return bool(found)


def _try(found: list[object]) -> None:
    try:
        with Fd(os.open("/", os.O_PATH | os.O_CLOEXEC)) as root, Fd(os.eventfd(0, os.EFD_CLOEXEC)) as bell:
            with Peeks[None](bell, 1, has_handles=True) as peeks:
                peeks.begin(root, b".", None)
                ended = peeks.ended(_TRIAL_LIMIT_S)
                while not ended:
                    ended = peeks.ended(_TRIAL_LIMIT_S)
            (_, seen), expected = ended[0], peek(root, b".")
    except OSError:
        return
    if seen is not None and (seen[0].ino, seen[1]) == (expected[0].ino, expected[1]):
        found.append(seen)
