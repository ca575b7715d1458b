"""Mounts by systemd: lines of fstab, automounts, and trashd-mount@.service."""

import errno
import os
import signal
import stat
from pathlib import Path

import pytest

from tests.support.booted_systemd import System
from tests.systemd.machine import drop_in, hang

pytestmark = pytest.mark.needs("systemd")

FSTAB = """
/srv/self /srv/self fuse.trashd noauto 0 0
/srv/line /mnt/line fuse.trashd noauto,coherence=shared 0 0
/srv/auto /mnt/auto fuse.trashd noauto,x-systemd.automount,x-systemd.idle-timeout=1s 0 0
/srv/dead /mnt/dead fuse.trashd noauto 0 0
"""


def fs_type(system: System, path: str) -> str:
    """What is mounted on a path, seen by all; no daemon is asked."""
    lines = [line.split(" - ") for line in system.proc(1, "mountinfo").splitlines()]
    found = [after.split()[0] for before, after in lines if before.split()[4] == path]
    return found[-1] if found else ""


def served(system: System, name: str) -> Path:
    """A new directory with a file in it, and its mount service started."""
    path = system.path(f"srv/{name}")
    path.mkdir()
    (path / "file").write_text("content")
    system.systemctl("start", f"trashd-mount@srv-{name}")
    return path


def test_a_line_of_fstab_is_a_unit(system: System) -> None:
    system.path("srv/line/file").write_text("content")
    system.systemctl("start", "mnt-line.mount")
    assert fs_type(system, "/mnt/line") == "fuse.trashd"
    assert system.path("mnt/line/file").read_text() == "content"
    system.systemctl("stop", "mnt-line.mount")
    assert fs_type(system, "/mnt/line") == ""
    assert "mnt-line.mount" not in system.systemctl("list-units", "--failed")


def test_an_automount_comes_at_the_first_look_and_goes_when_idle(system: System) -> None:
    system.path("srv/auto/file").write_text("content")
    assert fs_type(system, "/mnt/auto") == "autofs"
    looks = "cd /mnt/auto && cat file && grep --count ' /mnt/auto .* - fuse.trashd ' /proc/self/mountinfo"
    assert system.run("sh", "-c", looks).stdout == "content1\n"  # who is in there keeps it there
    system.wait_for(lambda: fs_type(system, "/mnt/auto") == "autofs", "the idle mount is taken away")


def test_the_dead_mount_of_a_killed_daemon_can_be_stopped_and_started(system: System) -> None:
    system.path("srv/dead/file").write_text("content")
    system.systemctl("start", "mnt-dead.mount")
    system.run("pkill", "-KILL", "--full", "mount.fuse.trashd /srv/dead")
    assert system.run("cat", "/mnt/dead/file", code=None).returncode != 0
    system.systemctl("restart", "mnt-dead.mount")
    assert system.path("mnt/dead/file").read_text() == "content"


def test_the_service_serves_a_directory_over_itself_for_all(system: System) -> None:
    path = served(system, "itself")
    assert fs_type(system, "/srv/itself") == "fuse.trashd"
    assert (path / "file").read_text() == "content"
    assert system.state("trashd-mount@srv-itself") == "active"


def test_a_swap_reaches_who_uses_the_service(system: System) -> None:
    path = served(system, "swapped")
    (path / "victim").mkdir()
    (path / "victim/file").write_text("content")
    system.trashd("swap", "/srv/swapped/victim")
    assert os.listdir(path / "victim") == []


def test_a_name_is_escaped_as_systemd_does_it(system: System) -> None:
    path = system.path("srv/two words-%é")
    path.mkdir()
    escaped = system.run("systemd-escape", "--path", "--template=trashd-mount@.service", "/srv/two words-%é")
    unit = escaped.stdout.strip()
    system.systemctl("start", unit)
    assert fs_type(system, "/srv/two\\040words-%é") == "fuse.trashd"
    system.systemctl("stop", unit)
    assert fs_type(system, "/srv/two\\040words-%é") == ""


def test_source_and_options_come_from_the_mounts_own_file(system: System) -> None:
    system.path("srv/source").mkdir()
    system.path("srv/source/file").write_text("content")
    system.path("etc/trashd/mounts").mkdir(exist_ok=True)
    system.path("etc/trashd/mounts/srv-target.conf").write_text("SOURCE=/srv/source\nOPTIONS=ro,noexec\n")
    system.path("srv/target").mkdir()
    system.systemctl("start", "trashd-mount@srv-target")
    assert system.path("srv/target/file").read_text() == "content"
    assert system.run("touch", "/srv/target/new", code=None).returncode != 0


def test_the_journal_has_its_words_with_their_priority(system: System) -> None:
    served(system, "logged")
    system.systemctl("stop", "trashd-mount@srv-logged")
    entries = system.journal("_SYSTEMD_UNIT=trashd-mount@srv-logged.service", "SYSLOG_IDENTIFIER=trashd")
    assert (entries[-1]["MESSAGE"], entries[-1]["PRIORITY"]) == ("/srv/logged: stopping", "6")


def test_stop_unmounts(system: System) -> None:
    path = served(system, "stopped")
    system.systemctl("stop", "trashd-mount@srv-stopped")
    assert fs_type(system, "/srv/stopped") == ""
    assert (path / "file").read_text() == "content"
    assert system.show("trashd-mount@srv-stopped", "Result")["Result"] == "success"


def test_an_unmount_by_hand_ends_the_service(system: System) -> None:
    served(system, "byhand")
    system.run("umount", "/srv/byhand")
    system.wait_for(lambda: system.state("trashd-mount@srv-byhand") == "inactive", "the service ends")
    assert system.show("trashd-mount@srv-byhand", "Result")["Result"] == "success"


def test_a_killed_daemon_is_replaced(system: System) -> None:
    path = served(system, "killed")
    pid = system.main_pid("trashd-mount@srv-killed")
    system.kill(pid, signal.SIGKILL)
    system.wait_for(lambda: system.main_pid("trashd-mount@srv-killed") not in (0, pid), "another daemon")
    system.wait_for(lambda: system.state("trashd-mount@srv-killed") == "active", "it serves")
    assert (path / "file").read_text() == "content"


def test_until_then_nobody_sees_the_directory_below(system: System) -> None:
    system.path("srv/below").mkdir()
    system.path("srv/full").mkdir()
    system.path("srv/full/file").write_text("content")
    system.path("etc/trashd/mounts").mkdir(exist_ok=True)
    system.path("etc/trashd/mounts/srv-below.conf").write_text("SOURCE=/srv/full\n")
    drop_in(system, "trashd-mount@srv-below.service", "Restart=no")
    system.systemctl("start", "trashd-mount@srv-below")
    system.kill(system.main_pid("trashd-mount@srv-below"), signal.SIGKILL)
    system.wait_for(lambda: system.state("trashd-mount@srv-below") == "failed", "it has failed")
    with pytest.raises(OSError, match=r".") as refused:
        os.listdir(system.path("srv/below"))
    # Over io_uring the kernel ends the connection after the daemon, and cancels what it is asked until then.
    assert refused.value.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.ECANCELED)
    system.systemctl("start", "trashd-mount@srv-below")
    assert os.listdir(system.path("srv/below")) == ["file"]


def test_a_hung_daemon_is_replaced_which_frees_who_waits(system: System) -> None:
    unit = "trashd-mount@srv-hung.service"
    path = served(system, "hung")
    pid = system.main_pid(unit)
    hang(system, unit)
    with pytest.raises(OSError, match=r".") as freed:
        os.stat(path / "nobody has looked at this")
    assert freed.value.errno in (errno.ECONNABORTED, errno.ECANCELED)  # over io_uring the entry is what is canceled
    system.wait_for(lambda: system.main_pid(unit) not in (0, pid), "another daemon")
    system.wait_for(lambda: system.state(unit) == "active", "it serves")
    assert (path / "file").read_text() == "content"


def test_root_makes_device_nodes_through_it(system: System) -> None:
    path = served(system, "nodes")
    system.run("mknod", "/srv/nodes/null", "c", "1", "3")
    assert stat.S_ISCHR((path / "null").stat().st_mode)


def test_it_can_gain_nothing_and_call_little(system: System) -> None:
    served(system, "hardened")
    status = system.proc(system.main_pid("trashd-mount@srv-hardened"), "status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"
    assert not int(fields["CapBnd"], 16) & (1 << 16 | 1 << 22 | 1 << 25)  # modules, reboot, time


def test_a_line_of_fstab_serves_a_directory_over_itself(system: System) -> None:
    system.path("srv/self/file").write_text("content")
    system.systemctl("start", "srv-self.mount")
    assert fs_type(system, "/srv/self") == "fuse.trashd"
    assert system.path("srv/self/file").read_text() == "content"
    system.systemctl("stop", "srv-self.mount")
    assert fs_type(system, "/srv/self") == ""
