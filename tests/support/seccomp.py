"""A command that has not one of the system calls, as seccomp filters of containers have it.

python seccomp.py NUMBER COMMAND...

Source  seccomp(2), linux/filter.h
"""

import ctypes
import errno
import os
import struct
import subprocess
import sys

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
IO_URING_SETUP = 425  # the same number on every architecture
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_RULE = struct.Struct("=HBBI")


def deny(call: int) -> None:
    """From now on this process, and what it becomes or starts, has not that call. Root's to do."""
    wanted = (
        (_LOAD, 0, 0, 0),  # the call's number
        (_JUMP_IF_EQUAL, 0, 1, call),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    )
    rules = ctypes.create_string_buffer(b"".join(_RULE.pack(*rule) for rule in wanted))
    program = struct.pack("@HP", len(wanted), ctypes.addressof(rules))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def without(call: int) -> list[str]:
    """What goes before a command so that it has not that call."""
    return [sys.executable, __file__, str(call)]


def printed_without_uring(code: str) -> str:
    """What Python code prints without io_uring."""
    argv = [*without(IO_URING_SETUP), sys.executable, "-c", code]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    deny(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
