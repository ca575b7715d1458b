"""Many names of one directory looked at, one call each."""

import errno
import os
import select
import socket
import stat
from pathlib import Path

import pytest

from fusefs.linux import syscalls
from fusefs.linux.batched_calls import lstat_all
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from tests.support.fuse_silent import silent_fuse

KERNEL = Kernel()
ODD = ["file", "new\nline", "-dash", "invalid \udcff", "n" * 255]
FIELDS = ["st_mode", "st_ino", "st_dev", "st_uid", "st_gid", "st_size", "st_atime_ns", "st_mtime_ns", "st_ctime_ns"]
LIMIT_MS = 60_000


def opened(directory: Path) -> Fd:
    return Fd(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))


@pytest.fixture
def odd_tree(tmp_path: Path) -> Path:
    for number, name in enumerate(ODD):
        (tmp_path / name).write_bytes(bytes(number * 1000))
        os.utime(tmp_path / name, ns=(number * 10**18 + 7, -number * 10**9 - 9))
        os.chown(tmp_path / name, number, 1000 + number)
    (tmp_path / "directory").mkdir(0o1750)
    (tmp_path / "link").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo")
    os.mknod(tmp_path / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    return tmp_path


@pytest.mark.needs("root")
def test_look_tells_what_lstat_and_statx_do(odd_tree: Path) -> None:
    names = os.listdir(odd_tree)
    with opened(odd_tree) as fd:
        looked, refused = lstat_all(KERNEL, fd, names)
    assert ([one.name for one in looked], refused) == (names, [])
    for one in looked:
        st = os.lstat(odd_tree / one.name)
        assert [getattr(one, field) for field in FIELDS] == [getattr(st, field) for field in FIELDS]
        with Fd(os.open(odd_tree / one.name, os.O_PATH | os.O_NOFOLLOW)) as fd:
            assert one.btime_ns == syscalls.statx(fd).btime_ns


@pytest.mark.needs("root")
def test_name_that_is_not_there_holds_up_no_other(odd_tree: Path) -> None:
    with opened(odd_tree) as fd:
        looked, refused = lstat_all(KERNEL, fd, ["file", "gone", "fifo", "n" * 256])
    assert [one.name for one in looked] == ["file", "fifo"]
    assert refused == [("gone", errno.ENOENT), ("n" * 256, errno.ENAMETOOLONG)]


@pytest.mark.needs("root", "fuse")
@pytest.mark.parametrize("uid", [0, 1000], ids=["root's own", "a user's"])
@pytest.mark.parametrize("kind", [stat.S_IFREG, stat.S_IFDIR], ids=["file", "directory"])
def test_nobody_waits_for_what_is_mounted_on_a_name(tmp_path: Path, kind: int, uid: int) -> None:
    name = "mounted"
    if kind == stat.S_IFDIR:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).touch()
    with silent_fuse(tmp_path / name, uid, root_mode=kind), opened(tmp_path) as fd:
        child = os.fork()
        if not child:
            found = lstat_all(KERNEL, fd, [name])
            os._exit(0 if found == ([], [(name, errno.EXDEV)]) else 1)
        with Fd(os.pidfd_open(child)) as ended:
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            is_over = poll.poll(LIMIT_MS)
    assert is_over
    assert os.waitpid(child, 0)[1] == 0
