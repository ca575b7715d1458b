"""Types the commands of a document's code blocks, in their order, on a fresh ext4 volume.

A block of `console` has commands and their output: `# ` before root's commands, `$ ` before a user's; a `\\` at the end
continues a command, and `…` in the output stands for anything. Runs of spaces count as one, as the width of a table
depends on the volume's path. A block of `sh` has only commands, which root types. `exit=N` after the language is the
exit status of each command in the block; a block with `not-run=REASON` is left out. The commands in
`<!-- test: … -->`, which readers of the page do not see, run in their place. `/scratch` stands for the volume.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Self

from tests.support import recipe_pages
from tests.support.trashd_command import TRASHD, environment

USER = 1000
_PART = re.compile(
    r"^<!-- test: (?P<setup>.*?) -->$"
    r"|^```(?P<language>console|sh)(?: exit=(?P<exit>\d+))?(?: not-run=(?P<reason>[^\n]*))?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_END = "the command ended with "


class TypedCommand(NamedTuple):
    """One command. output: what it prints, None if the page does not show it"""

    is_root: bool
    line: str
    output: str | None
    exit_status: int


class Page(NamedTuple):
    """The commands of a page in their order, and the reasons why the remaining blocks are not run."""

    commands: list[TypedCommand]
    reasons: list[str]


def read_page(text: str) -> Page:
    """Parse a page. Raises  AssertionError: a block of `console` does not begin with a command"""
    commands: list[TypedCommand] = []
    reasons: list[str] = []
    for part in _PART.finditer(text):
        if part["reason"]:
            reasons.append(part["reason"])
        elif part["setup"]:
            commands.append(TypedCommand(True, part["setup"], None, 0))
        else:
            read = _console_commands if part["language"] == "console" else _shell_commands
            commands += read(part["text"], int(part["exit"] or 0))
    return Page(commands, reasons)


def _console_commands(text: str, exit_status: int) -> Iterator[TypedCommand]:
    for step in recipe_pages.read_steps(text):
        yield TypedCommand(step.is_root, step.command, step.output, exit_status)


def _shell_commands(text: str, exit_status: int) -> Iterator[TypedCommand]:
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            yield TypedCommand(True, line, None, exit_status)


class Shell:
    """A bash that keeps its directory and variables between two commands."""

    def __init__(self, volume: Path, uid: int) -> None:
        """Start it in the volume as that user."""
        home = volume.parent / f"home-{uid}"
        home.mkdir(exist_ok=True)
        os.chown(home, uid, uid)
        path = f"{Path(TRASHD).parent}:{os.environ['PATH']}"
        # Unbuffered, so that both streams come in the order in which a terminal shows them.
        env = environment({"PATH": path, "HOME": str(home), "PYTHONUNBUFFERED": "1"})
        become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if uid else []
        self._bash = subprocess.Popen(
            [*become, "bash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            cwd=volume, env=env, text=True, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._bash.communicate()

    def run(self, line: str) -> tuple[int, str]:
        """Run a command; returns its exit status and what it printed on both streams."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        quoted = line.replace("'", "'\\''")
        self._bash.stdin.write(f"eval '{quoted}' </dev/null; echo '{_END}'$?\n")
        self._bash.stdin.flush()
        printed = ""
        for text in self._bash.stdout:
            before, end, status = text.partition(_END)
            printed += before
            if end:
                return int(status), printed
        raise AssertionError(f"the shell ended: {line}\n{printed}")


def type_page(page: Page, volume: Path) -> None:
    """Type all commands. Raises  AssertionError: one ends or prints otherwise than the page shows"""
    with ExitStack() as owned:
        shells = {is_root: owned.enter_context(Shell(volume, 0 if is_root else USER)) for is_root in (True, False)}
        for command in page.commands:
            status, printed = shells[command.is_root].run(command.line.replace("/scratch", str(volume)))
            printed = printed.replace(str(volume), "/scratch")
            assert status == command.exit_status, f"{command.line}\nended with {status}:\n{printed}"
            if command.output is not None:
                assert is_shown(command.output, printed), f"{command.line}\nprints\n{printed}\nshown:\n{command.output}"


def is_shown(shown: str, printed: str) -> bool:
    """Whether a page shows what was printed, but for the numbers of spaces."""
    shown, printed = ("\n".join(" ".join(line.split()) for line in text.splitlines()) for text in (shown, printed))
    return recipe_pages.is_shown(shown, printed)
