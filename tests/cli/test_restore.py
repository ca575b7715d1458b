"""`trashd restore` and `undo`: what came from a path, or by the last command; and which store --volume means."""

import ctypes
import json
import os
import pty
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.linux.machine_identity import session
from tests.support.background_processes import clients
from tests.support.foreground_mount import Mounted, trashd_mount
from tests.support.make_trees import Spec, make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount, tmpfs_over, tmpfs_volume
from tests.support.store_verbs import assert_silent, init
from tests.support.terminals import Terminal
from tests.support.trashd_command import TRASHD, CommandResult, done_well, environment, swapped, trashd

pytestmark = pytest.mark.needs("root")


USER = 65_534
TREE: Spec = {"file": "content", "below": {"deep": "more"}}


def make(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    return make_tree(path, TREE)


def test_what_came_from_a_path_comes_back_there(volume: Path) -> None:
    job = make(volume / "job")
    before = snapshot(job)
    identifier = swapped(job)["id"]
    told = done_well("restore", job)
    assert snapshot(job) == before
    assert identifier in told.err
    assert "removed" in told.err


def test_a_path_need_not_be_there_any_more_nor_what_was_above_it(volume: Path) -> None:
    job = make(volume / "above/job")
    before = snapshot(job)
    done_well("rm", job)
    done_well("restore", job)
    assert snapshot(job) == before
    done_well("rm", job)
    (volume / "above").rmdir()
    assert trashd("restore", job).code == 5, "where it was is gone"
    done_well("restore", job, "--to", volume / "elsewhere")
    assert snapshot(volume / "elsewhere") == before


@pytest.mark.parametrize("inside", ["", "below"])
def test_a_path_also_finds_what_a_killed_reap_left(volume: Path, inside: str) -> None:
    job = make(volume / "job")
    identifier = swapped(job)["id"]
    folder = volume / ".trashd/u/0"
    (folder / "orphans" / identifier).rename(folder / "reaping" / identifier)
    assert ("deep" if inside else "below") in done_well("ls", job / inside).out
    done_well("restore", job / inside, "--to", volume / "back")
    assert (volume / "back").is_dir()


def test_a_path_finds_a_complete_orphan_before_what_a_killed_reap_left(volume: Path) -> None:
    job = make(volume / "job")
    identifier = swapped(job)["id"]
    folder = volume / ".trashd/u/0"
    (folder / "orphans" / identifier).rename(folder / "reaping" / identifier)
    swapped(make(job / "older").parent)
    assert "older" in done_well("ls", job).out


def test_a_path_inside_brings_that_part_alone(volume: Path) -> None:
    job = make(volume / "job")
    done_well("swap", job)
    done_well("restore", job / "below/deep")
    assert (job / "below/deep").read_text() == "more"
    assert not (job / "file").exists()
    done_well("restore", job, "file")
    assert (job / "file").read_text() == "content"


def test_of_several_the_one_is_meant_that_has_the_part(volume: Path) -> None:
    job = make(volume / "job")
    done_well("swap", job)
    (job / "other").touch()
    done_well("swap", job)
    done_well("restore", job / "other")
    assert os.listdir(job) == ["other"]


def test_several_are_told_where_nobody_can_be_asked(volume: Path) -> None:
    job = make(volume / "job")
    ids = [swapped(job)["id"] for _ in range(2)]
    done = trashd("restore", job)
    assert done.code == 2
    assert all(identifier in done.err for identifier in ids)
    assert os.listdir(job) == []


def test_a_list_shows_the_ends_of_ids(volume: Path) -> None:
    identifier = swapped(make(volume / "job"))["id"]
    terminal = Terminal("list", "--volume", volume)
    assert terminal.end() == 0
    for seen in (terminal.output, done_well("list", "--volume", volume).out):
        assert (identifier in seen, identifier[-12:] in seen) == (False, True)


@pytest.mark.parametrize(("typed", "is_newest"), [("\n", True), ("2\n", False)])
def test_on_a_terminal_one_is_asked_which_and_the_newest_is_offered(volume: Path, typed: str, is_newest: bool) -> None:
    job = volume / "job"
    for content in ("old", "new"):
        job.mkdir(exist_ok=True)
        (job / "file").write_text(content)
        done_well("rm", job)
    terminal = Terminal("restore", job)
    terminal.type(typed)
    assert terminal.end() == 0
    assert (job / "file").read_text() == ("new" if is_newest else "old")


@pytest.mark.parametrize(("typed", "name"), [("\n", "new"), ("2\n", "old")])
def test_on_a_terminal_without_a_path_one_chooses_from_a_list(volume: Path, typed: str, name: str) -> None:
    for job in ("old", "new"):
        done_well("rm", make(volume / job))
    terminal = Terminal("restore", "--volume", volume)
    terminal.type(typed)
    assert (terminal.end(), "removed" in terminal.output, (volume / name).exists()) == (0, True, True)
    terminal = Terminal("restore", "--volume", volume, "--user", "0")
    terminal.type("\n")
    assert terminal.end() == 0
    terminal = Terminal("restore", "--volume", volume)
    assert (terminal.end(), "orphans of root" in terminal.output) == (5, True)


def test_root_restores_his_own_by_a_path_and_anothers_when_he_names_him(volume: Path) -> None:
    volume.chmod(0o1777)
    theirs = make(volume / "job")
    subprocess.run(["chown", "-R", str(USER), theirs], check=True)
    assert as_user(USER, lambda: trashd("rm", theirs)).code == 0
    done = trashd("restore", theirs)
    assert done.code == 3
    assert "--user" in done.err
    ours = make(volume / "job")
    done_well("rm", ours)
    done_well("restore", ours)
    assert ours.stat().st_uid == 0
    done_well("rm", ours)
    done_well("restore", theirs, "--user", str(USER))
    assert (theirs / "file").stat().st_uid == USER


def test_root_is_told_how_to_restore_where_the_owner_may_not(volume: Path) -> None:
    job = make_tree(volume / "job", {"file": "content"})
    os.chown(job, USER, USER)
    swapped(job, "--for-owner")
    refused = trashd("restore", job, "--user", str(USER))
    assert refused.code == 4
    _before, command = refused.err.split("instead, run: ")
    subprocess.run(["sh", "-c", f"PATH={Path(TRASHD).parent}:$PATH; {command}"], check=True, stdout=subprocess.DEVNULL)
    assert (job / "file").read_text() == "content"


def test_nobody_restores_anothers(volume: Path) -> None:
    volume.chmod(0o1777)
    job = make(volume / "job")
    done_well("rm", job)
    assert as_user(USER, lambda: trashd("restore", job)).code == 5
    assert as_user(USER, lambda: trashd("restore", job, "--user", "0")).code == 4
    done_well("restore", job)


def test_what_a_sweep_took_is_found_by_its_path(volume: Path) -> None:
    job = make(volume / "job")
    done_well("sweep", job, "--name", "deep")
    assert not (job / "below/deep").exists()
    done_well("restore", job / "below/deep")
    assert (job / "below/deep").read_text() == "more"


def test_a_name_here_that_could_be_an_id_is_asked_about(volume: Path) -> None:
    identifier = swapped(make(volume / "job"))["id"]
    part = identifier[-12:]
    done_well("rm", make(volume / part))
    assert trashd("restore", part, cwd=volume).code == 2
    done_well("restore", f"./{part}", cwd=volume)
    assert (volume / part / "file").read_text() == "content"
    done_well("restore", part, cwd=volume)
    assert (volume / "job/file").read_text() == "content"


def test_a_bind_mount_leads_to_it_too(volume: Path) -> None:
    job = make(volume / "above/job")
    before = snapshot(job)
    done_well("rm", job)
    with tmpfs_volume() as other:
        (other / "seen").mkdir()
        with bind_mount(volume, other / "seen"):
            done_well("restore", other / "seen/above/job")
    assert snapshot(job) == before


@pytest.fixture
def mount() -> Iterator[Mounted]:
    with tmpfs_volume() as path:
        init(path)
        make(path / "job")
        point = path.with_name("mounted")
        point.mkdir(exist_ok=True)
        with trashd_mount(path, point) as mounted:
            yield mounted
        assert_silent(path)


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("by_mount", [True, False])
def test_a_mount_and_what_it_shows_are_the_same_place(mount: Mounted, by_mount: bool) -> None:
    done_well("swap", mount.path / "job")
    done_well("restore", (mount.path if by_mount else mount.backing) / "job")
    assert (mount.path / "job/file").read_text() == "content"


PR_SET_DUMPABLE = 4


def in_a_shell(*lines: str, cwd: Path) -> CommandResult:
    """Commands of one session of its own."""
    script = "\n".join(line.replace("trashd", TRASHD, 1) if line.startswith("trashd") else line for line in lines)
    done = subprocess.run(
        ["sh", "-c", script], cwd=cwd, env=environment({}), capture_output=True, start_new_session=True, check=False
    )
    return CommandResult(done.returncode, os.fsdecode(done.stdout), os.fsdecode(done.stderr))


def make_each(volume: Path, *names: str) -> None:
    for name in names:
        make_tree(volume / name, TREE)


@pytest.mark.quick("undo")
@pytest.mark.parametrize("words", ["trashd undo", "trashd restore --last"])
def test_all_that_the_last_command_took_comes_back(volume: Path, words: str) -> None:
    make_each(volume, "a", "b", "c")
    before = [snapshot(volume / name) for name in "abc"]
    done = in_a_shell("trashd swap a b c", words, cwd=volume)
    assert done.code == 0, done
    assert [snapshot(volume / name) for name in "abc"] == before
    assert {str(volume / name) for name in "abc"} <= set(done.err.split()), "it is said first"


def test_another_undo_takes_back_what_the_command_before_took(volume: Path) -> None:
    make_each(volume, "a", "b")
    assert in_a_shell("trashd rm a", "trashd swap b", "trashd undo", "[ ! -e a ]", cwd=volume).code == 0
    make_each(volume, "c")
    (volume / "c/file").unlink()
    assert in_a_shell("trashd undo", cwd=volume).code == 5
    done = in_a_shell("trashd sweep c --name deep", "trashd rm b", "trashd undo", "trashd undo", cwd=volume)
    assert done.code == 0, done
    assert (volume / "b/file").exists()
    assert (volume / "c/below/deep").exists()


def test_what_was_written_meanwhile_is_not_the_last_command(volume: Path) -> None:
    """It is kept by the restore itself: an undo of that would swap the two for ever."""
    make_each(volume, "a")
    done = in_a_shell("trashd swap a", "touch a/new", "trashd undo", "trashd undo; [ $? = 5 ]", cwd=volume)
    assert done.code == 0, done
    assert (volume / "a/file").exists()


def test_it_is_nothing_of_another_session_or_another_users(volume: Path) -> None:
    make_each(volume, "a")
    (volume / "a").chmod(0o777)
    assert in_a_shell("trashd swap a", cwd=volume).code == 0
    assert in_a_shell("trashd undo", cwd=volume).code == 5
    mine = make_tree(volume / "mine", TREE)
    os.chown(mine, USER, USER)
    volume.chmod(0o777)
    script = f"setpriv --reuid {USER} --regid {USER} --clear-groups {TRASHD} swap mine && {TRASHD} undo; [ $? = 5 ]"
    done = in_a_shell(script, cwd=volume)
    assert done.code == 0, done
    assert not (mine / "file").exists()


def test_what_one_cannot_take_back_is_told_and_the_rest_comes(volume: Path) -> None:
    make_tree(volume / "above", {"a": TREE})
    make_each(volume, "b")
    done = in_a_shell("trashd swap above/a b", "rm -r above", "trashd undo", cwd=volume)
    assert done.code == 13, done
    assert (volume / "b/file").exists()
    assert "--to PATH" in done.err


def test_a_session_that_sudo_makes_is_its_callers(tmp_path: Path) -> None:
    """It gives what it runs a terminal of its own; here a user's shell runs root's program, which does that."""
    is_users, say = os.pipe()

    def program() -> None:
        os.read(is_users, 1)
        in_own_terminal(lambda: (tmp_path / "program").write_text(session()))

    def shell() -> None:
        with clients([program]) as (pid,), (tmp_path / "shell").open("w") as told:
            os.setresuid(USER, USER, USER)
            assert ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1) == 0  # as what was executed is: /proc/PID is its user's
            os.write(say, b"x")
            told.write(session())
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    in_own_terminal(shell)
    told, by_program = (tmp_path / "shell").read_text(), (tmp_path / "program").read_text()
    assert told
    assert by_program == told


def in_own_terminal(act: Callable[[], object]) -> None:
    """Call something in a process of its own, the leader of a session on a terminal of its own; it must end well."""
    pid, master = pty.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    with suppress(OSError):  # EIO: all have left it
        while os.read(master, 4096):
            pass
    os.close(master)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_record_says_no_more_than_a_random_word_and_the_session(volume: Path) -> None:
    make_each(volume, "a", "b")
    done = in_a_shell("trashd swap a b >/dev/null", "trashd list --json", cwd=volume)
    first, second = (json.loads(line)["invocation"] for line in done.out.splitlines())
    assert first == second
    assert set(first) == {"id", "session"}


@pytest.mark.usefixtures("volume")
def test_who_has_no_store_to_look_into_is_told_where_to_look() -> None:
    with tmpfs_volume() as other:
        init(other)
        done = as_user(USER, lambda: in_a_shell("trashd undo", cwd=other))
    assert done.code == 5
    assert "trashd list" in done.err


class Nested(NamedTuple):
    """Stores in each other's trees, and an orphan in each: of a volume, of one mounted in it, of a directory of that.

    bare  mounted in that directory, without a store
    """

    outer: Path
    inner: Path
    given: Path
    bare: Path
    orphans: dict[Path, str]


@pytest.fixture
def nested(volume: Path) -> Iterator[Nested]:
    inner = make_tree(volume / "inner", {})
    with tmpfs_over(inner):
        given = make_tree(inner / "given", {"bare": {}, "deep": {"er": {}}})
        orphans = {}
        for base in (volume, inner):
            init(base)
            orphans[base] = swapped(make_tree(base / "job", {"f": ""}))["id"]
        init(given)
        orphans[given] = swapped(make_tree(given / "job", {"f": ""}), "--note", "in the inner one")["id"]
        with tmpfs_over(given / "bare"):
            yield Nested(volume, inner, given, given / "bare", orphans)
        assert_silent(inner)


def listed(volume: Path) -> set[str]:
    return {str(one["id"]) for one in done_well("list", "--json", "--volume", volume).objects()}


def test_it_is_one_store_in_the_directory_or_the_nearest_above(nested: Nested) -> None:
    assert listed(nested.outer) == {nested.orphans[nested.outer]}
    assert listed(nested.outer / "job") == {nested.orphans[nested.outer]}
    assert nested.orphans[nested.outer] not in listed(nested.inner / "job")


def test_it_leaves_no_filesystem(nested: Nested) -> None:
    assert listed(nested.bare) == set()
    assert trashd("restore", "--volume", nested.bare, nested.orphans[nested.inner]).code == 5


@pytest.mark.quick("reap")
def test_a_reap_of_all_takes_no_other_volumes_orphans(nested: Nested) -> None:
    done_well("reap", "--all", "--now", "--yes", "--volume", nested.bare)
    done_well("reap", "--all", "--now", "--yes", "--volume", nested.inner / "job")
    assert listed(nested.outer) == {nested.orphans[nested.outer]}
    assert listed(nested.inner) == set()


def test_one_that_is_named_twice_is_looked_at_once(nested: Nested) -> None:
    words = ("--volume", nested.outer, "--volume", nested.outer / "job")
    assert [one["id"] for one in done_well("list", "--json", *words).objects()] == [nested.orphans[nested.outer]]


def test_what_goes_at_once_is_found_where_it_went(nested: Nested) -> None:
    victim = make_tree(nested.given / "deep/er/most", {"f": ""})
    done_well("swap", "--now", victim)
    assert not list(victim.iterdir())
    done_well("rm", "--now", "-r", victim)
    assert not victim.exists()
