"""trashd sweep: what it says, what it asks, and what it refuses before anything is touched."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.make_trees import make_tree
from tests.support.other_users import run_as
from tests.support.real_filesystems import tmpfs_volume
from tests.support.run_sweep import names
from tests.support.terminals import Terminal
from tests.support.trashd_command import TRASHD, CommandResult, done_well, trashd
from tests.support.tried_pages import in_bash

pytestmark = pytest.mark.needs("root")

SOMEBODY = 12666


@pytest.fixture
def top(volume: Path) -> Path:
    return make_tree(volume / "top", {"a.log": "1", "b.txt": "22", "d": {"c.log": "333"}})


@pytest.mark.quick("sweep")
def test_what_is_trashed_comes_back(volume: Path, top: Path) -> None:
    sweep_result = json.loads(done_well("sweep", top, "--name", "*.log", "--json").out)
    assert (sweep_result["sums"]["n_done"], names(top)) == (2, {"b.txt", "d"})
    done_well("restore", "--volume", volume, sweep_result["orphan"])
    assert names(top) == {"a.log", "b.txt", "d", "d/c.log"}


def test_the_undo_that_is_told_brings_it_back(top: Path) -> None:
    (undo,) = [
        line.split() for line in done_well("sweep", top, "--size", "3").out.splitlines() if line.startswith("  undo")
    ]
    done_well(*undo[2:])
    assert (top / "d/c.log").read_text() == "333"


def test_what_came_from_a_volumes_root_is_told_to_be_back_there(volume: Path) -> None:
    (volume / "f").touch()
    sweep_result = json.loads(done_well("sweep", volume, "--name", "f", "--json").out)
    assert done_well("restore", "--volume", volume, sweep_result["orphan"]).out == f"{volume}: restored\n"


def test_a_dry_run_touches_nothing(volume: Path, top: Path) -> None:
    before = names(volume)
    out = done_well("sweep", top, "--name", "*.log", "--dry-run").out
    assert out.startswith(f"{top}: 2 matches (4 B) would be trashed\n")
    assert "d/c.log" in out
    assert names(volume) == before


def test_above_the_limit_nobody_there_to_ask_is_a_refusal(top: Path) -> None:
    done = trashd("sweep", top, "--name", "*", "--delete", "--confirm-above", "2")
    assert (done.code, len(names(top))) == (3, 4)
    assert "3 matches (6 B) would be deleted, more than 2" in done.err
    assert done_well("sweep", top, "--name", "*", "--delete", "--confirm-above", "2", "--yes").out


def test_more_than_the_most_is_incomplete(top: Path) -> None:
    done = trashd("sweep", top, "--name", "*.log", "--delete", "--max-delete", "1")
    assert (done.code, "there are more matches" in done.out, len(names(top))) == (13, True, 3)


@pytest.mark.parametrize(("here", "there"), [("", "top"), ("", "./top/"), ("top", "."), ("top/d", "..")])
def test_names_are_those_that_find_tells_from_here(top: Path, here: str, there: str) -> None:
    pipe = f"find {there} -name '*.log' -print0 | {TRASHD} sweep {there} -0 --delete"
    subprocess.run(["sh", "-c", pipe], cwd=top.parent / here, check=True, stdout=subprocess.DEVNULL)
    assert names(top) == {"b.txt", "d"}


def test_names_are_read_from_a_file_a_line_each(volume: Path, top: Path) -> None:
    (volume / "list").write_text(f"{top}/a.log\n{top}/d/c.log\n{top}/b.txt")
    done_well("sweep", top, "--delete", "--from", volume / "list", "--name", "*.log")
    assert names(top) == {"b.txt", "d"}


@pytest.mark.parametrize("option", ["--print", "--print0"])
@pytest.mark.quick("sweep")
def test_printed_is_what_find_prints(volume: Path, top: Path, option: str) -> None:
    (top / os.fsdecode(b"odd\xff\n")).touch()
    found = subprocess.run(
        ["find", "top", "-mindepth", "1", f"-{option[2:]}"], cwd=volume, capture_output=True, check=True
    )
    output = done_well("sweep", "top", "--type", "f,d", option, cwd=volume).out
    assert sorted(os.fsencode(output)) == sorted(found.stdout)


def test_printed_as_json_each_is_an_object(top: Path) -> None:
    found = {one["path"]: (one["type"], one["size"]) for one in _objects(top, "--name", "[bd]*", "--type", "f,d")}
    assert found[f"{top}/b.txt"] == ("f", 2)
    assert found[f"{top}/d"][0] == "d"


def _objects(top: Path, *words: str) -> list[dict[str, object]]:
    return done_well("sweep", top, *words, "--print", "--json").objects()


def test_failures_are_told_by_name(top: Path) -> None:
    done = trashd("sweep", top, "--type", "d", "--delete")
    assert (done.code, done.out.splitlines()[1]) == (13, "  d: Directory not empty (rmdir)")


def test_nothing_says_what_to_take(top: Path) -> None:
    _refused(top, trashd("sweep", top, "--delete"), "no condition is given")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--size", "5x"), "'5x' is not a size limit"),
        (("--regex", "("), "is not a regular expression"),
        (("--user", "nobody-has-this-name"), "unknown user"),
        (("--depth", "3..2"), "is reversed"),
        (("--depth", "3..", "--depth", "2"), "no depth is both at least 3 and at most 2"),
        (("--name", "*", "--by", "atime"), "--by needs --older or --newer"),
        (("--older", "1d", "--by", "atime", "--by", "mtime"), "--by atime and --by mtime can't be combined"),
        (("--name", "*", "--delete", "--move-to", "x"), "--delete and --move-to can't be combined"),
        (("--name", "*", "--recursive"), "--recursive needs --delete"),
        (("--name", "*", "--max-delete", "-1"), "-1 is not in the range"),
        (("--name", "*", "--max-rate", "0"), "is not a rate"),
    ],
)
def test_bad_input_is_named_and_touches_nothing(top: Path, words: tuple[str, ...], told: str) -> None:
    _refused(top, trashd("sweep", top, *words), told)


def _refused(top: Path, done: CommandResult, told: str) -> None:
    assert (done.code, len(names(top))) == (2, 4)
    assert told in " ".join(done.err.split())


@pytest.mark.parametrize(
    "words",
    [
        ("sweep", "top", "--from", "-", "--delete"),
        ("sweep", "top", "--name", "*", "--delete", "--confirm-above", "0"),
        ("swap", "-0"),
    ],
)
def test_a_closed_standard_input_is_nobody_to_read_from_or_to_ask(top: Path, words: tuple[str, ...]) -> None:
    before = names(top)
    shell = ["sh", "-c", 'exec "$@" <&-', "sh", TRASHD, *words]
    done = subprocess.run(shell, cwd=top.parent, capture_output=True, text=True, check=False)
    assert (done.returncode in (2, 3), done.stderr.startswith("trashd"), names(top)) == (True, True, before)


@pytest.mark.parametrize(
    ("words", "stdin", "why"),
    [
        (("--from", "-"), b"a.log\0b.txt\0", "contains NUL characters"),
        (("-0",), b"a" * 2_000_000, "a name that is too long or not terminated"),
    ],
)
@pytest.mark.parametrize("action", [(), ("--delete",)])
def test_what_is_no_list_of_names_is_refused(
    top: Path, words: tuple[str, ...], stdin: bytes, why: str, action: tuple[str, ...]
) -> None:
    before = names(top)
    done = trashd("sweep", top, *words, *action, stdin=stdin)
    assert (done.code, why in done.err, names(top)) == (2, True, before)


def test_a_file_without_a_birth_time_is_no_moment(top: Path) -> None:
    done = trashd("sweep", top, "--by", "btime", "--newer", "/proc/self/stat", "--print")
    assert (done.code, "does not record birth times" in done.err, done.out) == (2, True, "")


def test_nothing_is_printed_where_standard_output_is_closed(top: Path) -> None:
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", TRASHD, "sweep", str(top), "--print"]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, "standard output is closed" in done.stderr) == (2, True)


def test_that_none_may_be_taken_does_not_say_that_none_matches(top: Path) -> None:
    assert trashd("sweep", top, "--name", "*", "--max-delete", "0").out.startswith(f"{top}: 0 matches trashed\n")


def test_a_depth_told_twice_must_hold_twice(top: Path) -> None:
    make_tree(top / "d/e", {"deep.log": "", "f": {"g.log": ""}})
    found = _objects(top, "--depth", "2..", "--depth", "..3")
    assert {str(one["path"]).removeprefix(f"{top}/") for one in found} == {"d/c.log", "d/e/deep.log"}


def test_the_same_time_told_twice_is_that_time(top: Path) -> None:
    assert len(_objects(top, "--by", "ctime", "--newer", "1h", "--by", "ctime")) == 3


def test_what_can_not_be_looked_at_is_a_failure_of_printing(volume: Path, top: Path) -> None:
    volume.chmod(0o755)
    (top / "d").chmod(0o744)
    words = [TRASHD, "sweep", str(top), "--name", "*.log", "--print", "--json"]
    done = run_as(SOMEBODY, words, env={"LC_ALL": "C.UTF-8"})
    assert (done.returncode, b"d/c.log: Permission denied (stat)" in done.stderr) == (13, True)
    assert json.loads(done.stdout)["path"] == f"{top}/a.log"


@pytest.mark.parametrize(("action", "did"), [((), "trashed"), (("--delete",), "deleted"), (("--print",), "")])
def test_listed_paths_that_are_not_there_are_told_with_their_number(
    top: Path, action: tuple[str, ...], did: str
) -> None:
    done = trashd("sweep", top, "-0", *action, stdin=os.fsencode(f"{top}/a.log\0{top}/no\0{top}/d/no\0"))
    assert (done.code, f"1 match {did}" in done.out if did else done.out == f"{top}/a.log\n") == (13, True)
    assert "2 listed paths not found" in done.out + done.err
    assert "hint" not in done.out + done.err


@pytest.mark.parametrize(("here", "path"), [(".", "a.log"), ("d", "d/c.log"), ("..", "a.log")])
def test_who_lists_paths_from_elsewhere_is_told_from_where_they_are(top: Path, here: str, path: str) -> None:
    is_found = (top / here / path).exists()
    done = trashd("sweep", top, "--delete", "--from", "-", cwd=top / here, stdin=os.fsencode(path))
    assert (done.code, "hint: run the sweep in the directory" in done.out) == (0 if is_found else 13, not is_found)


def test_a_list_that_breaks_off_ends_it_with_an_orphan_of_what_was_done(volume: Path, top: Path) -> None:
    paths = [f"{top}/a.log", *(f"{top}/d/{n}" for n in range(10_000))]
    (volume / "list").write_text("\n".join([*paths, "\0"]))
    done = trashd("sweep", top, "--from", volume / "list", "--json")
    fields = json.loads(done.out)
    assert (done.code, fields["sums"]["n_done"]) == (13, 1)
    assert fields["why"] == "the rest of the list was ignored: the list contains NUL characters"
    done_well("restore", "--volume", volume, fields["orphan"])
    assert (top / "a.log").exists()


# The question


@pytest.mark.parametrize(("typed", "code", "n_left"), [("y\n", 0, 1), ("n\n", 3, 4), ("\n", 3, 4)])
def test_on_a_terminal_it_asks_first(top: Path, typed: str, code: int, n_left: int) -> None:
    terminal = Terminal("sweep", top, "--name", "*", "--delete", "--confirm-above", "2")
    terminal.wait_for("3 matches (6 B) would be deleted. Continue? [y/N]:")
    assert len(names(top)) == 4
    terminal.type(typed)
    assert (terminal.end(), len(names(top))) == (code, n_left)


def test_ctrl_c_is_no_answer_and_touches_nothing(top: Path) -> None:
    terminal = Terminal("sweep", top, "--name", "*", "--delete", "--confirm-above", "2")
    terminal.wait_for("Continue?")
    assert (terminal.interrupt(), len(names(top))) == (130, 4)


def test_up_to_the_limit_a_terminal_is_not_asked(top: Path) -> None:
    terminal = Terminal("sweep", top, "--name", "*", "--delete", "--confirm-above", "3")
    assert (terminal.end(), "Continue?" in terminal.output, names(top)) == (0, False, {"d"})


# Lists as other programs write them


def test_a_list_of_another_program_is_read_as_it_is_told(top: Path) -> None:
    lines = [f"{(top / name).stat().st_ino} 1 0 -- {top}/{name.replace('.', '%2E')}" for name in ("a.log", "d/c.log")]
    words = ("--from", "-", "--from-format", "mmapplypolicy", "--confirm-above", "2")
    done_well("sweep", top, "--delete", *words, stdin="\n".join(lines).encode())
    assert names(top) == {"b.txt", "d"}


def test_a_format_without_a_list_or_another_one_is_refused(top: Path) -> None:
    assert trashd("sweep", top, "--name", "*", "--from-format", "lines").code == 2
    assert trashd("sweep", top, "-0", "--from-format", "mmapplypolicy").code == 2
    assert done_well("sweep", top, "-0", "--from-format", "nul", "--print", stdin=bytes(top / "a.log")).out


def test_a_line_that_is_not_understood_is_told(top: Path) -> None:
    done = trashd("sweep", top, "--delete", "--from", "-", "--from-format", "mmapplypolicy", stdin=bytes(top / "a.log"))
    assert (done.code, f"{top}/a.log: not in the list's format" in done.out, len(names(top))) == (13, True, 4)


# To another filesystem


def hint_of(done: CommandResult) -> str:
    (line,) = [line for line in done.err.splitlines() if line.startswith("  hint: ")]
    return line.removeprefix("  hint: ")


@pytest.mark.parametrize(
    ("words", "moved"),
    [
        (["--name", "*.log"], {"a.log", "d", "d/it's c.log"}),
        (["--name", "b*", "--size", "-3", "--older", "0s", "--user", "root"], {"b.txt"}),
        (["--iname", "*.LOG", "--exclude", "a*", "--depth", "2..", "--regex", ".*[lg]"], {"d", "d/it's c.log"}),
        (["--newer", "@-1.5", "--size", "+1", "--by", "ctime"], {"b.txt", "d", "d/it's c.log"}),
        (["--empty", "--type", "f"], {"d", "d/empty"}),
        (["--type", "d", "--name", "d"], {"d", "d/it's c.log", "d/empty"}),
        (["--name", "*.log", "--max-delete", "0"], set()),
        (["--name", "*.log", "--from", "{top}/../list"], {"d", "d/it's c.log"}),
        (["--null", "--from", "{top}/../list"], {"d", "d/it's c.log"}),
    ],
)
def test_the_hint_for_another_filesystem_moves_the_matches_there(
    volume: Path, words: list[str], moved: set[str]
) -> None:
    top = make_tree(volume / "to p's", {"a.log": "1", "b.txt": "22", "d": {"it's c.log": "333", "empty": ""}})
    ending = "\0" if "--null" in words else "\n"
    (volume / "list").write_text(f"{top}/d/it's c.log{ending}")
    words = [word.format(top=top) for word in words]
    before = names(top)
    with tmpfs_volume() as other:
        (other / "de st").mkdir()
        done = trashd("sweep", top, *words, "--move-to", other / "de st")
        assert (done.code, names(top)) == (3, before)
        assert in_bash(hint_of(done), volume).code == 0
        assert names(other / "de st") == moved
        assert {name for name in before if not (top / name).is_dir()} - names(top) == {
            name for name in moved if (other / "de st" / name).is_file()
        }


def test_the_hint_for_another_filesystem_replaces_only_if_the_sweep_would(top: Path) -> None:
    for if_exists, text in (("skip", "old"), ("number", "old"), ("replace", "1")):
        with tmpfs_volume() as other:
            (other / "a.log").write_text("old")
            done = trashd("sweep", top, "--name", "a.log", "--move-to", other, "--if-exists", if_exists)
            assert in_bash(hint_of(done), top).code == 0
            assert (other / "a.log").read_text() == text
            assert (top / "a.log").exists() == (text == "old")
