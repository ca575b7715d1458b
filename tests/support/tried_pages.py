"""A page of questions or messages, whose commands tests type.

A command is a line of a block of `sh`, or what stands in `code` and begins with a program's name. Where the page has
DIR, PATH, VOLUME, ID and the like, a test says what it is there; `/scratch` is the test's volume.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.support.trashd_command import TRASHD, CommandResult, environment

_DOCS = Path(__file__).parents[2] / "docs"
_PROGRAMS = "cd|chattr|mv|nsenter|rm|systemctl|tar|trashd|ulimit|umount"
_CODE = re.compile(rf"`((?:{_PROGRAMS}) [^`]+)`")
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


def in_bash(line: str, directory: Path) -> CommandResult:
    """How a line ends there, and what it says on both streams."""
    path = f"{Path(TRASHD).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=environment({"PATH": path}), check=False,
    )  # fmt: skip
    return CommandResult(done.returncode, os.fsdecode(done.stdout), "")
