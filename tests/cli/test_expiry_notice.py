"""A person at a terminal is told that orphans of his expire soon: seldom, and nobody else is told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.make_trees import Dir, make_tree
from tests.support.mount_namespaces import ROOTS
from tests.support.other_users import as_user
from tests.support.pty_session import Terminal
from tests.support.real_filesystems import tmpfs_over
from tests.support.store_calls import assert_silent
from tests.support.trashd_command import done_well, swapped
from tests.support.volume_under_service import aged

pytestmark = pytest.mark.needs("root")

ALICE = 12001
HOUR_S = 3600
NOTICE = "trashd: 1 orphan of yours expires soon, in 4h: trashd list --within 1d"


@pytest.fixture(autouse=True)
def _nobody_was_told() -> Iterator[None]:
    with tmpfs_over(ROOTS, "0755"):
        yield


def seen(*words: str | Path, code: int = 0) -> str:
    """What a command shows on a terminal."""
    terminal = Terminal(*words)
    assert terminal.end() == code, terminal.seen
    return terminal.seen.replace("\r\n", "\n")


def soon(volume: Path, name: str = "soon") -> str:
    """The id of an orphan of a day that is gone in four hours and a half."""
    return aged(volume, name, 19 * HOUR_S + HOUR_S // 2)


def test_a_list_tells_what_expires_soon_and_not_again_for_hours(volume: Path) -> None:
    soon(volume)
    assert seen("list", "--volume", volume).endswith(f"{NOTICE}\n")
    assert "expire" not in seen("list", "--volume", volume)
    told = ROOTS / "told-what-expires"
    os.utime(told, (told.stat().st_mtime - 7 * HOUR_S,) * 2)
    assert NOTICE in seen("list", "--volume", volume)
    assert_silent(volume)


@pytest.mark.parametrize("command", ["rm", "restore"])
def test_who_works_in_a_store_is_told(volume: Path, command: str) -> None:
    soon(volume)
    victim = make_tree(volume / "victim", {"file": "content"})
    if command == "restore":
        swapped(victim)
    assert NOTICE in seen(command, victim)
    assert_silent(volume)


def test_what_expires_later_or_just_came_or_is_kept_is_not_told(volume: Path) -> None:
    aged(volume, "of-a-day", 2 * HOUR_S)
    swapped(make_tree(volume / "short", {}), "--keep-for", "1h")
    done_well("keep", "--volume", volume, soon(volume, "kept"))
    assert "expire" not in seen("list", "--volume", volume)
    assert not (ROOTS / "told-what-expires").exists()
    assert_silent(volume)


@pytest.fixture
def home(volume: Path) -> Path:
    """Alice's, with an orphan that expires soon."""
    volume.chmod(0o777)
    home = make_tree(volume / "alice", {"config": Dir({"trashd": Dir({})})})
    for path in (home, *home.rglob("*")):
        os.chown(path, ALICE, ALICE)
    as_user(ALICE, lambda: soon(home))
    return home


def alice_sees(home: Path, *words: str | Path) -> str:
    """What a command shows her on a terminal."""

    def shown() -> str:
        terminal = Terminal(
            *words, HOME=str(home), XDG_STATE_HOME=str(home / "state"), XDG_CONFIG_HOME=str(home / "config")
        )
        terminal.end()
        return terminal.seen

    return as_user(ALICE, shown)


def test_nobody_is_told_of_anothers(volume: Path, home: Path) -> None:
    assert "expire" not in seen("list", "--volume", volume)
    assert NOTICE in alice_sees(home, "list", "--volume", volume)
    assert_silent(volume)


def test_who_turns_it_off_is_not_told(volume: Path, home: Path) -> None:
    config = home / "config/trashd/config.toml"
    config.write_text("notices = false\n", encoding="utf-8")
    assert "expire" not in alice_sees(home, "list", "--volume", volume)
    config.write_text("notices = true\n", encoding="utf-8")
    assert NOTICE in alice_sees(home, "list", "--volume", volume)
    assert_silent(volume)


def test_a_home_that_keeps_no_note_is_told_nothing(volume: Path, home: Path) -> None:
    (home / "state").touch()
    assert "expire" not in alice_sees(home, "list", "--volume", volume)
    assert_silent(volume)


def test_programs_are_told_nothing(volume: Path) -> None:
    soon(volume)
    assert done_well("list", "--volume", volume).err == ""
    assert "expire" not in seen("list", "--json", "--volume", volume).replace("expires_ns", "")
    assert_silent(volume)
