"""After any change through the mount nothing that is known of anything is stale, whichever client made it or looks.

First everything is looked at, so that all caches have it: attributes, listings, targets, extended attributes, names
that are not there, of what is changed, its other names, its directory and the directory where it goes. Then the change
is made, and everything must be what it is on the backing filesystem. No timeout sees to that: it is an hour.
"""

import errno
import itertools
import mmap
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.core.metadata_cache import NodeId
from fusefs.linux.syscalls import AT_FDCWD, RENAME_EXCHANGE, RENAME_NOREPLACE, renameat2
from fusefs.mount.places.counters import Counters
from fusefs.mount.tables.daemon_cache import DaemonCache
from fusefs.mount.tables.tables_lock import TablesLock
from tests.support.acls import ACCESS, DEFAULT, GROUP_OBJ, MASK, NOBODY, OTHER, USER, USER_OBJ, acl
from tests.support.covering_sets import Axes
from tests.support.fake_dev_fuse import vfs_at
from tests.support.foreground_mount import Mounted
from tests.support.mount_and_backing import Sides, sides_on, stat_fields
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount

pytestmark = pytest.mark.needs("root", "fuse", "loop")

STRANGER = 4712
OLD_NS = 10**18


@dataclass(frozen=True)
class Setup(Axes):
    """Of a mount: its backing filesystem, its coherence, whether operations go to threads, and the daemon's cache."""

    fs_type: str
    coherence: str
    backing: str = "local"
    cache_size: str = "64M"

    def options(self) -> list[str]:
        own = [f"coherence={self.coherence}", f"backing={self.backing}", f"cache_size={self.cache_size}"]
        return [*own, "timeout=3600"] if self.coherence == "shared" else own


SETUPS = {
    "exclusive": Setup("tmpfs", "exclusive"),
    "exclusive, on a disk": Setup("ext4", "exclusive"),
    "shared": Setup("tmpfs", "shared"),
    "shared, on a disk": Setup("ext4", "shared"),
    "in threads": Setup("ext4", "exclusive", "slow"),
    "in threads, shared, tiny": Setup("tmpfs", "shared", "slow", "4K"),
    "in threads, by names": Setup("overlay", "exclusive", "slow"),
}
PATHS = (
    ".", "from", "from/file", "from/link", "from/new", "from/inner", "from/inner/child", "from/inner/new", "from/suid",
    "to", "to/hard", "to/file", "to/empty", "to/empty/child", "to/inner", "to/inner/kid", "to/inner/child", "to/new",
    "to/new/child",
)  # fmt: skip
ACL = acl((USER_OBJ, 7, NOBODY), (USER, 5, STRANGER), (GROUP_OBJ, 4, NOBODY), (MASK, 5, NOBODY), (OTHER, 0, NOBODY))
_NUMBERS = itertools.count()


class Scene(NamedTuple):
    """What there is to change, and what clients have open of it."""

    mounted: Mounted
    sides: Sides
    held: Mapping[str, int]

    def path(self, name: str) -> Path:
        """In the mount."""
        return self.sides.mount_path / name


Change = Callable[[Scene], object]


@pytest.fixture(scope="module", params=SETUPS.values(), ids=list(SETUPS))
def mount(request: pytest.FixtureRequest) -> Iterator[tuple[Mounted, Sides]]:
    setup: Setup = request.param
    with sides_on(setup.fs_type, setup.options()) as both:
        yield both


def make(top: Path) -> None:
    """A file with two names, and directories to carry it between; read last long ago."""
    for name in ("from/inner", "to/empty", "to/inner"):
        (top / name).mkdir(parents=True)
    for name in ("from/file", "from/inner/child", "to/inner/kid", "to/file", "from/suid"):
        (top / name).write_bytes(b"content of " + name.encode())
    (top / "from/suid").chmod(0o6777)
    (top / "to").chmod(0o777)
    os.link(top / "from/file", top / "to/hard")
    (top / "from/link").symlink_to("file")
    os.setxattr(top / "from/file", "user.first", b"1")
    for path in (top, *sorted(top.rglob("*"))):
        os.utime(path, ns=(OLD_NS, OLD_NS), follow_symlinks=False)


@contextmanager
def scene_in(mounted: Mounted, both: Sides) -> Iterator[Scene]:
    below = both.below(f"scene{next(_NUMBERS)}")
    below.mount_path.mkdir(mode=0o777)
    make(below.mount_path)
    with ExitStack() as stack:
        held = {}
        for name, flags in (
            ("from/file", os.O_RDWR),
            ("to/file", os.O_RDONLY),
            ("from", os.O_RDONLY | os.O_DIRECTORY),
            ("from/inner", os.O_PATH),
            ("from/link", os.O_PATH | os.O_NOFOLLOW),
        ):
            held[name] = os.open(below.mount_path / name, flags)
            stack.callback(os.close, held[name])
        yield Scene(mounted, below, held)


# What changes something.


def by_hand(act: Callable[[Path], object]) -> Change:
    return lambda s: act(s.sides.mount_path)


def rename(old: str, new: str, flags: int = 0) -> Change:
    return lambda s: renameat2(AT_FDCWD, bytes(s.path(old)), AT_FDCWD, bytes(s.path(new)), flags)


def refused(change: Change, number: int) -> Change:
    def act(s: Scene) -> None:
        with pytest.raises(OSError, match=r".") as caught:
            change(s)
        assert caught.value.errno == number

    return act


def write_mapped(s: Scene) -> None:
    with mmap.mmap(s.held["from/file"], 0) as mapped:
        mapped[:4] = b"MAPS"
        mapped.flush()


def cut_at_open(s: Scene) -> None:
    os.close(os.open(s.path("to/hard"), os.O_WRONLY | os.O_TRUNC))


def read_again(s: Scene, name: str) -> None:
    """Content long not read: now it is."""
    os.utime(s.path(name), ns=(OLD_NS, OLD_NS))
    s.path(name).read_bytes()


def list_again(s: Scene) -> None:
    os.utime(s.path("from"), ns=(OLD_NS, OLD_NS))
    s.path("from/new").touch()
    os.listdir(s.path("from"))


def follow_again(s: Scene) -> None:
    os.utime(s.path("from/link"), ns=(OLD_NS, OLD_NS), follow_symlinks=False)
    s.path("from/link").read_bytes()


def give_acl(s: Scene) -> None:
    os.setxattr(s.path("to/hard"), ACCESS, ACL)


def inherit_acl(s: Scene) -> None:
    os.setxattr(s.path("from/inner"), DEFAULT, ACL)
    s.path("from/inner/new").write_bytes(b"inherits")


def take_acl(s: Scene) -> None:
    os.setxattr(s.path("from/file"), ACCESS, ACL)
    s.sides.warm(PATHS)
    os.removexattr(s.path("to/hard"), ACCESS)


def take_xattr(s: Scene) -> None:
    os.removexattr(s.path("to/hard"), "user.first")


def write_as_stranger(s: Scene) -> None:
    """Who is not the owner takes the set-user-ID bit away by writing."""
    as_user(STRANGER, lambda: s.path("from/suid").write_bytes(b"his") and None)


def create_as_a_stranger(s: Scene) -> None:
    as_user(STRANGER, lambda: s.path("to/new").write_bytes(b"his") and None)


def create_through_another_mount(s: Scene) -> None:
    with bind_mount(s.path("from"), s.path("to/empty")):
        s.path("to/empty/new").write_bytes(b"")


def rename_the_directory(s: Scene) -> None:
    rename("to/inner", "to/new")(s)
    rename("from/inner", "to/inner")(s)


def work_elsewhere(s: Scene) -> None:
    """Another program."""
    script = "echo more >> from/file; mkdir from/new; mv to/file from/new/; rm to/hard; ln -sf elsewhere from/link"
    subprocess.run(["bash", "-euc", script], cwd=s.sides.mount_path, check=True)


def lend_and_write(s: Scene) -> None:
    """Who opened it before a rename, and writes after."""
    rename("from/file", "to/new")(s)
    os.pwrite(s.held["from/file"], b"x" * 9000, 100)


CHANGES: dict[str, Change] = {
    # Names that come.
    "create": by_hand(lambda top: (top / "from/new").write_bytes(b"new")),
    "create in an open directory": lambda s: os.close(os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=s.held["from"])),
    "create exclusively": by_hand(lambda top: os.close(os.open(top / "from/new", os.O_CREAT | os.O_EXCL))),
    "create as a stranger": create_as_a_stranger,
    "create through another mount": create_through_another_mount,
    "create where something is": refused(
        by_hand(lambda top: os.open(top / "to/file", os.O_CREAT | os.O_EXCL)), errno.EEXIST
    ),
    "mkdir": by_hand(lambda top: (top / "to/new").mkdir()),
    "mknod": by_hand(lambda top: os.mkfifo(top / "from/new")),
    "symlink": by_hand(lambda top: (top / "from/new").symlink_to("nowhere")),
    "link": by_hand(lambda top: os.link(top / "from/file", top / "to/new")),
    "link within": by_hand(lambda top: os.link(top / "from/file", top / "from/new")),
    "link to a symlink": by_hand(lambda top: os.link(top / "from/link", top / "to/new", follow_symlinks=False)),
    # Names that go.
    "unlink one of two names": by_hand(lambda top: (top / "from/file").unlink()),
    "unlink the other name": by_hand(lambda top: (top / "to/hard").unlink()),
    "unlink what is open": by_hand(lambda top: (top / "to/file").unlink()),
    "unlink what is not open": by_hand(lambda top: (top / "from/inner/child").unlink()),
    "unlink a symlink": by_hand(lambda top: (top / "from/link").unlink()),
    "rmdir": by_hand(lambda top: (top / "to/empty").rmdir()),
    "rmdir of a full directory": refused(by_hand(lambda top: (top / "from/inner").rmdir()), errno.ENOTEMPTY),
    # Names that move.
    "rename": rename("from/file", "from/new"),
    "rename to another directory": rename("from/file", "to/new"),
    "rename over a file": rename("from/file", "to/file"),
    "rename over a link": rename("to/file", "from/link"),
    "rename to the other name": rename("from/file", "to/hard"),
    "rename over one of two names": rename("to/file", "to/hard"),
    "rename a directory": rename("from/inner", "to/new"),
    "rename of a directory that has it": rename_the_directory,
    "rename over a directory": rename("from/inner", "to/empty"),
    "rename a symlink": rename("from/link", "to/new"),
    "rename onto something": refused(rename("from/file", "to/file", RENAME_NOREPLACE), errno.EEXIST),
    "exchange files": rename("from/file", "to/file", RENAME_EXCHANGE),
    "exchange directories": rename("from/inner", "to/inner", RENAME_EXCHANGE),
    "exchange a file and a directory": rename("from/file", "to/inner", RENAME_EXCHANGE),
    "exchange parents": rename("from", "to", RENAME_EXCHANGE),
    # Content.
    "write": by_hand(lambda top: (top / "to/hard").write_bytes(b"longer content than there was before")),
    "write in the middle": lambda s: os.pwrite(s.held["from/file"], b"X", 3),
    "write beyond the end": lambda s: os.pwrite(s.held["from/file"], b"X", 100_000),
    "write mapped": write_mapped,
    "write as a stranger": write_as_stranger,
    "write by who opened it before a rename": lend_and_write,
    "cut": by_hand(lambda top: os.truncate(top / "to/hard", 3)),
    "cut at open": cut_at_open,
    "grow what is open": lambda s: os.ftruncate(s.held["from/file"], 123_456),
    # Attributes.
    "chmod": by_hand(lambda top: (top / "to/hard").chmod(0o604)),
    "chmod of what is open": lambda s: os.fchmod(s.held["from/file"], 0o640),
    "chmod of a directory": by_hand(lambda top: (top / "from").chmod(0o1711)),
    "chown": by_hand(lambda top: os.chown(top / "to/hard", 12, 34)),
    "chown of a symlink": by_hand(lambda top: os.lchown(top / "from/link", 12, 34)),
    "utime": by_hand(lambda top: os.utime(top / "to/hard", ns=(10**18 + 1, 10**18 + 2))),
    "utime now": by_hand(lambda top: os.utime(top / "from/inner")),
    "utime of a symlink": by_hand(lambda top: os.utime(top / "from/link", ns=(1, 2), follow_symlinks=False)),
    "set an xattr": by_hand(lambda top: os.setxattr(top / "to/hard", "user.second", b"2")),
    "change an xattr": by_hand(lambda top: os.setxattr(top / "to/hard", "user.first", b"changed")),
    "remove an xattr": take_xattr,
    "xattr of a directory": by_hand(lambda top: os.setxattr(top / "from", "user.first", b"1")),
    "give an ACL": give_acl,
    "take an ACL away": take_acl,
    "inherit an ACL": inherit_acl,
    # Looking, which the time of access tells of.
    "read": lambda s: read_again(s, "to/hard"),
    "read what is open": lambda s: read_again(s, "from/file"),
    "list": list_again,
    "follow a symlink": follow_again,
    # Several at a time.
    "work in another program": work_elsewhere,
}


def handles_are_alike(s: Scene, behind: Mapping[str, int]) -> None:
    """What is open tells what it is now, with or without a name; of a directory without one nothing is left to ask."""
    for name, fd in s.held.items():
        right = os.fstat(behind[name])
        if right.st_nlink or name == "to/file":
            assert stat_fields(os.fstat(fd)) == stat_fields(right), name


@pytest.mark.parametrize("is_forgotten", [False, True], ids=["known to the kernel", "forgotten by the kernel"])
@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_stale_after_a_change(mount: tuple[Mounted, Sides], change: str, is_forgotten: bool) -> None:
    """What the kernel has forgotten, the daemon remembers: before the change, and after it once more."""
    mounted, both = mount
    with scene_in(mounted, both) as scene, ExitStack() as stack:
        behind = {name: os.open(scene.sides.behind / name, os.O_PATH | os.O_NOFOLLOW) for name in scene.held}
        for fd in behind.values():
            stack.callback(os.close, fd)
        scene.sides.warm(PATHS)
        if is_forgotten:
            mounted.forget_all()
        CHANGES[change](scene)
        scene.sides.assert_alike(PATHS)
        handles_are_alike(scene, behind)
        mounted.forget_all()
        scene.sides.assert_alike(PATHS)
        handles_are_alike(scene, behind)


def test_changes_upon_changes_leave_nothing_stale(mount: tuple[Mounted, Sides]) -> None:
    """What one leaves, the next finds; those that need what an earlier one took away are refused, as natively."""
    mounted, both = mount
    with scene_in(mounted, both) as scene:
        for i, change in enumerate(CHANGES.values()):
            scene.sides.warm(PATHS)
            with suppress(OSError, ValueError, AssertionError, subprocess.CalledProcessError, pytest.fail.Exception):
                change(scene)
            if i % 3 == 0:
                mounted.forget_all()
            scene.sides.assert_alike(PATHS)


def test_what_a_killed_client_wrote_is_known(mount: tuple[Mounted, Sides]) -> None:
    mounted, both = mount
    with scene_in(mounted, both) as scene:
        scene.sides.warm(PATHS)
        script = "exec 3>>from/file; while :; do echo line >&3; done"
        with subprocess.Popen(["bash", "-c", script], cwd=scene.sides.mount_path) as client:
            before = scene.path("from/file").stat().st_size
            while scene.path("to/hard").stat().st_size == before:
                pass
            client.send_signal(signal.SIGKILL)
        scene.sides.assert_alike(PATHS)


def test_a_look_believes_no_name_that_was_changed_meanwhile(tmp_path: Path) -> None:
    with vfs_at(tmp_path, is_slow=True) as vfs:
        cache = DaemonCache(TablesLock(is_slow=True), vfs.nodes, Counters.in_memory(), 1 << 20, 60.0)
        look = cache.begin_fill()
        root = vfs.nodes.get(NodeId(1))
        assert root is not None
        with cache.changing(names=[(root, b"changed")]):
            pass
        assert look.valid_s(None, named=(root, b"changed")) == 0
        assert look.valid_s(None, named=(root, b"other")) > 0
