"""`trashd service` on a running machine: systemd learns at once what was installed and what was taken away."""

import grp
import json
import stat
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.booted_systemd import System, booted
from tests.systemd.machine import booted_with_trashd

pytestmark = pytest.mark.needs("systemd")


@pytest.fixture
def bare() -> Iterator[System]:
    """A machine without the service."""
    with booted() as system:
        yield system


def status(system: System) -> dict[str, Any]:
    service_result: dict[str, Any] = json.loads(system.trashd("service", "status", "--json"))
    return service_result


def test_what_is_installed_is_known_and_does_not_run(bare: System) -> None:
    bare.trashd("service", "install")
    assert bare.show("trashd-reaper", "LoadState", "ActiveState") == {"LoadState": "loaded", "ActiveState": "inactive"}
    assert [(unit["Id"], unit["UnitFileState"]) for unit in status(bare)["units"]] == [
        ("trashd-reaper.service", "disabled"), ("trashd-sweep.timer", "disabled"), ("trashd-sweep.service", "static"),
    ]  # fmt: skip


def test_status_tells_each_unit_on_a_line(bare: System) -> None:
    bare.trashd("service", "install")
    told = bare.trashd("service", "status")
    for unit in ("trashd-reaper.service", "trashd-sweep.timer", "trashd-sweep.service"):
        assert f"\n{unit}  inactive (dead), " in told


def test_group_and_directories_are_there_after_it(bare: System) -> None:
    bare.trashd("service", "install")
    gid = bare.run("getent", "group", "trashd").stdout.split(":")[2]
    log = bare.path("var/log/trashd").stat()
    assert (log.st_gid, stat.S_IMODE(log.st_mode)) == (int(gid), 0o2750)
    assert stat.S_IMODE(bare.path("run/trashd").stat().st_mode) == 0o711
    assert bare.path("etc/trashd/mounts").is_dir()
    assert all(entry.gr_name != "trashd" for entry in grp.getgrall())  # it stayed in there


def test_uninstall_leaves_systemd_knowing_nothing(bare: System) -> None:
    bare.trashd("service", "install")
    bare.systemctl("enable", "trashd-reaper", "trashd-sweep.timer")
    bare.trashd("service", "uninstall")
    for unit, target in (("trashd-reaper.service", "multi-user"), ("trashd-sweep.timer", "timers")):
        assert bare.show(unit, "LoadState") == {"LoadState": "not-found"}
        assert not bare.path(f"etc/systemd/system/{target}.target.wants/{unit}").is_symlink()


def test_uninstall_is_refused_while_a_mount_is_served(bare: System) -> None:
    bare.trashd("service", "install")
    bare.path("srv/data").mkdir()
    bare.systemctl("start", "trashd-mount@srv-data")
    assert status(bare)["units"][-1]["Id"] == "trashd-mount@srv-data.service"
    bare.trashd("service", "uninstall", code=8)
    assert bare.state("trashd-mount@srv-data") == "active"
    bare.systemctl("stop", "trashd-mount@srv-data")
    bare.trashd("service", "uninstall")


def test_a_machine_goes_off_though_mounts_are_in_use() -> None:
    with booted_with_trashd("/srv/line /mnt/line fuse.trashd defaults 0 0\n") as system:
        system.path("srv/itself").mkdir()
        system.systemctl("start", "trashd-mount@srv-itself")
        for path in ("/mnt/line", "/srv/itself"):
            system.run("systemd-run", f"--working-directory={path}", "sleep", "1000")
        system.power_off()
