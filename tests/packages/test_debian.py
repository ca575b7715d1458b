"""The packages, as apt installs, upgrades, removes and purges them on a machine that runs."""

import os

import pytest

from tests.packages.debian_machine import VOLUME, DebianMachine
from tests.support.booted_systemd import REPO

pytestmark = pytest.mark.needs("systemd")

REAPER, MOUNT = "trashd-reaper.service", "trashd-mount@srv-served.service"
TESTS = REPO / "debian/tests"


def test_installing_starts_and_enables_nothing(machine: DebianMachine) -> None:
    system = machine.system
    for unit in (REAPER, "trashd-sweep.timer"):
        assert system.state(unit) == "inactive"
        assert system.show(unit, "LoadState", "UnitFileState") == {"LoadState": "loaded", "UnitFileState": "disabled"}
    assert system.run("pgrep", "--full", "trashd", code=1).stdout == ""
    assert system.run("stat", "--format=%a %G", "/var/log/trashd").stdout == "2750 trashd\n"
    assert "missing" not in system.run("dpkg", "--verify", "trashd", "trashd-mount").stdout


def test_everybody_swaps_restores_and_reaps(machine: DebianMachine) -> None:
    machine.system.run(TESTS / "swap-and-restore-as-root")
    machine.as_user(str(TESTS / "swap-and-restore"))
    machine.as_user("trashd", "--version")


def test_a_line_of_fstab_mounts_and_has_the_native_core(machine: DebianMachine) -> None:
    machine.system.run(TESTS / "mount")
    machine.fill("/srv/served")
    machine.system.run("mount", "-t", "fuse.trashd", "/srv/served", "/srv/served")
    told = machine.trashd("mount", "--explain", "/srv/served")
    machine.system.run("umount", "/srv/served")
    assert "it was not built" not in told
    assert "can't be loaded" not in told


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completions_are_where_shells_look(machine: DebianMachine, shell: str) -> None:
    places = {"bash": "bash-completion/completions/trashd", "zsh": "zsh/vendor-completions/_trashd"}
    assert "_TRASHD_COMPLETE" in machine.system.path(f"/usr/share/{places[shell]}").read_text()


def test_an_upgrade_ends_neither_a_mount_nor_the_reaper(machine: DebianMachine) -> None:
    system = machine.system
    machine.fill("/srv/served")
    machine.fill(f"{VOLUME}/job")
    machine.trashd("swap", f"{VOLUME}/job")
    system.systemctl("start", REAPER, MOUNT)
    before = [system.main_pid(unit) for unit in (REAPER, MOUNT)]
    held = os.open(system.path("/srv/served/file"), os.O_RDONLY)
    try:
        machine.upgrade()
        assert "+next" in system.run("dpkg-query", "--show", "trashd").stdout
        assert [system.main_pid(unit) for unit in (REAPER, MOUNT)] == before
        assert system.show(REAPER, "NeedDaemonReload") == {"NeedDaemonReload": "no"}
        assert os.read(held, 10) == b"content"
    finally:
        os.close(held)
    assert system.path("/srv/served/file").read_text() == "content"
    machine.fill("/srv/served/late")
    machine.trashd("swap", "/srv/served/late")
    assert os.listdir(system.path("/srv/served/late")) == []
    assert f"{VOLUME}/job" in machine.orphans()
    machine.fill(f"{VOLUME}/due")
    machine.trashd("swap", "--keep-for", "0s", f"{VOLUME}/due")
    system.wait_for(lambda: f"{VOLUME}/due" not in machine.orphans(), "the old reaper reaps what is due")
    system.systemctl("stop", REAPER, MOUNT)


def test_removed_and_purged_it_leaves_every_store(machine: DebianMachine) -> None:
    system = machine.system
    machine.fill("/srv/served")
    machine.fill(f"{VOLUME}/job")
    machine.trashd("swap", f"{VOLUME}/job")
    machine.as_user("mkdir", "/home/alice/dir")
    machine.as_user("trashd", "swap", "/home/alice/dir")
    system.systemctl("enable", "--now", REAPER)
    system.systemctl("start", MOUNT)
    served = system.main_pid(MOUNT)
    told = machine.apt("remove", *(path.name.partition("_")[0] for path in machine.packages))
    assert f"  {VOLUME}\n" in told
    assert "  /home/alice\n" in told
    assert "goes on until it is unmounted" in told
    assert system.state(REAPER) == "inactive"
    assert system.main_pid(MOUNT) == served
    assert system.path("/srv/served/file").read_text() == "content"
    told = machine.apt("purge", "trashd", "trashd-mount")
    assert "/var/lib/trashd/stores stays" in told
    assert system.path("/srv/served/file").read_text() == "content"
    system.run("umount", "/srv/served")
    for gone in ("etc/trashd", "var/log/trashd", "usr/lib/trashd", "var/lib/trashd/clock.json"):
        assert not system.path(gone).exists()
    orphans = list(system.path(VOLUME).glob(".trashd/u/0/orphans/*-job-*/tree/file"))
    assert [path.read_text() for path in orphans] == ["content"]
    machine.apt("install", *machine.packages)
    assert {f"{VOLUME}/job", "/home/alice/dir"} <= set(machine.orphans())
    machine.trashd("restore", f"{VOLUME}/job")
    assert system.path(f"{VOLUME}/job/file").read_text() == "content"
