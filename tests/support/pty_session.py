"""A command on a terminal, and a person who reads and types there."""

from __future__ import annotations

import codecs
import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
from pathlib import Path

from tests.support.foreground_mount import until
from tests.support.proc_stat import stat_of
from tests.support.trashd_command import TRASHD, environment

_PATIENCE_S = 60.0


class Terminal:
    """`trashd WORDS` on a terminal of 80 columns and 24 lines."""

    def __init__(self, *words: str | Path, cwd: Path | None = None, **variables: str) -> None:
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            [TRASHD, *words], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env=environment({"TERM": "xterm", **variables}), cwd=cwd,
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()  # what is read may end within a character

    def wait_for(self, words: str) -> None:
        """Read until it showed that."""
        while words not in self.seen:
            assert select.select([self._ours], [], [], _PATIENCE_S)[0], self.seen
            self.seen += self._decoder.decode(os.read(self._ours, 1 << 16))

    def type(self, keys: str) -> None:
        """Type something."""
        os.write(self._ours, keys.encode())

    def interrupt(self) -> int:
        """Ctrl-C, when it waits for something: readline misses one that comes just before; the exit code."""
        assert until(self._waits, _PATIENCE_S)
        self.process.send_signal(signal.SIGINT)
        return self.end()

    def end(self) -> int:
        """Read until it ends; the exit code."""
        try:
            while part := os.read(self._ours, 1 << 16):
                self.seen += self._decoder.decode(part)
        except OSError:
            pass  # EIO: the other side is closed
        os.close(self._ours)
        return self.process.wait(_PATIENCE_S)

    def _waits(self) -> bool:
        return stat_of(self.process.pid)[0] == "S"
