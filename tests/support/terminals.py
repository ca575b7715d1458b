"""A command on a terminal: a pseudo-terminal on which the test types, or tmux's, which keeps what it shows."""

import codecs
import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import time
from contextlib import AbstractContextManager
from pathlib import Path

from tests.support.foreground_mount import until
from tests.support.proc_stat import stat_of
from tests.support.trashd_command import TRASHD, environment, instead_of_exec

_PATIENCE_S = 60.0


class Terminal:
    """`trashd WORDS` on a terminal of 80 columns and 24 lines."""

    def __init__(self, *words: str | Path, cwd: Path | None = None, **variables: str) -> None:
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        argv, env = [TRASHD, *words], environment({"TERM": "xterm", **variables})
        self.process = subprocess.Popen(
            argv, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=env, cwd=cwd,
            preexec_fn=instead_of_exec(argv, env),  # noqa: PLW1509
        )  # fmt: skip
        os.close(theirs)
        self.output = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()  # what is read may end within a character

    def wait_for(self, words: str) -> None:
        """Read the terminal until its output contains that."""
        while words not in self.output:
            assert select.select([self._ours], [], [], _PATIENCE_S)[0], self.output
            self.output += self._decoder.decode(os.read(self._ours, 1 << 16))

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
                self.output += self._decoder.decode(part)
        except OSError:
            pass  # EIO: the other side is closed
        os.close(self._ours)
        return self.process.wait(_PATIENCE_S)

    def _waits(self) -> bool:
        return stat_of(self.process.pid)[0] == "S"


class TmuxSession(AbstractContextManager["TmuxSession"]):
    """`trashd WORDS` there, with some environment variables; tmux's own socket is in a directory."""

    def __init__(self, directory: Path, *words: str | Path, **variables: str) -> None:
        self._tmux = ("tmux", "-S", str(directory / "tmux"), "-f", "/dev/null")
        given = [f"{name}={value}" for name, value in variables.items()]
        environment = {name: value for name, value in os.environ.items() if name not in ("TMUX", "NO_COLOR")}
        # A shell prints the code: tmux 3.3 now and then leaves its child a zombie, and never knows.
        shell = ("sh", "-c", 'env "$@"; echo "exit code $?"; exec sleep 1000', "sh", *given, TRASHD, *map(str, words))
        begin = (*self._tmux, "new-session", "-d", "-x", "80", "-y", "24", *shell)
        subprocess.run(begin, env={**environment, "LC_ALL": "C.UTF-8"}, check=True)

    def __exit__(self, *_error: object) -> None:
        self.hang_up()

    def _run_tmux(self, *words: str) -> str:
        done = subprocess.run([*self._tmux, *words], stdout=subprocess.PIPE, check=True)
        return os.fsdecode(done.stdout)

    def screen(self, *options: str) -> str:
        """What it shows. options: of `tmux capture-pane`"""
        return self._run_tmux("capture-pane", "-p", *options)

    def title(self) -> str:
        """What programs can set it to."""
        return self._run_tmux("display", "-p", "#{pane_title}").strip()

    def type(self, *keys: str) -> None:
        """Press keys, by tmux's names for them."""
        self._run_tmux("send-keys", *keys)

    def wait_for(self, *words: str) -> None:
        """Read until all of them are shown."""
        end_s = time.monotonic() + _PATIENCE_S
        while not all(word in (shown := self.screen()) for word in words):
            assert time.monotonic() < end_s, shown
            time.sleep(0.1)

    def pid(self) -> int:
        """Of trashd."""
        shell = self._run_tmux("display", "-p", "#{pane_pid}").strip()
        return int(Path(f"/proc/{shell}/task/{shell}/children").read_text().split()[0])

    def end(self) -> int:
        """Wait until it ends; the exit code."""
        self.wait_for("exit code ")
        return int(self.screen().rpartition("exit code ")[2].split()[0])

    def hang_up(self) -> None:
        """Close the terminal, whatever runs there."""
        subprocess.run([*self._tmux, "kill-server"], stderr=subprocess.DEVNULL, check=False)
