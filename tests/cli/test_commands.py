"""Every command through the real console script: exit codes, output for people and programs, errors with a hint."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.make_trees import IMMUTABLE, make_tree, set_flags, snapshot
from tests.support.real_filesystems import loop_volume, tmpfs_volume
from tests.support.store_verbs import assert_silent
from tests.support.trash_without_walk import gather
from tests.support.trashd_command import TRASHD, done_well, environment, swapped, trashd

pytestmark = pytest.mark.needs("root")

NOBODY = 65_534
N_NAMES = 600  # 57,000 are in bench/swap.py: 0.4 ms each
"""More names than a command line of 128 KiB holds, the least that exec must take."""


def listed(volume: Path) -> list[dict[str, Any]]:
    return done_well("list", "--json", "--volume", volume).objects()


def make_victim(volume: Path, name: str = "victim") -> Path:
    return make_tree(volume / name, {"file": "content", "below": {"deep": "more"}})


def test_swap_leaves_an_empty_directory(volume: Path) -> None:
    victim = make_victim(volume)
    done_well("swap", victim)
    assert list(victim.iterdir()) == []


def test_swap_prints_the_command_that_takes_it_back(volume: Path) -> None:
    victim = make_victim(volume)
    before = snapshot(victim)
    (undo,) = [line for line in done_well("swap", victim).out.splitlines() if line.startswith("  undo  trashd ")]
    done_well(*undo.split()[2:], "--volume", str(volume))
    assert snapshot(victim) == before


def test_swap_json_tells_the_command_that_takes_it_back(volume: Path) -> None:
    victim = make_victim(volume)
    assert swapped(victim)["restore"].split()[:2] == ["trashd", "restore"]
    assert {entry["origin"] for entry in listed(volume)} == {str(victim)}


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


@pytest.mark.parametrize("slashes", ["/", "///"])
def test_swap_takes_trailing_slashes(volume: Path, slashes: str) -> None:
    victim = make_victim(volume)
    done_well("swap", f"{victim}{slashes}")
    assert list(victim.iterdir()) == []


def test_swap_takes_a_name_with_a_leading_dash_after_two_dashes(volume: Path) -> None:
    victim = make_victim(volume, "-rf")
    done_well("swap", "--", "-rf", cwd=volume)
    assert list(victim.iterdir()) == []


def test_swap_goes_on_after_a_failure(volume: Path) -> None:
    victims = [make_victim(volume, "a"), make_victim(volume, "b")]
    done = trashd("swap", victims[0], volume / "missing", victims[1])
    assert done.code == 13
    assert [list(victim.iterdir()) for victim in victims] == [[], []]


def test_a_failure_among_several_is_named_with_a_hint(volume: Path) -> None:
    done = trashd("swap", make_victim(volume), volume / "missing")
    assert f"trashd: Not found: {volume}/missing\n  hint: " in done.err


def test_swap_keeps_the_note_and_the_retention(volume: Path) -> None:
    swapped(make_victim(volume), "--note", "before the upgrade", "--keep-for", "3d")
    (entry,) = listed(volume)
    assert entry["note"] == "before the upgrade"
    assert entry["expires_ns"] - entry["created_ns"] == 3 * 86_400 * 10**9


def test_list_shows_origin_note_and_time_left(volume: Path) -> None:
    victim = make_victim(volume)
    swapped(victim, "--note", "a note", "--keep-for", "3d")
    (_head, row) = done_well("list", "--volume", volume).out.splitlines()
    assert "  2d23h  unknown  root   restorable  " in row
    assert row.endswith(f"{victim}  # a note")


def test_a_note_cannot_move_the_cursor_of_who_lists_it(volume: Path) -> None:
    swapped(make_victim(volume), "--note", "\x1b[2Jgone")
    assert "\x1b" not in done_well("list", "--volume", volume).out


@pytest.mark.parametrize("command", [("swap", "--dry-run"), ("check",)])
def test_a_look_ahead_tells_what_a_swap_refuses(volume: Path, command: tuple[str, ...]) -> None:
    (volume / "file").touch()
    done = trashd(*command, volume / "file")
    assert done.code == 3
    assert "can NOT be swapped" in done.out


def test_now_leaves_no_orphan(volume: Path) -> None:
    done = done_well("swap", "--now", make_victim(volume))
    assert "undo" not in done.out
    assert listed(volume) == []


def test_rm_now_leaves_no_orphan(volume: Path) -> None:
    victim = make_victim(volume)
    done_well("rm", "--now", victim)
    assert not victim.exists()
    assert listed(volume) == []


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


def test_rm_takes_files_and_links_themselves(volume: Path) -> None:
    (volume / "file").write_text("content")
    (volume / "link").symlink_to("file")
    done_well("rm", volume / "link")
    assert (volume / "file").read_text() == "content"
    done_well("rm", volume / "file")
    assert sorted(entry["origin"] for entry in listed(volume)) == [f"{volume}/file", f"{volume}/link"]


def test_very_many_names_come_by_standard_input(volume: Path) -> None:
    parent = volume / "many"
    parent.mkdir()
    names = [parent / f"a name that is long enough {number:0200}" for number in range(N_NAMES)]
    for name in names:
        name.touch()
    given = b"".join(os.fsencode(name) + b"\0" for name in names)
    assert len(given) > 131_072
    done_well("rm", "-0", stdin=given)
    assert list(parent.iterdir()) == []
    assert len(listed(volume)) == 1
    done_well("reap", "--all", "--now", "--volume", volume)


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


def test_restore_takes_an_id_cut_short(volume: Path) -> None:
    victim = make_victim(volume)
    done_well("restore", "--volume", volume, swapped(victim)["id"][-12:])
    assert (victim / "file").read_text() == "content"


def test_restore_to_another_place(volume: Path) -> None:
    victim = make_victim(volume)
    done_well("restore", "--volume", volume, swapped(victim)["id"], "--to", volume / "elsewhere")
    assert (volume / "elsewhere/file").read_text() == "content"


def test_restore_of_a_part(volume: Path) -> None:
    victim = make_victim(volume)
    done_well("restore", "--volume", volume, swapped(victim)["id"], "below/deep")
    assert (victim / "below/deep").read_text() == "more"


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


def test_reap_waits_for_the_retention(volume: Path) -> None:
    swapped(make_victim(volume))
    assert "no orphan has expired" in done_well("reap", "--volume", volume).err
    assert len(listed(volume)) == 1


def test_reap_takes_what_has_expired(volume: Path) -> None:
    swapped(make_victim(volume), "--keep-for", "0s")
    assert "4 entries removed" in done_well("reap", "--volume", volume).out
    assert listed(volume) == []


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


def test_doctor_is_silent_when_all_is_well(volume: Path) -> None:
    swapped(make_victim(volume))
    done = done_well("doctor", volume)
    assert done.out + done.err == ""


def test_doctor_tells_what_is_wrong(volume: Path) -> None:
    stray = volume / ".trashd/u/0/orphans/stray"
    stray.mkdir()
    done = trashd("doctor", volume)
    stray.rmdir()
    assert done.code == 1
    assert str(stray) in done.out
    assert "  hint: " in done.out


def test_init_again_changes_nothing(volume: Path) -> None:
    before = snapshot(volume, with_times=True)
    assert "is there" in done_well("init", volume).out
    assert snapshot(volume, with_times=True) == before


def test_h_is_help() -> None:
    assert done_well("-h") == done_well("--help")


def test_the_bar_is_for_terminals_only(volume: Path) -> None:
    told = swapped(make_victim(volume))
    done = done_well("reap", "--now", "--volume", volume, told["id"])
    assert done.err == ""
    assert "\x1b" not in done.out


def test_a_terminal_sees_the_progress(volume: Path) -> None:
    told = swapped(make_victim(volume))
    words = f"{TRASHD} reap --now --volume {volume} {told['id']}"
    command = ["script", "--quiet", "--return", "--command", words, "/dev/null"]
    done = subprocess.run(command, capture_output=True, env=environment({"TERM": "xterm"}), check=False)
    assert done.returncode == 0, done
    assert b"4 entries removed" in done.stdout


def test_init_beside_is_an_unknown_option_with_a_hint_at_the_configuration() -> None:
    done = trashd("init", "--beside", "/b", "/a")
    assert (done.code, "takeover_s" in done.err) == (2, True), done
