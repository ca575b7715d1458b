"""A command that has not one of the system calls, as seccomp filters of containers and old kernels have it.

python seccomp.py NUMBER ERRNO COMMAND...

Source  seccomp(2), linux/filter.h
"""

import ctypes
import errno
import os
import struct
import sys

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
IO_URING_SETUP = 425  # the same number on every architecture
CALLS = {
    "openat2": 437, "pidfd_open": 434, "pidfd_send_signal": 424, "close_range": 436, "io_uring_setup": IO_URING_SETUP,
    "move_mount": 429, "open_tree": 428, "mount_setattr": 442, "fsopen": 430,
    **(
        {
            "statx": 332, "renameat2": 316, "name_to_handle_at": 303, "inotify_init1": 294,
            "copy_file_range": 326, "memfd_create": 319,
        }
        if os.uname().machine == "x86_64"
        else {
            "statx": 291, "renameat2": 276, "name_to_handle_at": 264, "inotify_init1": 26,
            "copy_file_range": 285, "memfd_create": 279,
        }
    ),
}  # fmt: skip
"""Numbers of x86_64, and of what is younger: aarch64, riscv64 and loongarch64."""
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_RULE = struct.Struct("=HBBI")


def deny(call: int, refusal: int = errno.EPERM) -> None:
    """From now on this process, and what it becomes or starts, has not that call. Root's to do. refusal: an errno"""
    wanted = (
        (_LOAD, 0, 0, 0),  # the call's number
        (_JUMP_IF_EQUAL, 0, 1, call),
        (_RETURN, 0, 0, _ERRNO | refusal),
        (_RETURN, 0, 0, _ALLOW),
    )
    rules = ctypes.create_string_buffer(b"".join(_RULE.pack(*rule) for rule in wanted))
    program = struct.pack("@HP", len(wanted), ctypes.addressof(rules))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def without(call: int, refusal: int = errno.EPERM) -> list[str]:
    """What goes before a command so that it has not that call. refusal: EPERM, or ENOSYS of an old kernel"""
    return [sys.executable, __file__, str(call), str(refusal)]


if __name__ == "__main__":
    deny(int(sys.argv[1]), int(sys.argv[2]))
    os.execvp(sys.argv[3], sys.argv[3:])
