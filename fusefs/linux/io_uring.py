"""io_uring: system calls that threads of the kernel make for one of ours, many at a time (Linux 6.1).

What is to be done and what came of it lie in memory that both sides have mapped. All is handed over inside of
io_uring_enter, by the thread that made the ring (DEFER_TASKRUN): so no memory barriers are needed, and Python has none.

Source  io_uring_setup(2), io_uring_enter(2), io_uring_register(2); linux/io_uring.h
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import struct
from typing import Self

from fusefs.linux import syscalls
from fusefs.linux.fd import Fd, closed_on_error

OPENAT, STATX, READ, GETXATTR = 18, 21, 22, 44
"""Operations. Names and paths are read when they are submitted; what else they need, when they are done."""

_SETUP_SINGLE_ISSUER, _SETUP_DEFER_TASKRUN = 1 << 12, 1 << 13
_ENTER_GETEVENTS, _ENTER_EXT_ARG = 1 << 0, 1 << 3
_REGISTER_IOWQ_MAX_WORKERS = 19
_PARAMETERS = struct.Struct("=7I12x8IQ8IQ")
"""struct io_uring_params: sizes and flags, and where in the rings the submissions' and the results' fields are."""
_SETUP_FLAGS = struct.Struct("=8xI")
_SQES_AT = 0x10000000
_SQE = struct.Struct("=BBHiQQIIQ8xQ8x")
"""struct io_uring_sqe: operation, flags, priority, fd, offset, address, length, the operation's flags, token, and a
third address."""
_CQE = struct.Struct("=QiI")
"""struct io_uring_cqe: token, result, flags."""
_MOST = struct.Struct("=II")
"""Workers for what ends by itself, and for the rest."""
_TIMESPEC = struct.Struct("=qq")
_WAIT = struct.Struct("=QIIQ")
"""struct io_uring_getevents_arg: signal mask and its size, padding, address of a timespec."""
_WORD_SIZE = 4
_ONES = (1 << 32) - 1
_TO_TRY_AGAIN = (errno.ETIME, errno.EINTR, errno.EAGAIN, errno.EBUSY)


class IoUring:
    """For the thread alone that makes it."""

    def __init__(self, n_entries: int, n_workers: int) -> None:
        """Begin with nothing under way.

        n_entries  that may be submitted at a time
        n_workers  of them, which the kernel does at a time, each by a thread, if they may have to wait
        Raises     OSError: there is none to be had: ENOSYS, EPERM (seccomp, kernel.io_uring_disabled), EINVAL before
                   Linux 6.1, EMFILE, ENOMEM
        """
        parameters = ctypes.create_string_buffer(_PARAMETERS.size)
        _SETUP_FLAGS.pack_into(parameters, 0, _SETUP_SINGLE_ISSUER | _SETUP_DEFER_TASKRUN)
        self._fd = Fd(syscalls.io_uring_setup(n_entries, parameters))
        with closed_on_error(self._fd):
            most = ctypes.create_string_buffer(_MOST.pack(n_workers, n_workers), _MOST.size)
            syscalls.io_uring_register(self._fd, _REGISTER_IOWQ_MAX_WORKERS, most, 2)
            self._map(*_PARAMETERS.unpack(parameters))
        self._timespec = ctypes.create_string_buffer(_TIMESPEC.size)
        self._wait = ctypes.create_string_buffer(_WAIT.pack(0, 0, 0, ctypes.addressof(self._timespec)), _WAIT.size)

    def _map(self, n_sqes: int, n_cqes: int, *fields: int) -> None:
        sq_head, sq_tail, _, _, _, _, sq_array, _, _ = fields[5:14]
        cq_head, cq_tail, _, _, _, cqes, _, _, _ = fields[14:]
        n_bytes = max(sq_array + n_sqes * _WORD_SIZE, cqes + n_cqes * _CQE.size)
        self._rings = mmap.mmap(self._fd, n_bytes)
        self._sqes = mmap.mmap(self._fd, n_sqes * _SQE.size, offset=_SQES_AT)
        self._sq_mask, self._cq_mask, self._cqes_at = n_sqes - 1, n_cqes - 1, cqes
        self._words = words = memoryview(self._rings).cast("I")
        self._sq_head, self._sq_tail, self._cq_head, self._cq_tail = (
            at // _WORD_SIZE for at in (sq_head, sq_tail, cq_head, cq_tail)
        )
        for number in range(n_sqes):
            words[sq_array // _WORD_SIZE + number] = number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let it go; nothing may be under way any more that writes to memory of ours."""
        self._words.release()
        self._rings.close()
        self._sqes.close()
        self._fd.close()

    def submit(
        self,
        operation: int,
        fd: int,
        token: int,
        *,
        address: int,
        length: int = 0,
        offset: int = 0,
        flags: int = 0,
        path: int = 0,
    ) -> None:
        """Have something done from the next `enter` on.

        token                  comes back with its result
        address, offset, path  memory that it reads and writes must stay where it is until then
        Raises                 OSError EBUSY: as `_free_sqe`
        """
        words, tail = self._words, self._free_sqe()
        _SQE.pack_into(
            self._sqes, (tail & self._sq_mask) * _SQE.size,
            operation, 0, 0, fd, offset, address, length, flags, token, path,
        )  # fmt: skip
        words[self._sq_tail] = (tail + 1) & _ONES

    def _free_sqe(self) -> int:
        """Return the tail. Raises  OSError EBUSY: the queue is full; one more would overwrite the oldest submission."""
        tail = self._words[self._sq_tail]
        if (tail - self._words[self._sq_head]) & _ONES > self._sq_mask:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return tail

    def enter(self, n_results: int, timeout_s: float = math.inf) -> list[tuple[int, int]]:
        """Hand over what was submitted, and wait for some results; token and result, or negative errno, of each.

        Returns  fewer, or none, when the time is over, and when there are signals
        """
        words = self._words
        n_new = (words[self._sq_tail] - words[self._sq_head]) & _ONES
        flags, wait = _ENTER_GETEVENTS, None
        if timeout_s < math.inf:
            _TIMESPEC.pack_into(self._timespec, 0, int(timeout_s), int(timeout_s % 1 * 1e9))
            flags, wait = _ENTER_GETEVENTS | _ENTER_EXT_ARG, self._wait
        try:
            syscalls.io_uring_enter(self._fd, n_new, n_results, flags, wait)
        except OSError as error:
            if error.errno not in _TO_TRY_AGAIN:
                raise
        head, tail = words[self._cq_head], words[self._cq_tail]
        found = []
        while head != tail:
            token, result, _ = _CQE.unpack_from(self._rings, self._cqes_at + (head & self._cq_mask) * _CQE.size)
            found.append((token, result))
            head = (head + 1) & _ONES
        words[self._cq_head] = head
        return found
