"""The nightly sweep as the unit runs it: it may do all that rules ask for, and nothing starts it that has no rules."""

import os
import stat
from pathlib import Path

import pytest

from tests.support.booted_systemd import System
from tests.systemd.machine import containers, inside, volume_at

pytestmark = pytest.mark.needs("systemd")

SWEEP, TIMER = "trashd-sweep.service", "trashd-sweep.timer"
ENABLED = ()
STRANGER = 4711


def put(path: Path, age_days: int, system_now_s: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"content")
    os.utime(path, (system_now_s - 86_400 * age_days,) * 2)
    os.chown(path, STRANGER, STRANGER)
    path.chmod(0o600)


def test_no_rules_no_work(system: System) -> None:
    system.systemctl("start", SWEEP)
    assert system.show(SWEEP, "ConditionResult", "Result") == {"ConditionResult": "no", "Result": "success"}


def test_timer_waits_for_the_night(system: System) -> None:
    system.systemctl("start", TIMER)
    assert system.show(TIMER, "ActiveState", "SubState") == {"ActiveState": "active", "SubState": "waiting"}


def test_it_may_do_what_rules_ask_for(system: System) -> None:
    volume = volume_at(system, "/srv/rules")
    now_s = volume.stat().st_mtime
    for name in ("closed/trash/old", "closed/delete/old", "closed/unit/x/old"):
        put(volume / name, 40, now_s)
    put(volume / "closed/trash/soon", 25, now_s)
    closed = volume / "closed"
    for directory in (closed, closed / "trash"):
        os.chown(directory, STRANGER, STRANGER)
        directory.chmod(0o2700)
    there = inside(volume)
    plans = system.path("etc/trashd/plan.d")
    plans.mkdir(parents=True, exist_ok=True)
    (plans / "all.toml").write_text(f"""
        [[rule]]
        directory = "{there}/closed/trash"
        older = "30d"
        purgelist = {{ directory = "{there}/lists", ahead = "7d" }}
        [[rule]]
        directory = "{there}/closed/del*"
        older = "30d"
        action = "delete"
        [[rule]]
        directory = "{there}/closed/unit"
        unit = "top"
        older = "30d"
        """)
    system.systemctl("start", SWEEP)
    (plans / "all.toml").unlink()
    assert system.show(SWEEP, "Result", "ExecMainStatus") == {"Result": "success", "ExecMainStatus": "0"}
    assert {path.name for path in closed.rglob("*") if path.is_file()} == {"soon"}
    assert len(containers(volume, "orphans")) == 2
    listed = volume / f"lists/{STRANGER}.list"
    assert (listed.stat().st_uid, stat.S_IMODE(listed.stat().st_mode)) == (STRANGER, 0o640)
    assert listed.read_text().endswith(f"\t{there}/closed/trash/soon\n")
    assert system.trashd("doctor", there) == ""
