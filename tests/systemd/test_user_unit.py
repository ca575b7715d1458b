"""A user's own reaper, by the user's own systemd, without a login and without an administrator's reaper."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.booted_systemd import TRASHD, System, booted
from tests.support.foreground_mount import SHARED_LIMIT_S
from tests.systemd.machine import REAPER, containers, fill, volume_at

pytestmark = pytest.mark.needs("systemd")

UID = 4711
RUNTIME = f"/run/user/{UID}"


@pytest.fixture(scope="module")
def home() -> Iterator[System]:
    """A machine where alice's systemd runs, and has her service."""
    with booted(limit_s=SHARED_LIMIT_S) as system:
        system.run("useradd", "--create-home", f"--uid={UID}", "alice")
        system.run("loginctl", "enable-linger", "alice")
        system.run("systemctl", "start", f"user@{UID}.service")
        as_alice(system, TRASHD, "service", "install", "--user")
        as_alice(system, "sh", "-c", "mkdir -p ~/.config/trashd && echo 'grace = \"0s\"' >~/.config/trashd/config.toml")
        as_alice(system, "systemctl", "--user", "enable", "--now", REAPER)
        yield system


def as_alice(system: System, *words: str | Path, code: int = 0) -> str:
    variables = (f"XDG_RUNTIME_DIR={RUNTIME}", "HOME=/home/alice")
    return system.run("runuser", "--user=alice", "--", "env", *variables, *words, code=code).stdout


def show(system: System, name: str) -> str:
    return as_alice(system, "systemctl", "--user", "show", "--value", f"--property={name}", REAPER).strip()


def test_it_is_up(home: System) -> None:
    assert show(home, "ActiveState") == "active"
    assert show(home, "StatusText")


def test_it_reaps_what_is_its_users(home: System) -> None:
    volume = volume_at(home, "/srv/volume")
    for name in ("first", "second"):
        fill(volume / name, 10)
        os.chown(volume / name, UID, UID)
        as_alice(home, TRASHD, "swap", "--keep-for", "0s", f"/srv/volume/{name}")
        as_alice(home, "systemctl", "--user", "reload", REAPER)
        home.wait_for(lambda: not containers(volume), "it is reaped")


def test_it_reaps_what_is_in_its_users_home(home: System) -> None:
    fill(home.path("home/alice/job"), 10)
    os.chown(home.path("home/alice/job"), UID, UID)
    as_alice(home, TRASHD, "swap", "--keep-for", "0s", "/home/alice/job")
    home.wait_for(lambda: not containers(home.path("home/alice")), "it is reaped")


def test_it_runs_behind_everybody_else_and_can_gain_nothing(home: System) -> None:
    pid = int(show(home, "MainPID"))
    assert "SCHED_IDLE" in home.run("chrt", "--pid", str(pid)).stdout
    lines = home.proc(pid, "status").splitlines()
    status = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def test_its_user_sees_how_it_is(home: System) -> None:
    assert "trashd-reaper.service  active" in as_alice(home, TRASHD, "service", "status", "--user")


def test_doctor_tells_its_user_when_it_does_not_run(home: System) -> None:
    volume_at(home, "/srv/mine")
    assert as_alice(home, TRASHD, "doctor") == ""
    as_alice(home, "systemctl", "--user", "stop", REAPER)
    assert as_alice(home, TRASHD, "doctor", code=1) == (
        f"{REAPER}: not running, so expired orphans are not deleted automatically\n"
        f"  hint: systemctl --user enable --now {REAPER}\n"
    )
    as_alice(home, "systemctl", "--user", "start", REAPER)
    assert as_alice(home, TRASHD, "doctor") == ""
