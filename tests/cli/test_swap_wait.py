"""`trashd swap --wait`: it ends when the space is back, or with the reason why it is not; the swap stays done."""

import json
import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fusefs.core.service_status import VolumePhase
from tests.support.foreground_mount import trashd_mount, until
from tests.support.make_trees import IMMUTABLE, make_tree, owned, set_flags
from tests.support.minimal_reaper import own_runtime_dir, small_reaper
from tests.support.other_users import run_as
from tests.support.real_filesystems import tmpfs_volume
from tests.support.service_process import places, service
from tests.support.store_verbs import init
from tests.support.trashd_command import TRASHD, CommandResult, done_well, environment, trashd

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(120)]

MIB = 1 << 20
USER, NOBODY = 1234, 65_534


def make_victim(volume: Path, name: str = "victim", size: int = 4 * MIB) -> Path:
    return make_tree(volume / name, {"file": b"x" * size, "below": {"deep": "more"}})


def waited(*words: str | Path) -> tuple[CommandResult, dict[str, Any]]:
    """How `trashd swap --json WORDS` ended, and the last object that it told."""
    done = trashd("swap", "--json", *words)
    assert done.out, done
    return done, done.objects()[-1]


def kinds(told: dict[str, Any]) -> list[str]:
    return [reason["kind"] for reason in told["reasons"]]


def orphans(volume: Path, state: str = "orphans") -> list[Path]:
    return sorted(volume.glob(f".trashd/u/*/{state}/*"))


# It comes


def test_several_are_waited_for_together(volume: Path) -> None:
    victims = [make_victim(volume, name) for name in "abc"]
    with small_reaper(volume):
        done, told = waited("--wait", *victims)
    assert (done.code, told["volume"]) == (0, str(volume))
    assert told["came_bytes"] >= 12 * MIB


def test_each_volume_is_told_by_itself(volume: Path) -> None:
    with tmpfs_volume() as other:
        init(other)
        with small_reaper(volume):
            done = trashd("swap", "--json", "--wait", make_victim(volume), make_victim(other))
        *_, one, two = done.objects()
        assert done.code == 13
        assert (one["volume"], one["is_reached"]) == (str(volume), True)
        assert (two["volume"], kinds(two)) == (str(other), ["nobody"])


def test_how_much_came_back_is_printed(volume: Path) -> None:
    with small_reaper(volume):
        done = trashd("swap", "--wait", make_victim(volume))
    assert done.code == 0
    assert re.fullmatch(rf"{volume}: 4\.\d+ MiB became free", done.out.splitlines()[-1])
    assert "undo" not in done.out


def test_root_waits_for_what_he_gave_to_its_owner(volume: Path) -> None:
    volume.chmod(0o777)
    victim = owned(make_victim(volume), NOBODY)
    with small_reaper(volume):
        done, told = waited("--wait", "--for-owner", victim)
    assert (done.code, told["is_reached"]) == (0, True)


@pytest.mark.needs("fuse")
def test_what_is_swapped_through_a_mount_is_waited_for_behind_it(volume: Path) -> None:
    make_victim(volume)
    with trashd_mount(volume) as mounted, small_reaper(volume):
        done, told = waited("--wait", mounted.path / "victim")
    assert (done.code, told["volume"], told["is_reached"]) == (0, str(mounted.path), True)


# It can't come


def test_without_a_reaper_it_says_so_at_once_and_what_to_do(volume: Path) -> None:
    victim = make_victim(volume)
    with own_runtime_dir():
        done = trashd("swap", "--wait", victim)
    (orphan,) = orphans(volume)
    assert done.code == 13
    assert f"no reaper serves {volume}" in done.out
    assert done.err == f"  hint: trashd reap --now --wait --volume {volume} {orphan.name}\n"
    assert list(victim.iterdir()) == []
    (list_result,) = trashd("list", "--json", "--volume", volume).objects()
    assert list_result["expires_ns"] - list_result["created_ns"] == 86_400 * 10**9, "nothing is given up"
    (hint,) = re.findall(r"hint: trashd (.*)\n", done.err)
    assert trashd(*hint.split()).code == 0
    assert trashd("list", "--json", "--volume", volume).out == ""


@pytest.mark.parametrize(
    ("phase", "kind", "hint"),
    [
        (VolumePhase.PAUSED, "paused", "trashd resume"),
        (VolumePhase.BROKEN, "broken", "trashd status"),
        (VolumePhase.ELSEWHERE, "nobody", "trashd reap --now"),
        (VolumePhase.GONE, "nobody", "trashd reap --now"),
    ],
)
def test_a_reaper_that_does_not_reap_says_why(volume: Path, phase: VolumePhase, kind: str, hint: str) -> None:
    with small_reaper(volume, phase, "the reason", reaps=False):
        done, told = waited("--wait", make_victim(volume))
    assert (done.code, told["is_reached"], kinds(told)) == (13, False, [kind])
    assert told["reasons"][0]["detail"].endswith(": the reason")
    assert told["hint"].startswith(hint)


def test_an_amount_that_the_tree_does_not_have_ends_with_the_tree(volume: Path) -> None:
    with small_reaper(volume):
        done, told = waited("--wait=100G", make_victim(volume))
    assert (done.code, kinds(told)) == (13, ["less"])


# While it waits


@contextmanager
def waiting(volume: Path, victim: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command that waits, its orphan left to the reaper."""
    words = [TRASHD, "swap", "--json", "--wait", *options, str(victim)]
    with subprocess.Popen(words, env=environment({}), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert until(lambda: bool(orphans(volume, "reaping")) or process.poll() is not None)
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_waiting_and_nothing_else(volume: Path, number: signal.Signals) -> None:
    with small_reaper(volume, reaps=False), waiting(volume, make_victim(volume)) as process:
        process.send_signal(number)
        out, _err = process.communicate(timeout=100)
    assert process.returncode == 128 + number
    assert json.loads(out.splitlines()[-1])["is_reached"] is False
    assert len(orphans(volume, "reaping")) == 1


def test_a_terminal_shows_what_the_reaper_waits_for(volume: Path) -> None:
    victim = make_victim(volume)
    with small_reaper(volume, VolumePhase.WINDOW, "until 22:00\x1b[31m", reaps=False):
        ours, theirs = pty.openpty()
        words = [TRASHD, "swap", "--wait", str(victim)]
        with subprocess.Popen(words, env=environment({}), stdout=subprocess.DEVNULL, stderr=theirs) as process:
            os.close(theirs)
            seen = b""
            while b"became free" not in seen:
                seen += os.read(ours, 4096)
            process.kill()
        os.close(ours)
    assert b"window: until 22:00" in seen
    assert b"\x1b[31m" not in seen


# Its retention


def test_a_retention_that_was_asked_for_is_kept_and_told(volume: Path) -> None:
    with small_reaper(volume, VolumePhase.PAUSED, reaps=False):
        done = trashd("swap", "--keep-for", "2h", "--wait", make_victim(volume))
    assert "nothing is deleted before the retention ends, in 2h" in done.err
    assert len(orphans(volume)) == 1


# The command line


@pytest.mark.parametrize(("size", "n_bytes"), [("100G", 100 << 30), ("done", 0), ("4096", 4096)])
def test_a_value_may_be_typed_with_a_space_as_with_an_equals_sign(volume: Path, size: str, n_bytes: int) -> None:
    with own_runtime_dir():
        done, told = waited("--wait", size, make_victim(volume))
    assert (done.code, done.err, told["goal_bytes"]) == (13, "", n_bytes)


def test_a_directory_that_is_called_like_a_goal_is_the_directory(volume: Path) -> None:
    victim = make_victim(volume, "100G")
    with own_runtime_dir():
        done = trashd("swap", "--json", "--wait", "100G", cwd=volume)
    assert done.objects()[-1]["goal_bytes"] == 0
    assert list(victim.iterdir()) == []


def test_what_is_no_goal_is_a_directory(volume: Path) -> None:
    with own_runtime_dir():
        done = trashd("swap", "--wait", "missing", make_victim(volume))
    assert (done.code, ": not found" in done.err) == (13, True)


def test_the_word_may_be_another_options_value_or_a_directorys_name(volume: Path) -> None:
    victim = make_tree(volume / "--wait", {"file": "content"})
    done = trashd("swap", "--json", "--note", "--wait", "--", "--wait", cwd=volume)
    assert done.code == 0
    assert list(victim.iterdir()) == []
    (list_result,) = trashd("list", "--json", "--volume", volume).objects()
    assert list_result["note"] == "--wait"


@pytest.mark.quick("swap")
def test_now_reaps_and_waits_without_a_reaper(volume: Path) -> None:
    done, told = waited("--now", "--wait", make_victim(volume))
    assert (done.code, told["is_reached"]) == (0, True)


# With the service


@pytest.fixture
def base() -> Iterator[Path]:
    """Where the service has its own files."""
    with places() as path:
        yield path


@pytest.mark.parametrize("goal", ["--wait", "--wait=done", "--wait=3M"])
def test_a_running_service_takes_it_at_once(base: Path, volume: Path, goal: str) -> None:
    done_well("swap", make_victim(volume, "before"))  # a plain one stays
    with service(base, volume) as running:
        running.until_phase(volume, VolumePhase.IDLE)
        done, told = waited(goal, make_victim(volume))  # by its poll it would take ten minutes
    assert (done.code, told["is_reached"], told["reasons"]) == (0, True, [])
    assert list((volume / "victim").iterdir()) == []
    (kept,) = done_well("list", "--json", "--volume", volume).objects()
    assert kept["origin"] == str(volume / "before")


def test_a_user_whom_the_service_never_saw_is_served_too(base: Path, volume: Path) -> None:
    volume.chmod(0o777)
    victim = owned(make_victim(volume), USER)
    with service(base, volume) as running:
        running.until_phase(volume, VolumePhase.IDLE)
        done = run_as(USER, [TRASHD, "swap", "--json", "--wait", victim], env=environment({}))
    assert done.returncode == 0, done
    assert json.loads(done.stdout.splitlines()[-1])["is_reached"]


def test_a_pause_is_told_and_what_it_left_goes_when_it_ends(base: Path, volume: Path) -> None:
    make_victim(volume)
    with service(base, volume) as running:
        running.until_phase(volume, VolumePhase.IDLE)
        done_well("pause", volume)
        running.until_phase(volume, VolumePhase.PAUSED)
        done, told = waited("--wait", volume / "victim")
        assert (done.code, kinds(told)) == (13, ["paused"])
        done_well(*told["hint"].split()[1:])
        running.until(lambda: not orphans(volume, "reaping"))


def test_what_the_service_could_not_remove_is_told(base: Path, volume: Path) -> None:
    victim = make_victim(volume)
    set_flags(victim / "file", IMMUTABLE)
    with service(base, volume) as running:
        running.until_phase(volume, VolumePhase.IDLE)
        done, told = waited("--wait", victim)
    (orphan,) = orphans(volume, "quarantine")
    set_flags(orphan / "tree/file", IMMUTABLE, on=False)
    assert (done.code, kinds(told), told["hint"]) == (13, ["left"], "trashd list --state quarantine")


def test_a_retention_that_was_asked_for_is_kept_by_the_service_too(base: Path, volume: Path) -> None:
    with service(base, volume) as running:
        running.until_phase(volume, VolumePhase.IDLE)
        began = time.monotonic()
        done, told = waited("--keep-for", "1s", "--wait", make_victim(volume))
        assert time.monotonic() - began > 1
    assert (done.code, told["is_reached"]) == (0, True)


def test_a_service_that_is_killed_while_somebody_waits_ends_it(base: Path, volume: Path) -> None:
    window = f'[[volume]]\npath = "{volume}"\nwindows = ["{_closed_window()}"]\n'
    with service(base, volume, config=window) as running:
        running.until_phase(volume, VolumePhase.WINDOW)
        words = [TRASHD, "swap", "--json", "--wait", str(make_victim(volume))]
        with subprocess.Popen(words, env=environment({}), stdout=subprocess.PIPE) as process:
            running.until(lambda: orphans(volume, "reaping"))
            assert process.poll() is None
            running.process.send_signal(signal.SIGKILL)
            out, _ = process.communicate(timeout=60)
    assert (process.returncode, kinds(json.loads(out.splitlines()[-1]))) == (13, ["nobody"])


def _closed_window() -> str:
    """An hour of the day that is far from now."""
    hour = (time.localtime().tm_hour + 12) % 24
    return f"{hour:02}:00-{hour:02}:30"
