"""Finds system calls that this kernel lacks, or that a container's seccomp filter refuses for all arguments.

Each call is tried with invalid arguments, so that it does nothing; if it exists, it fails with a different errno.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from collections.abc import Callable
from typing import NamedTuple

from fusefs.linux import syscalls
from fusefs.linux.credentials import Capability, may_use

_NO_FD = -1
_NO_FLAGS = 0xFFFFFFFF
_RING_BYTES = 120
"""The size of struct io_uring_params."""
_NO_SWAP = "swap, restore and reap do not work"
_NO_SERVICE = "the service can't run"
_NOT_OVER_ITSELF = "a directory can't be mounted over itself"


class RefusedCall(NamedTuple):
    """A call that is not available.

    errno      the name of the errno with which it is refused, such as ENOSYS
    cost       what does not work without it, or what is done instead
    is_needed  no swap is possible without it
    """

    call: str
    errno: str
    cost: str
    is_needed: bool


class _CallProbe(NamedTuple):
    """A call, and how to try it.

    probe     makes the call, which raises OSError
    cost      what does not work, or is done instead, on a kernel without the call
    denied    replaces `cost` if a filter forbids the call, which has worse consequences
    needs_mount_right  the call needs the right to mount; without that right, a refusal proves nothing
    is_emulated  on kernels without the call, the C library emulates it, and fails with EINVAL if it can't
    """

    call: str
    probe: Callable[[], object]
    cost: str
    denied: str = ""
    needs_mount_right: bool = False
    is_emulated: bool = False


_CALL_PROBES = (
    _CallProbe("openat2", lambda: syscalls.openat2(_NO_FD, b"x", 0, 0), _NO_SWAP),
    _CallProbe("statx", lambda: syscalls.statx(_NO_FD, b"x"), _NO_SWAP, is_emulated=True),
    _CallProbe(
        "renameat2",
        lambda: syscalls.renameat2(_NO_FD, b"x", _NO_FD, b"x", syscalls.RENAME_NOREPLACE),
        "a swap needs two renames, and the name is missing between them",
        denied=_NO_SWAP,
        is_emulated=True,
    ),
    _CallProbe(
        "pidfd_open",
        lambda: os.pidfd_open(0),
        f"list, restore, undo and reap fail when they query mounts; {_NO_SERVICE}",
    ),
    _CallProbe(
        "name_to_handle_at",
        lambda: syscalls.check_result(syscalls.name_to_handle_at_with_gil(_NO_FD, b"x", None, None, 0)),
        "files in a store are identified by their birth time only; a mount does not notice other programs' changes",
    ),
    _CallProbe("inotify_init1", lambda: syscalls.inotify_init1(-1), _NO_SERVICE),
    _CallProbe(
        "pidfd_send_signal", lambda: signal.pidfd_send_signal(_NO_FD, 0), "the service can't kill a child that hangs"
    ),
    _CallProbe("close_range", lambda: syscalls.close_range(1, 0), "files are closed one by one, which is slower"),
    _CallProbe(
        "copy_file_range", lambda: os.copy_file_range(_NO_FD, _NO_FD, 1), "files are copied by reading and writing them"
    ),
    _CallProbe("memfd_create", lambda: os.memfd_create("", _NO_FLAGS), "mounts do not work"),
    _CallProbe(
        "io_uring_setup",
        lambda: syscalls.io_uring_setup(0, ctypes.create_string_buffer(_RING_BYTES)),
        "mounts use /dev/fuse, which is slower",
    ),
    _CallProbe(
        "move_mount",
        lambda: syscalls.move_mount(_NO_FD, b"x", _NO_FD, b"x", 0),
        f"{_NOT_OVER_ITSELF}; other mounts get repeated requests for the ACL of their top directory",
        needs_mount_right=True,
    ),
    _CallProbe("open_tree", lambda: syscalls.open_tree(_NO_FD, b"x", 0), _NOT_OVER_ITSELF, needs_mount_right=True),
    _CallProbe(
        "mount_setattr", lambda: syscalls.mount_setattr(_NO_FD, b"x", 0, b""), _NOT_OVER_ITSELF, needs_mount_right=True
    ),
    _CallProbe(
        "fsopen",
        lambda: syscalls.fsopen(b"", _NO_FLAGS),
        "a mount gets repeated requests for the ACL of its top directory",
        needs_mount_right=True,
    ),
)


def find_refused_calls() -> tuple[RefusedCall, ...]:
    """Return the calls that trashd uses but this process can't make; those that every swap needs come first."""
    return tuple(_to_refused_call(trial, number) for trial in _CALL_PROBES if (number := _refusal(trial)))


def _to_refused_call(trial: _CallProbe, number: int) -> RefusedCall:
    cost = trial.cost if number == errno.ENOSYS else trial.denied or trial.cost
    return RefusedCall(trial.call, errno.errorcode[number], cost, cost == _NO_SWAP)


def _refusal(trial: _CallProbe) -> int:
    """Return the errno with which a call is refused; 0: it is not refused."""
    try:
        trial.probe()
    except OSError as error:
        if error.errno == errno.ENOSYS or (trial.is_emulated and error.errno == errno.EINVAL):
            return errno.ENOSYS
        if error.errno in (errno.EPERM, errno.EACCES) and (
            not trial.needs_mount_right or may_use(Capability.SYS_ADMIN)
        ):
            return error.errno
    return 0
