"""`trashd undo`: the last command of this user in this terminal's session, and all that it took."""

from __future__ import annotations

import ctypes
import json
import os
import pty
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from fusefs.linux.machine_identity import session
from tests.support.background_processes import clients
from tests.support.make_trees import Spec, make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import init
from tests.support.trashd_command import TRASHD, CommandResult, environment

pytestmark = pytest.mark.needs("root")

USER = 65_534
PR_SET_DUMPABLE = 4
TREE: Spec = {"file": "content", "below": {"deep": "more"}}


def in_a_shell(*lines: str, cwd: Path) -> CommandResult:
    """Commands of one session of its own."""
    script = "\n".join(line.replace("trashd", TRASHD, 1) if line.startswith("trashd") else line for line in lines)
    done = subprocess.run(
        ["sh", "-c", script], cwd=cwd, env=environment({}), capture_output=True, start_new_session=True, check=False
    )
    return CommandResult(done.returncode, os.fsdecode(done.stdout), os.fsdecode(done.stderr))


def make(volume: Path, *names: str) -> None:
    for name in names:
        make_tree(volume / name, TREE)


@pytest.mark.quick("undo")
@pytest.mark.parametrize("words", ["trashd undo", "trashd restore --last"])
def test_all_that_the_last_command_took_comes_back(volume: Path, words: str) -> None:
    make(volume, "a", "b", "c")
    before = [snapshot(volume / name) for name in "abc"]
    done = in_a_shell("trashd swap a b c", words, cwd=volume)
    assert done.code == 0, done
    assert [snapshot(volume / name) for name in "abc"] == before
    assert {str(volume / name) for name in "abc"} <= set(done.err.split()), "it is said first"


def test_another_undo_takes_back_what_the_command_before_took(volume: Path) -> None:
    make(volume, "a", "b")
    assert in_a_shell("trashd rm a", "trashd swap b", "trashd undo", "[ ! -e a ]", cwd=volume).code == 0
    make(volume, "c")
    (volume / "c/file").unlink()
    assert in_a_shell("trashd undo", cwd=volume).code == 5
    done = in_a_shell("trashd sweep c --name deep", "trashd rm b", "trashd undo", "trashd undo", cwd=volume)
    assert done.code == 0, done
    assert (volume / "b/file").exists()
    assert (volume / "c/below/deep").exists()


def test_what_was_written_meanwhile_is_not_the_last_command(volume: Path) -> None:
    """It is kept by the restore itself: an undo of that would swap the two for ever."""
    make(volume, "a")
    done = in_a_shell("trashd swap a", "touch a/new", "trashd undo", "trashd undo; [ $? = 5 ]", cwd=volume)
    assert done.code == 0, done
    assert (volume / "a/file").exists()


def test_it_is_nothing_of_another_session_or_another_users(volume: Path) -> None:
    make(volume, "a")
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
    make(volume, "b")
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
    make(volume, "a", "b")
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
