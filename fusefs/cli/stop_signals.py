"""Treats Ctrl-C as a request to stop at the next safe point."""

from __future__ import annotations

import mmap
import os
import signal
from types import FrameType
from typing import Self

from fusefs.core.errors import Exit

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Records whether SIGINT or SIGTERM arrived in this process, its parent, or a child process that acts for it.

    A second signal ends the process at once; nothing is lost in that case either.
    """

    def __init__(self) -> None:
        self._number = mmap.mmap(-1, 1)  # shared memory, since a command acts as another user in a child process
        self._pid = os.getpid()
        self._is_asked = False

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            signal.signal(number, self._ask)
        return self

    def __exit__(self, *_error: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def __call__(self) -> bool:
        return self._number[0] != 0

    def exit_code(self) -> int:
        """Return 128 plus the signal number, as a shell does."""
        return Exit.SIGNALLED + self._number[0]

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        if self._is_asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        # Each process counts the signals for itself, since the terminal sends Ctrl-C to all of them.
        self._is_asked = True
        self._number[0] = number
        if os.getpid() == self._pid:
            os.write(2, b"trashd: stopping; a second signal stops at once\n")
