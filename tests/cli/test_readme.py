"""README tells the truth: its commands and options exist."""

import re
import shlex
from pathlib import Path

import click
import pytest

from fusefs.cli.group import trashd
from fusefs.core.mount_options import OPTIONS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
COMMANDS = trashd.list_commands(click.Context(trashd))


def find_command(name: str) -> click.Command:
    command = trashd.get_command(click.Context(trashd), name)
    assert command is not None, f"there is no trashd {name}"
    return command


def options_of(command: click.Command) -> set[str]:
    """Its options, those of the commands inside it too."""
    found = {"--help", "-h"}
    if isinstance(command, click.Group):
        found.update(*(options_of(one) for one in command.commands.values()))
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            found.update(parameter.opts + parameter.secondary_opts)
    return found


def code_of(text: str) -> list[str]:
    """The lines of the text's code blocks."""
    return [line.strip() for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]


def uses_of_trashd(text: str) -> list[list[str]]:
    """The words after `trashd` in code blocks and inline code."""
    lines = [*code_of(text), *re.findall(r"`(trashd [^`]+)`", text)]
    found = []
    for line in lines:
        for part in re.split(r"[|;]|&&", line.partition("#")[0]):
            words = shlex.split(part)
            if "trashd" in words:
                found.append(words[words.index("trashd") + 1 :])
    return [words for words in found if words and words[0] not in ("install", "--version")]


def test_the_readme_uses_trashd() -> None:
    assert len(uses_of_trashd(README)) >= 8


@pytest.mark.parametrize("words", uses_of_trashd(README), ids=" ".join)
def test_a_command_of_the_readme_exists(words: list[str]) -> None:
    given = {word.partition("=")[0] for word in words if re.match("--?[a-z0]", word)}
    assert given <= options_of(find_command(words[0]))


def test_make_targets_of_the_readme_and_for_contributors_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    used = {line.split()[1] for line in code_of(README + CONTRIBUTING) if line.startswith("make ")}
    assert used >= {"demo", "test", "quick", "lint"}
    assert used <= set(targets)


def test_make_quick_has_a_sample_of_every_command() -> None:
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    samples = (words for text in texts for words in re.findall(r"^@pytest\.mark\.quick\((.+)\)$", text, re.MULTILINE))
    assert set(re.findall(r'"(\w+)"', " ".join(samples))) == set(COMMANDS)


def test_documents_of_the_readme_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_the_help_of_a_mounts_option_tells_its_word() -> None:
    assert [one.name for one in OPTIONS if one.help and f"(-o {one.word()})" not in one.help] == []


def test_the_document_of_the_mount_tells_each_of_its_options() -> None:
    text = (ROOT / "docs" / "mount.md").read_text(encoding="utf-8")
    told = {re.sub("[ =].*", "", code) for code in re.findall(r"(?<=[` ])--[a-z][^`]*", text)}
    assert {one.switch() for one in OPTIONS if one.help} <= told
