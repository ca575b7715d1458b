"""`trashd doctor` under a running systemd: what keeps the service from its work is told, and what mends it."""

import json
from collections.abc import Iterator

import pytest

from tests.support.booted_systemd import TRASHD, System
from tests.systemd.machine import REAPER, drop_in, volume_at

pytestmark = pytest.mark.needs("systemd")

ENABLED = (REAPER,)
SWEEP, TIMER = "trashd-sweep.service", "trashd-sweep.timer"
UNITS = (REAPER, SWEEP, TIMER, "units", "/run/trashd/reaper", "/etc/trashd/plan.d/all.toml: rule[1]")


@pytest.fixture(scope="module", autouse=True)
def store(system: System) -> Iterator[None]:
    """There is something to be reaped by somebody."""
    volume_at(system, "/srv/store")
    system.systemctl("start", REAPER)
    yield
    assert system.trashd("doctor", "/srv/store") == ""


def told(system: System) -> dict[str, tuple[str, str]]:
    """What it says of the units, by where that is; this machine's kernel is as it is."""
    lines = system.trashd("doctor", "--json", code=None).splitlines()
    found = {one["where"]: (one["what"], one["hint"]) for one in map(json.loads, lines)}
    return {where: found[where] for where in found if where.startswith(("/usr", *UNITS))}


def test_it_says_nothing_of_units_that_are_as_they_should_be(system: System) -> None:
    assert told(system) == {}


def test_a_reaper_that_does_not_run_is_told_with_what_starts_it(system: System) -> None:
    system.systemctl("disable", "--now", REAPER)
    assert told(system) == {
        REAPER: ("not running, so expired orphans are not deleted automatically", f"systemctl enable --now {REAPER}")
    }
    system.systemctl("start", REAPER)
    assert told(system) == {
        REAPER: ("running, but not enabled: it will not start at the next boot", f"systemctl enable {REAPER}")
    }
    system.systemctl("enable", REAPER)
    assert told(system) == {}


def test_a_masked_reaper_is_told_with_what_unmasks_it(system: System) -> None:
    system.systemctl("mask", "--now", "--runtime", REAPER)
    assert told(system)[REAPER] == (
        "masked, so expired orphans are not deleted automatically",
        f"systemctl unmask {REAPER}",
    )
    system.systemctl("unmask", "--runtime", REAPER)
    system.systemctl("start", REAPER)
    assert told(system) == {}


def test_a_service_that_failed_is_told(system: System) -> None:
    drop_in(system, SWEEP, "ExecStart=", "ExecStart=/bin/false")
    plans = system.path("etc/trashd/plan.d")
    plans.mkdir(parents=True, exist_ok=True)
    (plans / "all.toml").write_text('[[rule]]\ndirectory = "/srv"\nname = "nothing"\n')
    system.systemctl("start", SWEEP, code=1)
    found = told(system)
    assert found[SWEEP][0] == "failed"
    assert found[TIMER] == ("not running, so plans are not applied", f"systemctl enable --now {TIMER}")
    system.systemctl("enable", "--now", TIMER)
    (plans / "all.toml").unlink()
    system.path(f"run/systemd/system/{SWEEP}.d/test.conf").unlink()
    system.systemctl("daemon-reload")
    system.systemctl("reset-failed", SWEEP)
    assert told(system) == {}


def test_a_program_that_is_gone_is_told(system: System) -> None:
    drop_in(system, SWEEP, "ExecStart=", "ExecStart=/usr/bin/no-trashd")
    ((where, (what, hint)),) = told(system).items()
    assert where == f"/usr/local/lib/systemd/system/{SWEEP}"
    assert (what, hint) == ("its program can't be executed: /usr/bin/no-trashd", "trashd service install")
    system.path(f"run/systemd/system/{SWEEP}.d/test.conf").unlink()
    system.systemctl("daemon-reload")
    assert told(system) == {}


def test_a_unit_that_was_changed_since_systemd_read_it_is_told(system: System) -> None:
    unit = system.path(f"usr/local/lib/systemd/system/{REAPER}")
    text = unit.read_text()
    unit.write_text(text + "# edited\n")
    assert told(system)[REAPER] == ("changed on disk since systemd loaded it", "systemctl daemon-reload")
    unit.write_text(text)
    system.systemctl("daemon-reload")
    assert told(system) == {}


def test_a_user_is_told_nothing_of_the_machines_units(system: System) -> None:
    system.systemctl("stop", REAPER)
    argv = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "env", "HOME=/tmp", TRASHD, "doctor")
    assert system.run(*argv).stdout == ""
    system.systemctl("start", REAPER)
