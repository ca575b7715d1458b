"""A reader in a process of its own, which opens one file all the time and must never miss it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Open, read and close a file again and again for the time of the `with`, once at least.

    Raises  AssertionError if the reader ever met anything but the file with something in it
    """
    told, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        _read_for_ever(os.fsencode(path), says)
    os.close(says)
    try:
        os.read(told, 1)  # it has begun, or ended
        yield
    finally:
        os.close(told)
        os.kill(pid, signal.SIGTERM)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == -signal.SIGTERM, f"the reader missed {path}: {os.strerror(code)}"


def _read_for_ever(path: bytes, says: int) -> NoReturn:
    """Ends with the errno that it met."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    is_said = False
    try:
        while True:
            fd = os.open(path, os.O_RDONLY)
            if not os.read(fd, 1):
                os._exit(255)
            os.close(fd)
            if not is_said:
                is_said = bool(os.write(says, b"."))
    except OSError as error:
        os._exit(error.errno or 255)
    finally:
        os._exit(254)
