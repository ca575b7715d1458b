"""How command lines are read: plain ones without click, completed by a shell, without `site`, and odd operands."""

import os
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
from tests.support.foreground_mount import until
from tests.support.fuse_silent import silent_fuse
from tests.support.make_trees import Symlink, make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount, tmpfs_volume
from tests.support.run_sweep import names
from tests.support.store_verbs import assert_silent, init
from tests.support.trashd_command import CommandResult, done_well, swapped, trashd
from tests.unit.test_import_cost import HEAVY, list_modules

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
    valued = [one for one, option in LINES[name].options.items() if option.parse and one.startswith("--")]
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
        usual = {name: one.default for name, one in signature(LINES[name].execute).parameters.items()}
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
        assert (option.name, option.parse is None, False) == (param.name, param.is_flag, param.multiple)


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
    assert HEAVY & {*imported} - {*before_ours} - list_modules("import ctypes") == set()


ROOT = Path(__file__).parents[2]


@pytest.fixture
def launcher(tmp_path: Path) -> Path:
    """The launcher of packages beside the product."""
    (tmp_path / "fusefs").symlink_to(ROOT / "fusefs")
    placed = tmp_path / "trashd"
    placed.write_text((ROOT / "debian/launchers/trashd").read_text())
    return placed


def list_imports_at_start(launcher: Path, *words: str | Path) -> list[str]:
    """What the command imports, started as its first line says."""
    options = launcher.read_text().partition("\n")[0].split()[1:]
    command = [sys.executable, *options, "-X", "importtime", launcher, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]


@pytest.mark.needs("root")
def test_a_swap_starts_without_site(launcher: Path, volume: Path) -> None:
    victim = make_tree(volume / "victim", {"file": "content"})
    list_imports_at_start(launcher, "swap", victim)
    again = list_imports_at_start(launcher, "swap", "--json", victim)
    assert "fusefs.store.swap" in again
    assert "site" not in again


def test_what_needs_more_gets_it(launcher: Path) -> None:
    assert {"site", "click"} <= {*list_imports_at_start(launcher, "--version")}


USER = 65_534


@pytest.mark.parametrize(
    ("typed", "offered"), [("trashd sw", "plain,sweep"), ("trashd swap --keep-", "plain,--keep-for")]
)
def test_a_shell_completes_commands_and_options(typed: str, offered: str) -> None:
    assert offered in completed(typed)


def test_an_old_name_of_a_command_is_not_offered() -> None:
    assert completed("trashd rea") == ["plain,reap"]


@pytest.mark.parametrize("typed", ["trashd swap d", "trashd list --volume d", "trashd mount d"])
def test_a_shell_completes_paths_by_itself(typed: str) -> None:
    assert completed(typed) == ["file,d"]


@pytest.mark.needs("root")
@pytest.mark.parametrize("command", ["restore", "keep", "reap", "holders"])
def test_a_shell_completes_the_callers_own_ids_by_either_end(volume: Path, command: str) -> None:
    identifier = swapped(make_tree(volume / "job", {"file": ""}))["id"]
    end = identifier[-12:]
    # What is not found in a moment is not offered: a shell asks again.
    assert until(lambda: f"plain,{identifier}" in completed(f"trashd {command} {identifier[:-4]}"))
    assert until(lambda: completed(f"trashd {command} {end[:8]}") == [f"plain,{end}"])
    told = as_user(USER, lambda: completed(f"trashd {command} {end[:8]}"))
    assert f"plain,{end}" not in told


@pytest.mark.needs("root")
def test_a_path_is_a_path_wherever_an_id_may_be_meant(volume: Path) -> None:
    swapped(make_tree(volume / "job", {"file": ""}))
    for typed in ("./2", "2/", "job"):
        assert completed(f"trashd restore {typed}") == [f"file,{typed}"]


@pytest.mark.needs("root", "fuse")
@pytest.mark.parametrize("is_listed", [False, True], ids=["mounted", "registered"])
def test_a_mount_that_never_answers_keeps_no_shell_waiting(*, is_listed: bool) -> None:
    with tmpfs_volume() as other:
        dead = other / "dead"
        dead.mkdir()
        if is_listed:
            init(dead)
        with silent_fuse(dead, 0):
            completed("trashd restore 2")  # what asks it waits for the end of the block, and may hold nothing of ours


def completed(typed: str) -> list[str]:
    """What trashd answers a shell that asks what could follow."""
    done = trashd(_TRASHD_COMPLETE="bash_complete", COMP_WORDS=typed, COMP_CWORD=str(typed.count(" ")))
    assert done.code == 0
    return done.out.splitlines()


DOTS = [".", "..", "./", "..//", "d/.", "d/..", "d/../.", "link/.", "d/e/.."]
VERBS = ["rm", "rm -rf", "rm --now", "swap", "swap --dry-run", "check", "restore"]


@pytest.fixture
def top(volume: Path) -> Path:
    return make_tree(volume / "top", {"d": {".b": "1", "e": {}}, "f": "2", "link": Symlink("d"), "gone": Symlink("x")})


def refused(done: CommandResult, path: str) -> bool:
    return done.code == 3 and f"trashd: {path}: " in done.err


@pytest.mark.parametrize("verb", VERBS)
def test_dots_are_refused(top: Path, verb: str) -> None:
    before = snapshot(top.parent)
    assert [path for path in DOTS if not refused(trashd(*verb.split(), path, cwd=top), path)] == []
    assert snapshot(top.parent) == before


def test_a_glob_that_an_old_shell_expands_to_dots_takes_only_names(top: Path) -> None:
    done = trashd("rm", "-rf", "d/.", "d/..", "d/.b", cwd=top)
    assert (done.code, done.err.count("is refused")) == (13, 2)
    assert names(top) == {"d", "d/e", "f", "link", "gone"}


def test_dots_in_a_list_are_refused(top: Path) -> None:
    assert trashd("rm", "-0", cwd=top, stdin=b"d/..\0.\0f\0").code == 13
    done = trashd("sweep", ".", "--type", "f,d", "--delete", "-0", cwd=top, stdin=b".\0d/.\0d/..\0d/.b\0")
    assert (done.code, ": ends in . or .." in done.out) == (13, True), done
    assert names(top) == {"d", "d/e", "link", "gone"}


@pytest.mark.parametrize("path", ["f/", "link/", "gone/", "f//"])
def test_a_slash_behind_what_is_no_directory_is_refused(top: Path, path: str) -> None:
    before = snapshot(top)
    for verb in ("rm", "swap", "check"):
        done = trashd(verb, path, cwd=top)
        assert (done.code, "without the trailing slash" in done.err) == (3, True), done
    trashd("rm", "-rf", path, cwd=top)  # as with rm(1), -f says nothing of a name that is not there
    assert snapshot(top) == before


def test_a_slash_behind_a_directory_is_not_refused(top: Path) -> None:
    for verb, path in (("swap", "d///"), ("rm", "d/")):
        done_well(verb, path, cwd=top)
        done_well("restore", "d/", cwd=top)
    assert (top / "d/.b").exists()


def test_a_slash_behind_what_was_no_directory_finds_no_orphan(top: Path) -> None:
    done_well("rm", "f", cwd=top)
    done_well("rm", "d", cwd=top)
    assert trashd("restore", "f/", cwd=top).code == 5
    assert trashd("restore", "d/.b/", cwd=top).code == 5
    done_well("restore", "f", cwd=top)
    done_well("restore", "d/.b", "--to", "b", cwd=top)


def test_a_listed_slash_means_a_directory(top: Path) -> None:
    words = ("sweep", top, "--type", "f,d,l", "--delete", "--recursive", "--from", "-")
    done = trashd(*words, cwd=top, stdin=b"f/\nlink/\nd/\n")
    assert (done.code, "1 match" in done.out) == (13, True)
    assert names(top) == {"f", "link", "gone"}


def test_a_destination_that_has_no_name_is_named(top: Path) -> None:
    identifier = swapped(top / "d")["id"]
    for to in ("/", "", "..", "new/.", "d/.."):
        done = trashd("restore", identifier, "--to", to, cwd=top)
        assert (done.code, f"{to}: " in done.err) == (3, True), done
    done_well("restore", identifier)
    assert_silent(top.parent)


def test_listed_paths_that_the_selection_leaves_out_are_counted(top: Path) -> None:
    listed = os.fsencode("f\0d\0d/.b\0link\0absent\0")
    done = trashd("sweep", ".", "--delete", "-0", "--from", "-", cwd=top, stdin=listed)
    assert (done.code, "1 listed path does not match the selection" in done.out) == (13, True), done
    done = done_well("sweep", ".", "--delete", "-0", "--json", cwd=top, stdin=b"d\0d/e\0")
    assert done.objects()[0]["sums"]["n_unmatched"] == 2
