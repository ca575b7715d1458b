"""Ids of files that the kernel reads and writes for a FUSE filesystem, on a connection that has agreed on it."""

import ctypes
import errno
import os
import select
import stat
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusefs.core import fuse_protocol as wire
from fusefs.core.fuse_protocol import Opcode
from fusefs.core.metadata_cache import Attributes
from fusefs.linux.fuse_device import close_backing, forget_attributes, open_backing
from tests.support.other_users import as_user
from tests.support.real_filesystems import overlay_volume, tmpfs_volume, unmount

pytestmark = pytest.mark.needs("root", "fuse")

INIT_EXT, PASSTHROUGH = 1 << 30, 1 << 5
NOBODY = 65534
HOUR_S, GLANCE_S = 3600.0, 0.01


@pytest.fixture
def device(tmp_path: Path) -> Iterator[int]:
    """/dev/fuse of a mount that gets no requests, after the handshake."""
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fd},rootmode={stat.S_IFDIR:o},user_id=0,group_id=0".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mount(b"test", os.fsencode(tmp_path), b"fuse", ctypes.c_ulong(0), options) == 0
    try:
        request = os.read(fd, 1 << 17)
        unique, major, minor = struct.unpack_from("=QII", request, 8)[0], *struct.unpack_from("=II", request, 40)
        init = struct.pack("=IIIIHHIIHHIII", major, minor, 4096, INIT_EXT, 16, 12, 4096, 1, 0, 0, PASSTHROUGH, 1, 0)
        init = init.ljust(64, b"\0")
        os.write(fd, struct.pack("=IiQ", 16 + len(init), 0, unique) + init)
        yield fd
    finally:
        unmount(tmp_path)
        os.close(fd)


@pytest.fixture
def volume() -> Iterator[Path]:
    with tmpfs_volume() as path:
        yield path


def refusal(act: Callable[[], object]) -> int:
    """The errno that something fails with; 0 if it does not."""
    try:
        act()
    except OSError as error:
        return error.errno or -1
    return 0


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_PATH], ids=["readable", "path"])
def test_a_regular_file_gets_an_id_until_that_is_closed(device: int, volume: Path, flags: int) -> None:
    (volume / "file").touch()
    fd = os.open(volume / "file", flags)
    backing_id = open_backing(device, fd)
    os.close(fd)
    assert backing_id > 0
    close_backing(device, backing_id)
    assert refusal(lambda: close_backing(device, backing_id)) == errno.ENOENT


def test_two_ids_of_one_file_are_two(device: int, volume: Path) -> None:
    (volume / "file").touch()
    fd = os.open(volume / "file", os.O_RDONLY)
    assert open_backing(device, fd) != open_backing(device, fd)
    os.close(fd)


def test_what_is_no_regular_file_is_refused(device: int, volume: Path) -> None:
    os.mkfifo(volume / "fifo")
    for name, number in {"fifo": errno.EINVAL, ".": errno.EISDIR}.items():
        fd = os.open(volume / name, os.O_RDONLY | os.O_NONBLOCK)
        assert refusal(lambda fd=fd: open_backing(device, fd)) == number  # type: ignore[misc]
        os.close(fd)


def test_a_stack_of_filesystems_is_refused(device: int) -> None:
    with overlay_volume() as overlay:
        (overlay.path / "file").touch()
        fd = os.open(overlay.path / "file", os.O_RDONLY)
        assert refusal(lambda: open_backing(device, fd)) == errno.ELOOP
        os.close(fd)


def test_it_takes_root(device: int, volume: Path) -> None:
    (volume / "file").touch()
    fd = os.open(volume / "file", os.O_RDONLY)
    assert as_user(NOBODY, lambda: refusal(lambda: open_backing(device, fd))) == errno.EPERM
    os.close(fd)


def test_what_keeps_an_id_keeps_the_blocks(device: int, volume: Path) -> None:
    free = os.statvfs(volume).f_bfree
    (volume / "file").write_bytes(bytes(1 << 20))
    fd = os.open(volume / "file", os.O_RDONLY)
    backing_id = open_backing(device, fd)
    os.close(fd)
    (volume / "file").unlink()
    assert os.statvfs(volume).f_bfree < free
    close_backing(device, backing_id)
    assert os.statvfs(volume).f_bfree == free


def test_attributes_of_what_the_kernel_does_not_know_are_forgotten_already(device: int) -> None:
    forget_attributes(device, 12345)


@pytest.mark.parametrize("is_void", [True, False], ids=["void", "not void"])
def test_what_was_asked_before_attributes_were_forgotten_is_not_believed(
    device: int, tmp_path: Path, *, is_void: bool
) -> None:
    """The answer goes out after the notice, and says that it lasts for an hour; without the notice it does."""
    forget = (lambda: forget_attributes(device, 1)) if is_void else lambda: None
    assert n_asked_by(lambda: os.stat(tmp_path), device, forget) == 1
    assert n_asked_by(lambda: os.stat(tmp_path), device, lambda: None) == is_void


def n_asked_by(act: Callable[[], object], device: int, before_answer: Callable[[], None]) -> int:
    """How often the kernel asks for attributes while something is done; it is told those of a directory."""
    attributes = Attributes(1, 1, stat.S_IFDIR | 0o755, 2, *[0] * (len(Attributes._fields) - 4))
    body = wire.encode_attr(1, attributes, HOUR_S)
    n_asked = 0
    with ThreadPoolExecutor(1) as pool:
        acting = pool.submit(act)
        while not acting.done():
            if select.select([device], [], [], GLANCE_S)[0]:
                _size, opcode, unique = wire.read_head(os.read(device, 1 << 17))[:3]
                assert opcode == Opcode.GETATTR
                before_answer()
                os.write(device, wire.encode_head(unique, len(body)) + body)
                n_asked += 1
        acting.result()
    return n_asked
