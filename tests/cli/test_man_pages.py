"""Each command has a man page: what its help says, and what docs/man has besides, without a warning of man's."""

from __future__ import annotations

import inspect
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from build_docs.man_pages import page_names, page_of
from build_docs.man_roff import to_roff
from fusefs.cli.group import trashd
from fusefs.core.mount_options import OPTIONS
from tests.support.manual import PARTS, TITLES, page, sources

NAMES = page_names()
HELP = {"-h", "--help"}


def commands_of(name: str) -> Iterator[click.Command]:
    """A page's command, and those inside it that are listed."""
    command = trashd if name == "trashd" else trashd.get_command(click.Context(trashd), name)
    assert command is not None
    yield command
    if isinstance(command, click.Group) and name != "trashd":
        yield from (one for one in command.commands.values() if not one.hidden)


def options_of(name: str) -> set[str]:
    """Those that are listed."""
    options = [one for command in commands_of(name) for one in command.params if isinstance(one, click.Option)]
    return {word for one in options if not one.hidden for word in (*one.opts, *one.secondary_opts)}


def plain(text: str) -> str:
    """Its words, however they are set."""
    return " ".join(re.sub(r"[`*\b]", "", text).split())


def test_every_command_has_a_part_and_there_is_no_other() -> None:
    assert sorted(path.stem for path in PARTS.iterdir()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_all_that_the_help_says(name: str) -> None:
    told = plain(page(name))
    for command in commands_of(name):
        paragraphs = re.sub(r"^Examples?:$", "\n", inspect.cleandoc(command.help or ""), flags=re.MULTILINE)
        assert [one for one in paragraphs.split("\n\n") if plain(one) not in told] == []
        texts = [one.help for one in command.params if isinstance(one, click.Option) and one.help and not one.hidden]
        assert [one for one in texts if plain(one) not in told] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_every_option_of_its_command(name: str) -> None:
    items = " ".join(re.findall(r"^- (`-.*?): ", page(name), re.MULTILINE))
    assert set(re.findall(r"`(--?[\w-]+)`", items)) == options_of(name) - HELP


@pytest.mark.parametrize("name", NAMES)
def test_no_page_knows_an_option_that_is_not(name: str) -> None:
    known = HELP.union(*(options_of(one) for one in NAMES))
    code = re.sub(r"`mv [^`]*`|^.*\b(?:find|git|sbatch|systemctl)\b.*$", "", page(name), flags=re.MULTILINE)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", code)) <= known


@pytest.mark.parametrize("name", NAMES)
def test_what_a_page_refers_to_is_there(name: str) -> None:
    assert set(re.findall(r"\b(trashd[\w-]*)\(1\)", page(name))) <= set(TITLES)


def test_the_first_page_leads_to_all_others() -> None:
    assert set(re.findall(r"^- (trashd-[\w-]*)\(1\): ", page("trashd"), re.MULTILINE)) == set(TITLES) - {"trashd"}


def test_a_part_that_tells_of_an_option_that_is_gone_is_found() -> None:
    with pytest.raises(LookupError, match="trashd undo has no --gone"):
        page_of("undo", "# trashd undo\n\n## Options\n\n- `--gone`: More of it.\n\n## See also\n\nls(1)\n")


def test_the_page_of_mounts_tells_their_options_as_the_table_does() -> None:
    (words,) = re.findall(r"^Options for `-o`: (.*?), and ", page("mount"), re.MULTILINE)
    assert re.findall(r"\w+=?", words) == [one.word() for one in OPTIONS if one.is_told]


def test_man_and_mandoc_have_nothing_to_say_of_any_page(tmp_path: Path) -> None:
    for name, source in sources().items():
        (tmp_path / name).write_bytes(source)
    pages = sorted(tmp_path.glob("*.1"))
    assert {one.stem for one in pages} == set(TITLES)
    for command in (["mandoc", "-T", "lint", "-W", "style"], ["groff", "-man", "-Tutf8", "-ww", "-K", "utf8", "-z"]):
        done = subprocess.run([*command, *pages], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_helper_of_mount_has_the_page_of_trashd_mount() -> None:
    assert sources()["mount.fuse.trashd.8"] == b".so man1/trashd-mount.1\n"


def shown(text: str) -> str:
    """What man(1) prints of a paragraph, or of an example."""
    source = to_roff(f"# trashd-x(1)\n\n## Name\n\n{text}\n", "2026-11-26", "1")
    command = ["mandoc", "-T", "utf8", "-O", "width=200"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    return "\n".join(re.sub(".\b", "", done.stdout).splitlines()[3:-2])


@pytest.mark.parametrize(
    "words",
    ["`a\\b`", "`.x`", "`'x'`", "`--a-b`", "`~/x^y`", "*DIR*", "find(1)", "a\\b", "'twas", ". dot", "`a`[=*B*]..."],
)
def test_what_is_typed_is_shown_as_it_is(words: str) -> None:
    assert shown(words).strip() == re.sub("[`*]", "", words)


def test_an_example_is_shown_as_it_is() -> None:
    lines = [".TH x", "'a' \\fB \"b\"", "", "  ~ `c` -0"]
    assert shown("```sh\n" + "\n".join(lines) + "\n```").splitlines() == [f"       {one}".rstrip() for one in lines]
