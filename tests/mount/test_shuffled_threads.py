"""Threads that change all the time: nothing of what the daemon knows comes apart, whichever runs when.

The daemon's switch interval is a microsecond, and clients on all cores do all sorts of things at random in the same few
directories, some as another user.

TRASHD_TEST_STEPS  how many each of them does (make soak-mount: very many)
"""

import errno
import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from fusefs.linux.fd import Fd
from fusefs.linux.syscalls import AT_FDCWD, RENAME_EXCHANGE, renameat2
from tests.support.background_processes import clients, is_ended
from tests.support.fake_dev_fuse import SWITCH_S, daemon_command
from tests.support.foreground_mount import Mounted, trashd_mount, until
from tests.support.real_filesystems import tmpfs_volume
from tests.support.transports import cases

pytestmark = pytest.mark.needs("root", "fuse")

T = TypeVar("T")

N_STEPS = int(os.environ.get("TRASHD_TEST_STEPS", "1500"))
LIMIT_S = 60 + N_STEPS / 20
ANOTHER = 4711
USERS = (0, 0, 0, ANOTHER, ANOTHER, ANOTHER)
DIRECTORIES = ("root's", "another's", "root's/inner", "another's/inner")
NAMES = ("a", "b", "c", "d", "e")
EXPECTED = {
    errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.EACCES, errno.EPERM,
}  # fmt: skip
"""What natively comes of it, too, when another one was quicker, or it is another user's."""
HOW = {
    "native core": ("uring=on",),
    "shared": ("uring=on", "coherence=shared"),
    "over /dev/fuse": (),
    "slow": ("backing=slow",),
    "slow, shared, tiny cache": ("backing=slow", "coherence=shared", "timeout=3600", "cache_size=8K"),
}


@pytest.fixture(params=cases(HOW))
def mounted(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    with tmpfs_volume() as volume:
        source = volume / "source"
        for name in ("root's", "another's"):
            (source / name / "inner").mkdir(parents=True)
            for path in (source / name, source / name / "inner"):
                os.chown(path, *[ANOTHER if name == "another's" else 0] * 2)
                path.chmod(0o777)
        options = [*([] if "shared" in request.param else ["coherence=exclusive"]), *HOW[request.param]]
        command = daemon_command(switch_s=SWITCH_S)
        with trashd_mount(source, options=options, limit_s=LIMIT_S, command=command) as mounted:
            yield mounted


class Chance(NamedTuple):
    """What a client has drawn for its next step."""

    path: Path
    other: Path
    dice: random.Random

    def one_of(self, *choices: T) -> T:
        return self.dice.choice(choices)


def write(drawn: Chance) -> None:
    flags = drawn.one_of(os.O_WRONLY, os.O_RDWR) | drawn.one_of(0, os.O_CREAT, os.O_CREAT | os.O_EXCL)
    with Fd(os.open(drawn.path, flags | drawn.one_of(0, os.O_APPEND, os.O_TRUNC), 0o644)) as fd:
        os.write(fd, b"x" * drawn.one_of(1, 10_000))
        os.fstat(fd)


def read(drawn: Chance) -> None:
    assert not drawn.path.read_bytes().strip(b"x\0")


def list_it(drawn: Chance) -> None:
    with os.scandir(drawn.path.parent) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                entry.stat(follow_symlinks=False)


def look(drawn: Chance) -> None:
    os.lstat(drawn.path)
    os.listxattr(drawn.path, follow_symlinks=False)
    drawn.other.exists()


def exchange(one: Path, other: Path) -> None:
    renameat2(AT_FDCWD, bytes(one), AT_FDCWD, bytes(other), RENAME_EXCHANGE)


STEPS: dict[Callable[[Chance], object], int] = {
    write: 6,
    read: 3,
    look: 4,
    list_it: 2,
    lambda drawn: drawn.path.rename(drawn.other): 4,
    lambda drawn: exchange(drawn.path, drawn.other): 1,
    lambda drawn: drawn.path.unlink(): 3,
    lambda drawn: drawn.path.mkdir(): 2,
    lambda drawn: drawn.path.rmdir(): 2,
    lambda drawn: os.link(drawn.path, drawn.other): 1,
    lambda drawn: drawn.path.symlink_to("nothing"): 1,
    lambda drawn: drawn.path.chmod(drawn.one_of(0o600, 0o644, 0o755, 0o666)): 2,
    lambda drawn: os.utime(drawn.path, drawn.one_of(None, (1, 2))): 2,
    lambda drawn: os.truncate(drawn.path, drawn.one_of(0, 5, 20_000)): 1,
    lambda drawn: os.setxattr(drawn.path, "user.x", drawn.one_of(b"1", b"2"), follow_symlinks=False): 1,
}


def works(top: Path, number: int) -> None:
    """Raises  OSError that none of the steps may fail with"""
    uid, dice = USERS[number], random.Random(number)
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    steps, weights = tuple(STEPS), tuple(STEPS.values())
    for _ in range(N_STEPS):
        path, other = (top / dice.choice(DIRECTORIES) / dice.choice(NAMES) for _ in range(2))
        (step,) = dice.choices(steps, weights)
        try:
            step(Chance(path, other, dice))
        except OSError as error:
            if error.errno not in EXPECTED:
                raise


def tree(top: Path) -> dict[str, tuple[object, ...]]:
    """All that is known of each path, but when it was read last."""
    found: dict[str, tuple[object, ...]] = {}
    for directory, names, files in (step for name in DIRECTORIES[:2] for step in os.walk(top / name)):
        for path in (Path(directory, name) for name in (*names, *files)):
            st = os.lstat(path)
            content: object = None
            if stat.S_ISREG(st.st_mode):
                content = path.read_bytes()
            elif stat.S_ISLNK(st.st_mode):
                content = os.readlink(path)
            size = 0 if stat.S_ISDIR(st.st_mode) else st.st_size
            xattrs = "user.x" in os.listxattr(path, follow_symlinks=False) and os.getxattr(path, "user.x")
            found[str(path.relative_to(top))] = (
                stat.filemode(st.st_mode), st.st_ino, st.st_nlink, st.st_uid, st.st_gid, size,
                st.st_mtime_ns, st.st_ctime_ns, content, xattrs,
            )  # fmt: skip
    return found


def unlike(mounted: Mounted) -> list[object]:
    seen, behind = tree(mounted.path), tree(mounted.backing)
    return [(path, seen.get(path), behind.get(path)) for path in seen | behind if seen.get(path) != behind.get(path)]


@contextmanager
def at_work(mounted: Mounted) -> Iterator[list[int]]:
    with clients([partial(works, mounted.path, number) for number in range(len(USERS))]) as pids:
        yield pids


def test_threads_that_change_all_the_time_leave_the_tree_as_it_is_behind(mounted: Mounted) -> None:
    (mounted.path / "root's").lstat()
    mounted.forget_all()
    before = mounted.n_nodes()
    with at_work(mounted) as pids:
        assert until(lambda: all(map(is_ended, pids)), LIMIT_S)
        assert {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids} == {0}
    if mounted.fuse.n_waiting():
        assert until(lambda: not mounted.fuse.n_waiting())
    assert until(lambda: not unlike(mounted), 5), unlike(mounted)
    mounted.forget_all()
    assert not unlike(mounted)
    told = mounted.log.read_text().splitlines()
    assert not [line for line in told if not ("INFO" in line or "LimitNOFILE" in line)], told

    def is_forgotten() -> bool:
        mounted.forget_all()
        (mounted.path / "missing").exists()  # gauges are kept as long as somebody asks for something
        return mounted.n_nodes() <= before

    assert until(is_forgotten), (mounted.n_nodes(), before)
