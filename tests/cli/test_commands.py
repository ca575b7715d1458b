"""Every command through the real console script: exit codes, output for people and programs, errors with a hint."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.make_trees import IMMUTABLE, make_tree, set_flags, snapshot
from tests.support.real_filesystems import loop_volume, tmpfs_volume
from tests.support.store_verbs import assert_silent, entries
from tests.support.trash_without_walk import gather
from tests.support.trashd_command import TRASHD, done_well, swapped, trashd

pytestmark = pytest.mark.needs("root")

NOBODY = 65_534


def listed(volume: Path) -> list[dict[str, Any]]:
    return done_well("list", "--json", "--volume", volume).objects()


def make_victim(volume: Path, name: str = "victim") -> Path:
    return make_tree(volume / name, {"file": "content", "below": {"deep": "more"}})


def test_swap_prints_the_command_that_takes_it_back(volume: Path) -> None:
    victim = make_victim(volume)
    before = snapshot(victim)
    (undo,) = [line for line in done_well("swap", victim).out.splitlines() if line.startswith("  undo  trashd ")]
    done_well(*undo.split()[2:], "--volume", str(volume))
    assert snapshot(victim) == before


def test_the_restore_command_names_a_store_that_is_not_at_the_mounts_root(volume: Path) -> None:
    lower = volume / "lower store"
    lower.mkdir()
    with tmpfs_volume() as other:
        (other / "given dir").mkdir()
        done_well("init", other / "given dir")
        victim = make_victim(other / "given dir")
        command = swapped(victim)["restore"]
        subprocess.run(["sh", "-c", command.replace("trashd", TRASHD, 1)], check=True, stdout=subprocess.DEVNULL)
        assert (victim / "file").read_text() == "content"
        assert_silent(other / "given dir")


def test_list_shows_origin_note_and_time_left(volume: Path) -> None:
    victim = make_victim(volume)
    swapped(victim, "--note", "a note", "--keep-for", "3d")
    (_head, row) = done_well("list", "--volume", volume).out.splitlines()
    assert "  2d23h  unknown  root   restorable  " in row
    assert row.endswith(f"{victim}  # a note")


@pytest.mark.needs("loop")
def test_what_cannot_be_reaped_now_is_13_and_stays_listed_until_it_can() -> None:
    with loop_volume("ext4") as disk:
        done_well("init", disk)
        victim = make_victim(disk)
        set_flags(victim / "file", IMMUTABLE)
        done = trashd("swap", "--now", victim)
        assert done.code == 13
        assert "unlink tree/file: Operation not permitted" in done.out
        (entry,) = listed(disk)
        assert entry["state"] == "quarantine"
        subprocess.run(["chattr", "-i", f"{entry['path']}/tree/file"], check=True)
        done_well("reap", "--now", "--volume", disk, entry["id"])
        assert listed(disk) == []
        assert_silent(disk)


def test_names_from_standard_input_may_hold_anything_but_nul(volume: Path) -> None:
    victim = os.fsencode(volume) + b"/new\nline \xff -0"
    os.mkdir(victim)
    done_well("swap", "-0", stdin=victim)
    assert [os.fsencode(entry["origin"]) for entry in listed(volume)] == [victim]


def test_a_volume_that_became_read_only_is_listed_all_the_same() -> None:
    with tmpfs_volume() as volume:
        done_well("init", volume)
        victim = make_victim(volume)
        identifier = swapped(victim)["id"]
        subprocess.run(["mount", "-o", "remount,ro", volume], check=True)
        assert [entry["origin"] for entry in listed(volume)] == [str(victim)]
        assert_silent(volume)
        for words in ("restore", "reap --now"):
            done = trashd(*words.split(), "--volume", volume, identifier)
            assert (done.code, "mounted read-only" in done.err) == (11, True)
        subprocess.run(["mount", "-o", "remount,rw", volume], check=True)
        done_well("restore", "--volume", volume, identifier)
        assert_silent(volume)


def test_restore_of_a_sweep_says_what_has_its_name_taken_and_brings_it_later(volume: Path) -> None:
    victim = make_victim(volume)
    orphan = gather(victim, ["file", "below/deep"]).orphan
    assert orphan is not None
    assert f"{victim} (swept)" in done_well("list", "--volume", volume).out
    (victim / "file").write_text("new")
    done = trashd("restore", "--volume", volume, orphan)
    assert done.code == 13
    assert done.out.splitlines() == [
        f"{victim}: restored, but 1 could not be",
        "  file: File exists",
        f"  what is left stays in {orphan}: restore it again, or --to another place",
    ]
    assert (victim / "below/deep").read_text() == "more"
    done = trashd("restore", "--json", "--volume", volume, orphan)
    assert done.code == 13
    assert json.loads(done.out)["left"] == [{"name": "file", "errno": 17, "call": "renameat2"}]
    (victim / "file").unlink()
    assert json.loads(done_well("restore", "--json", "--volume", volume, orphan).out)["n_left"] == 0
    assert (victim / "file").read_text() == "content"


def test_reap_by_id_before_its_time_needs_now(volume: Path) -> None:
    told = swapped(make_victim(volume))
    assert trashd("reap", "--volume", volume, told["id"]).code == 13
    done_well("reap", "--now", "--volume", volume, told["id"])
    assert listed(volume) == []


def test_reap_all_before_their_time_needs_now(volume: Path) -> None:
    swapped(make_victim(volume))
    done_well("reap", "--all", "--volume", volume)
    assert len(listed(volume)) == 1
    done_well("reap", "--all", "--now", "--volume", volume)
    assert listed(volume) == []


def test_reap_all_of_root_leaves_the_orphans_of_users(volume: Path) -> None:
    home = volume / "home"
    home.mkdir()
    for directory in (home, make_victim(home)):
        os.chown(directory, NOBODY, NOBODY)
    swapped(home / "victim", "--for-owner")
    done_well("reap", "--all", "--now", "--volume", volume)
    assert [entry["uid"] for entry in listed(volume)] == [NOBODY]


def test_init_again_changes_nothing(volume: Path) -> None:
    before = snapshot(volume, with_times=True)
    assert "is there" in done_well("init", volume).out
    assert snapshot(volume, with_times=True) == before


def test_the_bar_is_for_terminals_only(volume: Path) -> None:
    told = swapped(make_victim(volume))
    done = done_well("reap", "--now", "--volume", volume, told["id"])
    assert done.err == ""
    assert "\x1b" not in done.out


USAGE = 2


@pytest.mark.quick("swap")
@pytest.mark.parametrize("by", [(), ("--keep", "none*")], ids=["plain", "click"])
def test_it_is_what_restore_takes(volume: Path, by: tuple[str, ...]) -> None:
    victim = make_tree(volume / "job", {"f": "1", "none": ""})
    done = done_well("swap", "--print-id", *by, victim)
    assert (done.out, done.err) == (entries(volume)[0].id + "\n", "")
    done_well("restore", done.out.strip())
    assert (victim / "f").read_text() == "1"


def test_it_is_a_line_for_each_that_was_swapped(volume: Path) -> None:
    victims = [make_tree(volume / name, {"f": ""}) for name in "ab"]
    done = trashd("swap", "--print-id", victims[0], volume / "missing", victims[1])
    assert done.out.split() == [entry.id for entry in entries(volume)]
    assert "missing" in done.err
    assert done.code == 13


@pytest.mark.parametrize("other", ["--json", "--dry-run", "--now", "--wait"])
def test_nothing_else_may_print_beside_it(volume: Path, other: str) -> None:
    victim = make_tree(volume / "job", {"f": "1"})
    done = trashd("swap", "--print-id", other, victim)
    assert (done.code, done.out, entries(volume)) == (USAGE, "", [])
