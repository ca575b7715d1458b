"""A command of trashd's, and what another process does just before one of its calls to the kernel."""

import os
import select
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from fusefs.cli.main import run
from fusefs.linux.kernel import Kernel
from tests.support.other_users import called_by, query_without_fork
from tests.support.plain_twin import MARK, Step, Twins
from tests.support.privileges import Credentials
from tests.support.store_verbs import entries, problems

for _name in (
    "doctor",
    "du",
    "group",
    "init",
    "keep",
    "list",
    "reap",
    "restore",
    "rm",
    "swap",
    "sweep",
):
    import_module(f"fusefs.cli.{_name}")  # once, not in each child
for _name in ("engine.pace", "service.state_files", "cli.wait"):
    import_module(f"fusefs.{_name}")  # what they import late

COMPLETE = "complete"
"""Words that stand for a shell that completes an id (docs of click: _TRASHD_COMPLETE)."""
BROKEN = 111
"""The exit code of a command that ended by what no command may raise."""


class Ended(NamedTuple):
    """How a command ended.

    code    its exit code
    output  standard output and error, in the order of their writing
    acted   whether it came to the call before which another was to act
    """

    code: int
    output: str
    acted: bool


def command_as(person: Credentials, commands: Sequence[Sequence[str]], moment: int, act: Callable[[], object]) -> Ended:
    """Run `trashd WORDS` as a user; `act` is called, by this process, before the command's call number `moment`.

    Several commands run one after the other, in one process; the code is that of the last. A command's own children go
    on counting from where they were forked; each waits until the act is done. If the command makes fewer calls, none
    acts. With a moment below 0 nothing is to act, and the process has this one's memory.
    """
    with tempfile.TemporaryFile() as output_file:
        if moment < 0:
            code = called_by(person.be, partial(_run_all, commands, output_file.fileno()), "a command")
            output_file.seek(0)
            return Ended(code, os.fsdecode(output_file.read()), acted=False)
        paused, go = os.pipe(), os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _command(person, commands, output_file.fileno(), _Pausing(moment, paused[1], go[0]))
        acted = _serve(pid, paused[0], go[1], act)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for fd in (*paused, *go):
            os.close(fd)
        output_file.seek(0)
        return Ended(code, os.fsdecode(output_file.read()), acted)


class _Pausing:
    """A hook that has another process act before its n-th call (from 0), and waits until the act is over.

    paused_fd  gets a byte when the command pauses
    """

    def __init__(self, n: int, paused_fd: int, go: int) -> None:
        self.left = n
        self.paused_fd = paused_fd
        self.go = go

    def __call__(self, _call: str) -> None:
        self.left -= 1
        if self.left == -1:
            os.write(self.paused_fd, b".")
            os.read(self.go, 1)


def _command(person: Credentials, commands: Sequence[Sequence[str]], out: int, hook: _Pausing) -> None:
    code = BROKEN
    try:
        person.be()
        Kernel.__init__.__defaults__ = (hook,)  # every Kernel that a command makes for itself
        if commands == [[COMPLETE]]:
            os.environ.update(_TRASHD_COMPLETE="bash_complete", COMP_WORDS="trashd restore ", COMP_CWORD="2")
            commands = [[]]
        code = _run_all(commands, out)
    finally:
        os._exit(code)


def _run_all(commands: Sequence[Sequence[str]], out: int) -> int:
    """Run commands one after the other, with their output in a file; return the code of the last."""
    null, streams = os.open(os.devnull, os.O_RDONLY), (sys.stdout, sys.stderr)
    for fd, number in ((null, 0), (out, 1), (out, 2)):
        os.dup2(fd, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    try:
        return [run([*words]) for words in commands][-1]
    except BaseException:
        traceback.print_exc()
        return BROKEN
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = streams


def _serve(pid: int, paused_fd: int, go: int, act: Callable[[], object]) -> bool:
    """Act when the command pauses for the first time; return whether it paused."""
    acted = False
    ended = os.pidfd_open(pid)
    try:
        while ended not in (ready := select.select([paused_fd, ended], [], [])[0]):
            os.read(ready[0], 1)
            if not acted:
                act()
            acted = True
            os.write(go, b".")
    finally:
        os.close(ended)
    return acted


_BY_THE_KERNEL = 11


def run_interrupted(
    twins: Twins,
    person: Credentials,
    commands: str,
    identifier: str = "",
    moment: int = -1,
    act: Sequence[Step] = (),
    check: Callable[[], object] = bool,
) -> Ended:
    """Run a command, with the act before its call number `moment` if it makes so many calls.

    commands  one in a line
    check     called just before the act
    """
    typed = commands.replace("VOLUME", str(twins.first.volume)).replace("ID", identifier)
    argvs = [words.split() for words in typed.splitlines()]
    with query_without_fork() if moment < 0 else nullcontext():
        ended = command_as(person, argvs, moment, lambda: (check(), twins.act(twins.first, act)))
    assert ended.code not in (BROKEN, _BY_THE_KERNEL), ended
    assert "Traceback" not in ended.output, ended
    return ended


def unreported(twins: Twins) -> list[str]:
    """Return the files in the store that neither list nor checker reports; the drop directory does not count."""
    volume = twins.first.volume
    with query_without_fork():
        reported = {os.fsdecode(entry.path) for entry in entries(volume)} | {
            problem.where for problem in problems(volume)
        }
    found = [str(path) for path in (volume / ".trashd").rglob("*") if "drop" not in path.parts and _counts(path)]
    return [path for path in found if not any(where in path for where in reported)]


def _counts(path: Path) -> bool:
    return path.is_file() and path.read_text(errors="replace").startswith(MARK)
