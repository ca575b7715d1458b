"""A page of questions or messages, whose commands tests type.

A command is a line of a block of `sh`, or what stands in `code` and begins with a program's name. Where the page has
DIR, PATH, VOLUME, ID and the like, a test says what it is there; `/scratch` is the test's volume.
"""

import ast
import os
import re
import shlex
import subprocess
from pathlib import Path

from tests.support.trashd_command import TRASHD, CommandResult, environment, instead_of_exec

_DOCS = Path(__file__).parents[2] / "docs"
_PROGRAMS = "cd|chattr|mv|nsenter|rm|systemctl|tar|trashd|ulimit|umount"
_CODE = re.compile(rf"`((?:{_PROGRAMS}) [^`]+)`")
_COMMAND_ALONE = re.compile(r"trashd (?:'[^']*'|[\w./:=+,% -])*")
_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class TriedPage:
    """A page of docs by its name. sections: the text below each heading"""

    def __init__(self, name: str) -> None:
        text = (_DOCS / f"{name}.md").read_text(encoding="utf-8")
        self.sections = dict(re.findall(r"^### `?(.*?)`?\n\n((?:(?!^##).*\n)+)", text, re.MULTILINE))

    def commands(self) -> set[str]:
        """All that are told below headings."""
        text = "\n".join(self.sections.values())
        lines = [line.partition("  #")[0].strip() for block in _BLOCK.findall(text) for line in block.splitlines()]
        return {*lines, *_CODE.findall(text)}

    def typed(self, command: str, volume: Path, more: str = "", *, code: int = 0, **places: str | Path) -> str:
        """What a command of the page, and more words after it, says to who types it in a volume, on both streams.

        Raises  AssertionError: it ended with another code than that
        """
        assert command in self.commands(), "the page has it no more"
        line = f"{command} {more}".replace("/scratch", str(volume)).replace("3fc2b800eb1e", "ID")
        for name, place in places.items():
            line = re.sub(rf"(?<![-\w]){name}(?![\w])", str(place), line)
        done = in_bash(line, volume)
        assert done.code == code, (line, done)
        return done.out


def constants(*tests: str) -> set[object]:
    """All constants of test modules, among them what they type."""
    trees = (ast.parse(Path(path).read_text(encoding="utf-8")) for path in tests)
    return {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def in_bash(line: str, directory: Path) -> CommandResult:
    """How a line ends there, and what it says on both streams. A command that needs no shell gets none."""
    env = environment({"PATH": f"{Path(TRASHD).parent}:{os.environ['PATH']}"})
    argv = [TRASHD, *shlex.split(line)[1:]] if _COMMAND_ALONE.fullmatch(line) else ["bash", "-c", line]
    done = subprocess.run(
        argv, cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=env, preexec_fn=instead_of_exec(argv, env), check=False,
    )  # fmt: skip
    return CommandResult(done.returncode, os.fsdecode(done.stdout), "")
