"""What is tried of a kernel before the machine's switch for FUSE over io_uring is set: nobody is left waiting."""

import os
import signal
import subprocess

import pytest

from fusefs.linux.fuse_ring import FuseRing, RingEntry
from fusefs.linux.mountinfo import read_mounts
from fusefs.mount.life import uring_trial
from fusefs.mount.life.uring_trial import failures

CONNECTIONS = "/sys/fs/fuse/connections"

pytestmark = pytest.mark.needs("root", "fuse", "fuse_uring")


def test_this_kernel_lets_clients_go() -> None:
    assert failures() == []


def test_a_daemon_that_never_answers_is_told_and_the_trial_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(_ring: FuseRing, _entry: RingEntry) -> None:
        pass

    monkeypatch.setattr(uring_trial, "_answer", silent)
    monkeypatch.setattr(uring_trial, "_LIMIT_S", 0.2)
    told = failures()
    assert told[0].startswith("a mount does not answer")
    assert told[1].startswith("a daemon that was stopped does not go on")


def test_it_ends_its_own_connection_where_others_are_shown() -> None:
    """systemd mounts fusectl where the trial has its mount."""
    ours = subprocess.run(["mount", "-t", "fusectl", "connections", CONNECTIONS], check=False)  # or it is there already
    try:
        assert failures() == []
    finally:
        if ours.returncode == 0:
            subprocess.run(["umount", "--lazy", CONNECTIONS], check=True)


def test_a_mount_that_can_not_be_had_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise OSError

    monkeypatch.setattr(uring_trial, "_serve", refused)
    told = failures()
    assert len(told) == 6
    assert all("no mount" in why for why in told)


def test_a_trial_that_is_killed_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    def end() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(uring_trial, "_try_all", end)
    assert failures() == ["the trial did not come to its end"]


def test_nothing_of_it_is_seen_or_stays() -> None:
    before = set(os.listdir("/proc/self/fd"))
    failures()
    assert b"trashd-trial" not in {mount.source for mount in read_mounts()}
    assert set(os.listdir("/proc/self/fd")) == before
