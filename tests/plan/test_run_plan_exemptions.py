"""What rules leave alone as systemd-tmpfiles and tmpreaper do, and access times that are not kept."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.cli.plan import refused_rules
from fusefs.core.errors import BadConfig, Refused
from fusefs.core.plan_rules import PlanContext, PurgeListed, RuleDone, RuleNotDone, RuleOutcome, read_plan
from fusefs.core.results import Spared
from fusefs.core.toml_reader import Source
from fusefs.linux.kernel import RESTORED_XATTRS
from tests.plan.test_run_plan import ACTIONS, ALICE, DAY_NS, NOW_NS, OLD, carried, files, put, swept
from tests.support.foreground_mount import trashd_mount
from tests.support.make_trees import snapshot
from tests.support.other_users import run_as
from tests.support.real_filesystems import bind_mount, tmpfs_volume
from tests.support.store_verbs import entries, restore, swap
from tests.support.trashd_command import TRASHD, trashd

pytestmark = pytest.mark.needs("root")


@pytest.fixture
def volume() -> Iterator[Path]:
    with tmpfs_volume() as path:
        yield path


@contextmanager
def listening(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> Iterator[None]:
    """A process listens on it, and it is old. It was bound by a relative path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = os.getcwd()
    with socket.socket(socket.AF_UNIX, kind) as bound:
        os.chdir(path.parent)
        try:
            bound.bind(path.name)
        finally:
            os.chdir(before)
        if kind is not socket.SOCK_DGRAM:
            bound.listen()
        age(path)
        yield
        bound.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody called it, or sent it anything
            bound.recv(1) if kind is socket.SOCK_DGRAM else bound.accept()


def age(path: Path) -> None:
    """Make it sixty days old."""
    os.utime(path, ns=(NOW_NS - 60 * DAY_NS,) * 2, follow_symlinks=False)


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET])
@pytest.mark.parametrize("action", ACTIONS)
def test_a_live_socket_stays_and_a_dead_one_goes(volume: Path, action: str, kind: socket.SocketKind) -> None:
    (volume / "away").mkdir()
    with listening(volume / "s/dead", kind):
        pass
    with listening(volume / "s/tmux/default", kind):
        told = swept(volume / "s", f"{OLD}\n{action.format(volume)}")
    assert told.spared == (Spared(b"tmux/default", "a live socket"),)
    assert files(volume / "s") == {"tmux/default"}


def test_so_does_the_unit_that_it_is_in(volume: Path) -> None:
    put(volume / "s/job/file", 60)
    with listening(volume / "s/job/agent"):
        told = swept(volume / "s", f'{OLD}\nunit = "top"')
        assert told.spared == (Spared(b"job", "a live socket"),)
    assert swept(volume / "s", f'{OLD}\nunit = "top"').sums.n_done == 1


def test_a_socket_that_is_live_through_a_mount_stays(volume: Path) -> None:
    (volume / "source/s").mkdir(parents=True)
    with trashd_mount(volume / "source") as mounted, listening(mounted.path / "s/agent"):
        assert swept(volume / "source/s", OLD).spared == (Spared(b"agent", "a live socket"),)


def test_what_has_the_sticky_bit_is_a_device_or_the_filesystems_own_stays(volume: Path) -> None:
    put(volume / "s/marked", 60).chmod(0o1644)
    os.mknod(volume / "s/pipe", stat.S_IFIFO | 0o1666)
    (volume / "s/pipe").chmod(0o1666)
    os.mknod(volume / "s/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    for name in ("pipe", "null"):
        age(volume / "s" / name)
    put(volume / "s/aquota.user", 60)
    put(volume / "s/lost+found/#123", 60)
    os.chown(put(volume / "s/theirs/aquota.user", 60), 12001, 12001)
    told = swept(volume / "s", f'{OLD}\naction = "delete"')
    assert set(told.spared) == {
        Spared(b"marked", "its sticky bit is set"), Spared(b"pipe", "its sticky bit is set"),
        Spared(b"null", "a device"), Spared(b"aquota.user", "the filesystem's own"),
        Spared(b"lost+found", "the filesystem's own"),
    }  # fmt: skip
    assert files(volume / "s") == {"marked", "pipe", "null", "aquota.user", "lost+found/#123"}


def test_a_rule_for_devices_is_a_mistake() -> None:
    with pytest.raises(BadConfig):
        carried("/nowhere", f'{OLD}\ntype = "b"')


ATIME = f'{OLD}\nby = ["atime", "mtime"]'


def refused(where: Path, text: str = ATIME) -> str:
    """Why a rule does nothing there, though it is told to."""
    (told,) = carried(where, text)
    assert isinstance(told, RuleNotDone), told
    assert isinstance(told.error, Refused)
    return told.why


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("noatime", ATIME),
        ("noatime", f'{ATIME}\nunit = "top"'),
        ("nodiratime", f'{ATIME}\nempty = true\ntype = "d"'),
        ("relatime", 'older = "12h"\nby = "atime"'),
    ],
)
def test_a_rule_by_access_times_that_are_not_kept_is_refused(option: str, text: str) -> None:
    with tmpfs_volume(options=[option]) as there:
        put(there / "s/old", 60)
        assert option in refused(there / "s", text)
        assert files(there / "s") == {"old"}
        (told,) = carried(there / "s", f"{text}\ntrusts_atime = true")
        assert isinstance(told, RuleDone)


def test_so_it_is_if_another_mount_of_the_disk_does_not_keep_them(volume: Path) -> None:
    put(volume / "s/old", 60)
    with tmpfs_volume() as other:
        (other / "place").mkdir()
        with bind_mount(volume, other / "place", ["noatime"]):
            assert "noatime" in refused(volume / "s")
    assert swept(volume / "s", ATIME).sums.n_done == 1


def test_so_it_is_if_files_are_read_through_a_mount_that_keeps_pages(volume: Path) -> None:
    put(volume / "source/s/old", 60)
    with trashd_mount(volume / "source") as mounted:
        for where in (volume / "source/s", mounted.path / "s"):
            assert "keeps their pages" in refused(where)
        assert swept(volume / "source/s", f"{ATIME}\ntrusts_atime = true").sums.n_done == 1


def test_a_sweep_by_access_times_is_refused_alike() -> None:
    with tmpfs_volume(options=["noatime"]) as there:
        put(there / "s/old", 60)
        by_atime = ("sweep", there / "s", "--by", "atime", "--older", "30d")
        done = trashd(*by_atime)
        assert (done.code, done.out) == (Refused.exit_code, "")
        assert "is mounted with noatime" in done.err
        assert files(there / "s") == {"old"}
        assert trashd(*by_atime, "--trust-atime").code == 0
        assert files(there / "s") == set()


def after_a_month(directory: Path, text: str = OLD) -> RuleOutcome:
    """What a rule does a month from now."""
    (told,) = carried(directory, text, now_ns=time.time_ns() + 31 * DAY_NS)
    return told


RESTORED = "restored less than the rule's age ago"


def test_what_was_restored_is_left_alone_for_the_rules_age(volume: Path) -> None:
    put(volume / "s/old", 60)
    os.symlink("old", volume / "s/link")
    age(volume / "s/link")
    assert swept(volume / "s", OLD).sums.n_done == 2
    (entry,) = entries(volume)
    assert restore(volume, entry.id).is_spared
    before = snapshot(volume / "s")
    told = swept(volume / "s", OLD)
    assert (told.sums.n_done, set(told.spared)) == (0, {Spared(b"old", RESTORED), Spared(b"link", RESTORED)})
    assert snapshot(volume / "s") == before
    later = after_a_month(volume / "s")
    assert isinstance(later, RuleDone)
    assert later.swept.sums.n_done == 2


@pytest.mark.parametrize("unit", ["", 'unit = "top"'])
def test_so_is_all_that_a_restored_directory_holds(volume: Path, unit: str) -> None:
    put(volume / "s/job/deep/old", 60)
    put(volume / "s/other/old", 60)
    restore(volume, swap(volume / "s/job").id)
    assert swept(volume / "s", f"{OLD}\n{unit}").sums.n_done == 1
    assert files(volume / "s") == {"job/deep/old"}
    later = after_a_month(volume / "s", f"{OLD}\n{unit}")
    assert isinstance(later, RuleDone)
    assert later.swept.sums.n_done == 1


def test_a_restored_unit_is_on_the_list_before_it_goes(volume: Path) -> None:
    put(volume / "s/job/old", 60)
    restore(volume, swap(volume / "s/job").id)
    text = f'{OLD}\nunit = "top"\npurgelist = {{ directory = "{volume}/lists", ahead = "7d" }}'
    told = carried(volume / "s", text, now_ns=time.time_ns() + 25 * DAY_NS)
    assert files(volume / "s") == {"job/old"}
    assert isinstance(told[-1], PurgeListed)
    assert told[-1].n_entries == 1


def test_who_may_write_in_a_directory_cannot_mark_it_for_its_owner(volume: Path) -> None:
    put(volume / "s/team/old", 60)
    (volume / "s/team").chmod(0o775)
    os.setxattr(volume / "s/team", RESTORED_XATTRS[1], b"%d" % time.time_ns())
    assert swept(volume / "s", OLD).sums.n_done == 1


def test_restore_says_whether_rules_leave_it_alone(volume: Path) -> None:
    home = volume / "home"
    put(home / ".config/trashd/plan.d/own.toml", 0)
    for name, mode in (("writable", 0o644), ("fixed", 0o444)):
        put(home / "data" / name, 60).chmod(mode)
    for path in (home, *home.rglob("*")):
        os.chown(path, ALICE, ALICE)
    told = {"HOME": str(home), "PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(home)}

    def alice(*words: str) -> str:
        done = run_as(ALICE, [TRASHD, *words], env=told)
        assert done.returncode == 0, done
        return os.fsdecode(done.stdout + done.stderr)

    said = {}
    for name in ("writable", "fixed"):
        alice("rm", f"{home}/data/{name}")
        said[name] = alice("restore", f"{home}/data/{name}")
    assert "rules of trashd plan leave it alone for as long as their age" in said["writable"]
    assert "rules of trashd plan may take it again" in said["fixed"]


def test_doctor_tells_of_a_rule_that_is_refused() -> None:
    with tmpfs_volume(options=["noatime"]) as there:
        rules = f'[[rule]]\ndirectory = "{there}"\n{ATIME}\n'
        read = read_plan([Source("plan", rules)], PlanContext(NOW_NS, time.mktime, int, int))
        (problem,) = refused_rules(read, NOW_NS)
        assert "is mounted with noatime" in problem.what
