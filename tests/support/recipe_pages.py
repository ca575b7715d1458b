"""The recipes of docs/howto/recipes as tests follow them: the files that a page shows, the commands, their output.

A block below a line that names its file is that file: "`/etc/x`, mode 0755:" (0644 if none is told), or "Added to
`/etc/x`:" for lines of a file that is there. In a block of `console` a line that begins with `# ` is typed by root,
with `$ ` by a user, with a machine's name before it there; a `\\` at its end goes on in the next line. What follows is
what it prints, where … stands for anything.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.trashd_command import CommandResult

RECIPES = Path(__file__).parents[2] / "docs/howto/recipes"
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_BLOCK = re.compile(
    r"(?:^(?P<named>[^\n]*`[^\n]*:)\n\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_NAMED = re.compile(r"(?P<added>Added to )?`(?P<path>[^`\n]+)`(?:, mode (?P<mode>0\d{3}))?[^\n`]*:")
_TYPED = re.compile(r"^(\w*)([#$]) ((?:.*\\\n)*.*)\n", re.MULTILINE)


class RecipeFile(NamedTuple):
    """A file that a page shows; its mode; whether it is added to one that is there."""

    path: str
    text: str
    mode: int
    is_added: bool

    def put(self, root: Path) -> Path:
        """Make it below a root directory, of whoever runs this."""
        path = root / self.path.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if self.is_added else "w", encoding="utf-8") as file:
            file.write(self.text)
        path.chmod(self.mode)
        return path


class Step(NamedTuple):
    """A command that a page types: on which machine ("": the only one), as whom, and what it says there."""

    machine: str
    is_root: bool
    command: str
    output: str

    def check(self, result: CommandResult) -> None:
        """Assert that the command succeeded, and printed the output that the page shows."""
        assert result.code == 0, (self.command, result)
        printed = result.out + result.err
        assert is_shown(self.output, printed), f"{self.command}\nsays\n{printed}\nand in the recipe\n{self.output}"


def is_shown(shown: str, printed: str) -> bool:
    """Whether a page shows what was printed; `…` stands for anything."""
    return re.fullmatch(".*".join(map(re.escape, shown.split("…"))), printed, re.DOTALL) is not None


class RecipePage:
    """A page."""

    def __init__(self, name: str) -> None:
        self.text = (RECIPES / f"{name}.md").read_text(encoding="utf-8")

    def files(self) -> list[RecipeFile]:
        """All files that it shows, in their order."""
        found = []
        for block in _BLOCK.finditer(self.text):
            if named := _NAMED.fullmatch(block["named"] or ""):
                mode = int(named["mode"] or "0644", 8)
                found.append(RecipeFile(named["path"], block["text"], mode, bool(named["added"])))
        return found

    def file(self, path: str) -> RecipeFile:
        """One of them."""
        (one,) = (file for file in self.files() if file.path == path)
        return one

    def put(self, root: Path, under: str = "/") -> None:
        """Make all files, or those whose path begins so."""
        for file in self.files():
            if file.path.startswith(under):
                file.put(root)

    def steps(self, heading: str) -> list[Step]:
        """What it types in the section below a heading."""
        (section,) = (text for title, text in self._sections() if title == heading)
        blocks = (block["text"] for block in _BLOCK.finditer(section) if block["language"] == "console")
        typed = [step for text in blocks for step in read_steps(text)]
        assert typed, f"nothing is typed below {heading}"
        return typed

    def follow(self, heading: str, run_step: Callable[[Step], CommandResult]) -> None:
        """Run the steps below a heading, and compare their output with the page. Raises  AssertionError"""
        for step in self.steps(heading):
            step.check(run_step(step))

    def _sections(self) -> Iterator[tuple[str, str]]:
        _, *parts = _HEADING.split(self.text)
        yield from zip(parts[::2], parts[1::2], strict=True)


def read_steps(text: str) -> Iterator[Step]:
    """Parse a block of `console`. Raises  AssertionError: it does not begin with a command"""
    before, *parts = _TYPED.split(text)
    assert not before, f"nobody typed what says {before}"
    for machine, prompt, command, said in zip(*(parts[n::4] for n in range(4)), strict=True):
        yield Step(machine, prompt == "#", command, said)
