"""What the reaper's unit lets it do, read back from its processes; and that this is enough for all of its work."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.booted_systemd import TRASHD, System
from tests.support.make_trees import IMMUTABLE, make_tree, set_flags
from tests.support.store_verbs import users_own
from tests.systemd.machine import REAPER, SLOW, containers, fill, inside, limit, status_of, swap

pytestmark = pytest.mark.needs("systemd")

ENABLED = (REAPER,)
STRANGER, NOGROUP = 4711, 65534  # a uid without a user has no group either
# As named in the unit; numbers of linux/capability.h.
CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "DAC_READ_SEARCH": 2, "FOWNER": 3, "KILL": 5, "SETGID": 6, "SETUID": 7,
                "LINUX_IMMUTABLE": 9, "LEASE": 28}  # fmt: skip


def test_it_runs_behind_everybody_else(system: System) -> None:
    pid = system.main_pid(REAPER)
    assert "SCHED_IDLE" in system.run("chrt", "--pid", str(pid)).stdout
    assert system.run("ionice", "-p", str(pid)).stdout.strip() == "idle"
    assert system.proc(pid, "stat").rpartition(")")[2].split()[16] == "19"
    assert system.proc(pid, "oom_score_adj").strip() == "500"
    assert system.show(REAPER, "ControlGroup")["ControlGroup"] == f"/trashd.slice/{REAPER}"


def test_it_has_what_it_needs_and_can_gain_nothing(system: System) -> None:
    status = status_of(system, system.main_pid(REAPER))
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    allowed = sum(1 << number for number in CAPABILITIES.values())
    assert {status[name] for name in ("CapBnd", "CapPrm", "CapEff")} == {f"{allowed:016x}"}
    assert {status[name] for name in ("CapInh", "CapAmb")} == {f"{0:016x}"}


@pytest.mark.parametrize("path", ["/usr/new", "/etc/new", "/boot/new"])
def test_it_sees_the_system_read_only(system: System, path: str) -> None:
    enter = ("nsenter", f"--target={system.main_pid(REAPER)}", "--mount", "--")
    done = system.run(*enter, "/bin/sh", "-c", f"echo x > {path}", code=None)
    assert "Read-only file system" in done.stderr


def test_who_deletes_has_the_askers_uid_and_no_capability(system: System, volume: Path) -> None:
    limit(system, SLOW)
    fill(volume / "victim", 4_000)
    os.chown(volume / "victim", STRANGER, NOGROUP)
    system.trashd("swap", "--for-owner", "--keep-for", "0s", f"{inside(volume)}/victim")

    def child() -> int:
        pids = system.run("pgrep", "--uid", str(STRANGER), code=None).stdout.split()
        return int(pids[0]) if pids else 0

    system.wait_for(lambda: child() != 0, "a process with his uid")
    status = status_of(system, child())
    assert set(status["Uid"].split()) == {str(STRANGER)}
    assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapInh")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def test_the_clean_state_of_its_directories(system: System) -> None:
    assert system.path("run/trashd").stat().st_mode & 0o777 == 0o711
    assert system.path("var/lib/trashd").stat().st_mode & 0o777 == 0o700
    log = system.path("var/log/trashd").stat()
    assert (log.st_mode & 0o7777, log.st_gid != 0) == (0o2750, True)


@contextmanager
def configured(system: System, text: str, verb: str = "reload") -> Iterator[None]:
    """With these lines in its configuration."""
    path = system.path("etc/trashd/config.d/test.toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    system.systemctl(verb, REAPER)
    try:
        yield
    finally:
        path.unlink()
        system.systemctl(verb, REAPER)


def test_root_deletes_for_its_users_what_they_could_not(system: System, volume: Path) -> None:
    victim = make_tree(volume / "victim", {"his": "content", "roots": {"file": "content"}, "fixed": "content"})
    for path in (victim, victim / "his", victim / "fixed"):
        os.chown(path, STRANGER, NOGROUP)
    set_flags(victim / "fixed", IMMUTABLE)
    policy = f'[defaults]\ndelete_as = "root"\nusers = ["{STRANGER}"]\nclears_flags = true\n'
    with configured(system, policy):
        system.trashd("swap", "--for-owner", "--keep-for", "0s", f"{inside(volume)}/victim")
        system.wait_for(lambda: not containers(volume), "all of it is reaped")


def test_a_hook_runs_as_nobody(system: System, volume: Path) -> None:
    told = volume / "told"
    told.mkdir()
    os.chown(told, NOGROUP, NOGROUP)
    with configured(system, f'[hooks]\non_reaped = ["/bin/sh", "-c", "id -u > {inside(volume)}/told/uid"]\n'):
        fill(volume / "victim", 10)
        swap(system, f"{inside(volume)}/victim")
        system.wait_for(lambda: (told / "uid").exists() and (told / "uid").read_text() == f"{NOGROUP}\n", "it ran")


def test_metrics_are_served_to_this_machine(system: System) -> None:
    asks = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9817/metrics', timeout=5).read().decode())"
    with configured(system, '[metrics]\nhttp = "127.0.0.1:9817"\n', "restart"):
        system.wait_for(lambda: "trashd_" in system.run("python3", "-c", asks, code=None).stdout, "it listens")


def test_a_store_in_the_home_of_a_user_who_has_logged_out_is_served(system: System) -> None:
    system.run("useradd", "--create-home", "--uid=1234", "alice")
    swapped = ("env", "HOME=/home/alice", TRASHD, "swap", "--keep-for", "0s", "/home/alice/job")
    system.run("install", "--directory", "--owner=alice", "--group=alice", "/home/alice/job")
    system.run("runuser", "--user=alice", "--", *swapped)
    home = system.path("home/alice")
    store = users_own(home, 1234)
    assert store.stat().st_uid == 1234
    assert containers(home)
    system.systemctl("reload", REAPER)
    system.wait_for(lambda: not containers(home), "it is reaped")
    assert not (store / "reaper.lock").exists()
