"""What a look tells: all that stat does, to the bit, the birth time and the handle; or the errno that stat has."""

import errno
import os
import re
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusefs.core.metadata_cache import Attributes
from fusefs.linux.fd import Fd
from fusefs.linux.statx import OPEN_FLAGS, identify_fd, open_handle, stat_at
from fusefs.linux.syscalls import name_to_handle_at
from tests.support.real_filesystems import tmpfs_volume

pytestmark = pytest.mark.needs("root")

WEIRD = (b"\xff\xfe", b"new\nline", b" ", b"-rf", b"\xc3\xa4", b"n" * 255, b"...", b"\x01")
KINDS = ("file", "directory", "link", "fifo", "socket", "device", "disk")
Look = Callable[[int, bytes], Attributes]


@pytest.fixture
def top() -> Iterator[Path]:
    with tmpfs_volume() as path:
        yield path


@pytest.fixture
def fd(top: Path) -> Iterator[Fd]:
    with Fd(os.open(top, os.O_PATH)) as fd:
        yield fd


def identified(dir_fd: int, name: bytes) -> tuple[Attributes, bytes]:
    with Fd(os.open(name, OPEN_FLAGS, dir_fd=dir_fd)) as fd:
        return identify_fd(fd)


def stat_opened(dir_fd: int, name: bytes) -> Attributes:
    return identified(dir_fd, name)[0]


ways = pytest.mark.parametrize("look", [stat_at, stat_opened])


def make(kind: str, path: Path) -> None:
    """One of each kind."""
    match kind:
        case "file":
            path.write_bytes(b"x" * 12345)
        case "directory":
            path.mkdir()
        case "link":
            path.symlink_to("nowhere")
        case "fifo":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(os.fspath(path))
        case "device":
            os.mknod(path, stat.S_IFCHR, os.makedev(4095, 0xFFFFF))
        case "disk":
            os.mknod(path, stat.S_IFBLK, os.makedev(7, 300))


def fields_of(seen: Attributes) -> tuple[int, ...]:
    """Return the fields that os.stat_result has, too."""
    return seen[:13]


def of_stat(path: bytes | Path) -> tuple[int, ...]:
    st = os.lstat(path)
    return (
        st.st_dev, st.st_ino, st.st_mode, st.st_nlink, st.st_uid, st.st_gid, st.st_rdev, st.st_size, st.st_blocks,
        st.st_blksize, st.st_atime_ns, st.st_mtime_ns, st.st_ctime_ns,
    )  # fmt: skip


@ways
@pytest.mark.parametrize("kind", KINDS)
def test_a_look_tells_what_stat_tells(top: Path, fd: Fd, kind: str, look: Look) -> None:
    make(kind, top / "it")
    os.chown(top / "it", 4_000_000_000, 70_000, follow_symlinks=False)
    assert fields_of(look(fd, b"it")) == of_stat(top / "it")


@ways
@pytest.mark.parametrize("name", WEIRD)
def test_any_bytes_are_a_name(top: Path, fd: Fd, name: bytes, look: Look) -> None:
    path = os.fsencode(top) + b"/" + name
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    assert fields_of(look(fd, name)) == of_stat(path)


@ways
@pytest.mark.parametrize("ns", [-1, -1_500_000_000, -(10**18), 0, 2**33 * 10**9 + 999_999_999])
def test_times_before_1970_and_after_2106_are_times(top: Path, fd: Fd, ns: int, look: Look) -> None:
    (top / "it").touch()
    os.utime(top / "it", ns=(ns, ns + 1))
    seen = look(fd, b"it")
    assert (seen.atime_ns, seen.mtime_ns) == (ns, ns + 1)


@ways
def test_the_birth_time_lies_between_before_and_after(top: Path, fd: Fd, look: Look) -> None:
    (top / "before").touch()
    (top / "it").touch()
    (top / "it").write_text("changed")
    (top / "after").touch()
    assert look(fd, b"before").ctime_ns <= look(fd, b"it").btime_ns <= look(fd, b"after").ctime_ns


@ways
def test_without_a_birth_time_it_is_zero(look: Look) -> None:
    with Fd(os.open("/proc/self", os.O_PATH)) as proc:
        assert look(proc, b"status").btime_ns == 0


@ways
def test_inode_numbers_have_64_bits(top: Path, look: Look) -> None:
    """An overlay on several filesystems tells them apart by the highest bits."""
    with tmpfs_volume() as other:
        for path in (top / "lower", other / "upper", other / "work", other / "both"):
            path.mkdir()
        (top / "lower/it").touch()
        options = f"xino=on,lowerdir={top}/lower,upperdir={other}/upper,workdir={other}/work"
        subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", other / "both"], check=True)
        try:
            with Fd(os.open(other / "both", os.O_PATH)) as both:
                assert look(both, b"it").ino == os.stat(other / "both/it").st_ino > 2**62
        finally:
            subprocess.run(["umount", other / "both"], check=True)


@ways
@pytest.mark.parametrize(
    ("name", "number"),
    [(b"none", errno.ENOENT), (b"n" * 256, errno.ENAMETOOLONG), (b"file/x", errno.ENOTDIR), (b"loop/x", errno.ELOOP)],
)
def test_a_failed_look_has_its_errno_and_its_name(top: Path, fd: Fd, name: bytes, number: int, look: Look) -> None:
    (top / "file").touch()
    (top / "loop").symlink_to("loop")
    with pytest.raises(OSError, match=re.escape(os.strerror(number))) as failed:
        look(fd, name)
    assert (failed.value.errno, failed.value.filename) == (number, name)


def test_after_a_failure_the_next_look_is_right(top: Path, fd: Fd) -> None:
    (top / "it").touch()
    with pytest.raises(FileNotFoundError):
        stat_at(fd, b"none")
    assert identified(fd, b"it") == (stat_at(fd, b"it"), name_to_handle_at(fd, b"it"))


def test_an_fd_tells_of_itself(top: Path) -> None:
    (top / "link").symlink_to("nowhere")
    with Fd(os.open(top / "link", os.O_PATH | os.O_NOFOLLOW)) as link:
        assert fields_of(stat_at(link)) == of_stat(top / "link")


def test_a_looker_tells_devices_apart(top: Path, fd: Fd) -> None:
    with tmpfs_volume() as other, Fd(os.open(other, os.O_PATH)) as other_fd:
        for _ in range(2):
            assert stat_at(fd).dev == os.stat(top).st_dev
            assert stat_at(other_fd).dev == os.stat(other).st_dev


@pytest.mark.parametrize("kind", KINDS)
def test_a_handle_finds_what_was_looked_at(top: Path, fd: Fd, kind: str) -> None:
    make(kind, top / "it")
    with Fd(os.open(top, os.O_RDONLY)) as mount:
        seen, handle = identified(fd, b"it")
        assert handle == name_to_handle_at(fd, b"it")
        with open_handle(mount, handle, os.O_PATH | os.O_NOFOLLOW) as found:
            assert stat_at(found) == seen


def test_a_looker_takes_handles_of_any_length(top: Path, fd: Fd) -> None:
    """They differ from filesystem to filesystem; some have none."""
    (top / "it").touch()
    with Fd(os.open("/proc/self", os.O_PATH)) as proc, Fd(os.open("/", os.O_PATH)) as disk:
        for _ in range(2):
            assert identified(proc, b"status")[1] == b""
            assert identified(fd, b"it")[1] == name_to_handle_at(fd, b"it") != b""
            assert identified(disk, b"etc")[1] == name_to_handle_at(disk, b"etc")


def test_many_threads_look_each_at_its_own(top: Path, fd: Fd) -> None:
    names = [b"%d" % number for number in range(256)]
    for size, name in enumerate(names):
        (top / os.fsdecode(name)).write_bytes(b"x" * size)
    right = {name: (stat_at(fd, name), name_to_handle_at(fd, name)) for name in names}

    def seen(number: int) -> bool:
        mine = names[number:] + names[:number]
        return all(identified(fd, name) == right[name] and stat_at(fd, name) == right[name][0] for name in mine)

    with ThreadPoolExecutor(64) as threads:
        assert all(threads.map(seen, range(64)))
