"""Plain command lines: they are read as click reads them, and load nothing that is done without."""

import os
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path

import click
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fusefs.cli import rm_paths, swap_paths
from fusefs.cli.group import trashd as commands
from fusefs.core.record import NOTE_MAX_CHARS
from tests.support.make_trees import make_tree
from tests.support.real_filesystems import bind_mount
from tests.support.trashd_command import CommandResult, environment, trashd
from tests.unit.test_import_cost import HEAVY

needs_root = pytest.mark.needs("root")
EVERY_OPTION = ("--json", "--unlike", "--keep-for", "3d", "--note=a word")
LINES = {"swap": swap_paths.LINE, "rm": rm_paths.LINE}
VALUES_TYPED = [
    "3d", "0s", "1d12h", "9999w", "99999w", "3", "3 days", "", "x", "-1d", "a note", "n" * (NOTE_MAX_CHARS + 1),
    "é", "\udcff", "--", "-", ".",
]  # fmt: skip
NOT_OPTIONS = ["--", "-", "--no-such", "--js", "--json=1", "-0n", "-rf", "-rx", "-fv=", "--wait=done"]


def click_command(name: str) -> click.Command:
    command = commands.get_command(click.Context(commands), name)
    assert command is not None
    return command


def words_of(name: str) -> st.SearchStrategy[list[str]]:
    """Words after a command, those that it knows more often."""
    options = [one for param in click_command(name).params if isinstance(param, click.Option) for one in param.opts]
    plain = [*LINES[name].options]
    valued = [one for one, option in LINES[name].options.items() if option.reads and one.startswith("--")]
    typed = st.sampled_from(VALUES_TYPED)
    return st.lists(
        st.one_of(
            st.sampled_from(plain),
            st.sampled_from([one for one in options if one != "--help"] + NOT_OPTIONS),
            st.sampled_from(["a", "b/c", "\udcff", "."]),
            typed,
            st.builds("{}={}".format, st.sampled_from(valued), typed),
            st.tuples(st.sampled_from(valued), typed),
        ),
        max_size=7,
    ).map(lambda words: [one for word in words for one in ([word] if isinstance(word, str) else word)])


def check_alike(name: str, words: list[str]) -> None:
    plain = LINES[name].read(words)
    if plain is not None:
        by_click = click_command(name).make_context(name, [*words]).params
        usual = {name: one.default for name, one in signature(LINES[name].run).parameters.items()}
        assert plain == {name: by_click.pop(name) for name in plain}
        assert all(value == usual[name] if name in usual else not value for name, value in by_click.items())


@given(words_of("swap"))
@example(["--keep-for", "3d", "--keep-for", "x", "a"])
@example(["--note", "--json", "a"])
@example(["a", "--", "--json"])
@example(["-", "a"])
def test_what_a_plain_line_of_swap_reads_click_reads_alike(words: list[str]) -> None:
    check_alike("swap", words)


@given(words_of("rm").filter(bool))
@example(["-rf", "a"])
@example(["-rfv", "--", "-f"])
def test_what_a_plain_line_of_rm_reads_click_reads_alike(words: list[str]) -> None:
    check_alike("rm", words)


@given(st.lists(st.sampled_from([*EVERY_OPTION[:2], "--keep-for=3d", "--note=x", "a", "b"]), max_size=6))
def test_a_line_of_listed_options_and_paths_is_plain(words: list[str]) -> None:
    assert (swap_paths.LINE.read(words) is None) == (not {"a", "b"} & {*words})


@pytest.mark.parametrize("name", LINES)
def test_options_of_a_plain_line_are_clicks(name: str) -> None:
    by_word = {
        one: param for param in click_command(name).params if isinstance(param, click.Option) for one in param.opts
    }
    for word, option in LINES[name].options.items():
        param = by_word[word]
        assert (option.name, option.reads is None, False) == (param.name, param.is_flag, param.multiple)


BY_CLICK = "from fusefs.cli import main; main._find_plain_line = lambda _arguments: None; main.main()"


def run_by_click(*words: str | Path) -> CommandResult:
    """Run `trashd WORDS`, with click for every line."""
    done = subprocess.run(
        [sys.executable, "-c", BY_CLICK, *words], capture_output=True, env=environment({}), check=False
    )
    return CommandResult(done.returncode, os.fsdecode(done.stdout), os.fsdecode(done.stderr))


def list_imports(done: CommandResult) -> list[str]:
    assert done.code == 0
    return [line.rpartition("|")[2].strip() for line in done.err.splitlines()]


@needs_root
def test_a_plain_swap_imports_nothing_of_ours_once_it_is_under_way(volume: Path) -> None:
    victim = make_tree(volume / "victim", {"file": "content"})
    imported = list_imports(trashd("swap", victim, PYTHONPROFILEIMPORTTIME="1"))
    assert [name for name in imported if name.startswith("fusefs.")][-1] == "fusefs.cli.swap_paths"


@needs_root
def test_a_swap_with_options_imports_nothing_heavy(volume: Path) -> None:
    victim, spaced = make_tree(volume / "victim", {"file": "content"}), make_tree(volume / "a mount\\'s", {})
    trashd("swap", victim)
    bare = list_imports(trashd("--version", PYTHONPROFILEIMPORTTIME="1"))
    before_ours = bare[: bare.index("fusefs.cli")]
    with bind_mount(spaced, spaced):  # anybody's mount anywhere
        imported = list_imports(trashd("swap", *EVERY_OPTION, victim, PYTHONPROFILEIMPORTTIME="1"))
    assert HEAVY & {*imported} - {*before_ours} == set()


@needs_root
@pytest.mark.parametrize("words", [EVERY_OPTION, ("--json",), ("--note", "é")])
def test_a_swap_reports_the_same_with_and_without_click(volume: Path, words: tuple[str, ...]) -> None:
    victim, missing = make_tree(volume / "victim", {"file": "content"}), volume / "missing"
    ends = [run("swap", *words, victim, missing) for run in (trashd, run_by_click)]
    plain, clicks = [
        (done.code, re.sub(r"\d{8}T\S+-[0-9a-f]{12}|(?<=expires_ns\": )\d+", "ID", done.out + done.err))
        for done in ends
    ]
    assert plain == clicks


WRONG_LINES = [("{}/none",), ("-v",), ("-f", "{}/none"), ("--now", "{}/none", "{}/other")]


@needs_root
@pytest.mark.parametrize("as_json", [(), ("--json",)])
@pytest.mark.parametrize("line", WRONG_LINES)
def test_rm_reports_an_error_the_same_with_and_without_click(
    volume: Path, line: tuple[str, ...], as_json: tuple[str, ...]
) -> None:
    words = ("rm", *(word.format(volume) for word in line), *as_json)
    assert trashd(*words) == run_by_click(*words)
