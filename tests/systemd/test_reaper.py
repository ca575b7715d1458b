"""The reaper under a real systemd: started by the boot, watched, reloaded, stopped and killed in the middle of it."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.booted_systemd import System
from tests.systemd.machine import REAPER, SLOW, containers, drop_in, fill, hang, inside, limit, swap, volume_at

pytestmark = pytest.mark.needs("systemd")

ENABLED = (REAPER,)
N_FILES = 5_000
STOP_S = 1.0


def half_reaped(system: System, volume: Path) -> None:
    """Bring the reaper into the middle of an orphan."""
    limit(system, SLOW)
    fill(volume / "victim", N_FILES)
    tree = volume / ".trashd/u/0/reaping" / swap(system, f"{inside(volume)}/victim") / "tree"
    system.wait_for(lambda: tree.is_dir() and len(os.listdir(tree)) < N_FILES, "some of it is gone")


def properties(system: System) -> dict[str, str]:
    return system.show(REAPER, "ActiveState", "Result", "StatusText", "ControlGroup")


def journal(system: System, *matches: str) -> list[dict[str, Any]]:
    return system.journal(f"_SYSTEMD_UNIT={REAPER}", *matches)


def test_the_boot_starts_it_and_waits_not(system: System) -> None:
    assert system.systemctl("is-system-running").strip() == "running"
    assert properties(system)["ActiveState"] == "active"
    assert REAPER not in system.show("multi-user.target", "After")["After"].split()


def test_systemctl_status_says_what_it_does(system: System) -> None:
    assert properties(system)["StatusText"]


def test_a_volume_that_is_mounted_later_is_served(system: System) -> None:
    volume = volume_at(system, "/srv/hidden")
    fill(volume / "victim", 10)
    swap(system, "/srv/hidden/victim")
    system.path("srv/later").mkdir()
    system.run("mount", "--bind", "/srv/hidden", "/srv/later")
    system.wait_for(lambda: not containers(volume), "it is reaped")


def test_an_idle_volume_can_be_unmounted(system: System) -> None:
    volume = volume_at(system, "/srv/idle")
    limit(system, None)
    fill(volume / "victim", 10)
    swap(system, "/srv/idle/victim")
    system.wait_for(lambda: not containers(volume), "it is reaped")
    system.wait_for(lambda: system.run("umount", "/srv/idle", code=None).returncode == 0, "nobody holds it")


def test_entries_of_the_journal_have_fields(system: System, volume: Path) -> None:
    fill(volume / "victim", 10)
    identifier = swap(system, f"{inside(volume)}/victim")
    system.wait_for(lambda: bool(journal(system, "TRASHD_EVENT=reaped", f"TRASHD_ID={identifier}")), "it is told")
    (entry,) = journal(system, "TRASHD_EVENT=reaped", f"TRASHD_ID={identifier}")
    assert entry["TRASHD_VOLUME"] == inside(volume)
    assert entry["TRASHD_UID"] == "0"
    assert entry["SYSLOG_IDENTIFIER"] == "trashd"


def test_reload_reads_the_configuration_again(system: System, volume: Path) -> None:
    half_reaped(system, volume)
    pid = system.main_pid(REAPER)
    limit(system, None)
    system.wait_for(lambda: not containers(volume), "it goes as fast as it can")
    assert system.main_pid(REAPER) == pid


def test_it_does_not_start_with_a_mistake_and_says_which(system: System) -> None:
    path = system.path("etc/trashd/config.d/mistake.toml")
    path.write_text("retentoin = 1\n")
    try:
        system.systemctl("restart", REAPER, code=1)
        assert system.show(REAPER, "ActiveState", "NRestarts") == {"ActiveState": "failed", "NRestarts": "0"}
        assert any("retentoin" in line for line in system.messages(REAPER))
    finally:
        path.unlink()
        system.systemctl("restart", REAPER)


def test_stop_takes_less_than_a_second_in_the_middle_of_a_tree(system: System, volume: Path) -> None:
    def stops_s() -> float:
        half_reaped(system, volume)
        begun_s = time.monotonic()
        system.systemctl("stop", REAPER)
        took_s = time.monotonic() - begun_s
        assert properties(system)["Result"] == "success"
        assert system.trashd("doctor", inside(volume)) == ""
        system.systemctl("start", REAPER)
        return took_s

    assert any(stops_s() < STOP_S for _ in range(10))  # a busy machine is slower now and then


def kill_it(system: System) -> None:
    system.kill(system.main_pid(REAPER), signal.SIGKILL)


def hang_it(system: System) -> None:
    """Stop it: the watchdog has to find out."""
    hang(system, REAPER)


@pytest.mark.parametrize("end", [kill_it, hang_it])
def test_it_comes_back_and_goes_on(system: System, volume: Path, end: Callable[[System], None]) -> None:
    drop_in(system, REAPER, "RestartSec=100ms")
    system.systemctl("restart", REAPER)
    half_reaped(system, volume)
    pid = system.main_pid(REAPER)
    end(system)
    system.wait_for(lambda: system.main_pid(REAPER) not in (0, pid), "another one")
    system.wait_for(lambda: properties(system)["ActiveState"] == "active", "it is ready")
    assert containers(volume, "orphans", "reaping")


@pytest.mark.parametrize("is_first", [True, False], ids=["before the mount", "after the mount"])
def test_it_serves_a_volume_mounted_over_itself(system: System, volume: Path, is_first: bool) -> None:
    mount = f"trashd-mount@srv-{volume.name}.service"
    if not is_first:
        system.systemctl("stop", REAPER)
    system.systemctl("start", mount)
    if not is_first:
        system.systemctl("start", REAPER)
    try:
        fill(volume / "victim", 10)
        swap(system, f"{inside(volume)}/victim")
        system.wait_for(lambda: not containers(volume), "it is reaped")
    finally:
        system.systemctl("stop", mount)
