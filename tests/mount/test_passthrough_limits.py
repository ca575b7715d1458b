"""Where nothing can pass the daemon the mount says why, and works; what is refused below is refused as it is there."""

import ctypes
import errno
import mmap
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.foreground_mount import fresh_mount, trashd_mount, until
from tests.support.fuse_slow import slow_volume
from tests.support.open_files import errno_of, held, opened
from tests.support.passthrough_files import all_closed, n_messages, why_off
from tests.support.real_filesystems import loop_volume, overlay_on, overlay_volume, tmpfs_volume, unmount

pytestmark = [pytest.mark.needs("root", "fuse", "passthrough"), pytest.mark.takes_engine]

CONTENT = b"content " * 1024


@contextmanager
def mounted_at(path: Path, kind: str) -> Iterator[Path]:
    """A filesystem that needs no device."""
    path.mkdir()
    assert ctypes.CDLL(None).mount(b"test", os.fsencode(path), kind.encode(), ctypes.c_ulong(0), None) == 0
    try:
        yield path
    finally:
        unmount(path)


# Where it can't be.


def test_an_overlay_is_passed_through_to() -> None:
    def populate(lower: Path) -> None:
        (lower / "file").write_bytes(CONTENT)

    with overlay_volume(populate) as overlay, trashd_mount(overlay.path) as mounted:
        file = mounted.path / "file"
        with opened(file, os.O_RDONLY) as fd:
            assert os.pread(fd, len(CONTENT), 0) == CONTENT
        with opened(file, os.O_RDWR) as fd:  # which copies it up
            os.pwrite(fd, b"new", 0)
            assert os.pread(fd, 3, 0) == b"new"
        (mounted.path / "made").write_bytes(CONTENT)
        assert (overlay.path / "made").read_bytes() == CONTENT
        assert (overlay.upper / "file").read_bytes() == b"new" + CONTENT[3:]
        assert file.stat().st_mtime_ns == (overlay.path / "file").stat().st_mtime_ns
        assert n_messages(mounted) == 0
        assert why_off(mounted) is None


def test_on_a_stack_that_is_too_high_the_mount_goes_without_and_says_why() -> None:
    with overlay_volume() as overlay, overlay_on(overlay.path) as upper:
        (upper.path / "file").write_bytes(CONTENT)
        with trashd_mount(upper.path) as mounted:
            assert (mounted.path / "file").read_bytes() == CONTENT
            (mounted.path / "new").write_bytes(CONTENT)
            assert (upper.path / "new").read_bytes() == CONTENT
            assert until(lambda: "too many stacked filesystems" in (why_off(mounted) or ""))
            assert n_messages(mounted) > 0


def test_a_part_of_the_tree_that_lies_on_others_goes_without_alone() -> None:
    with ExitStack() as stack:
        volume, overlay = stack.enter_context(tmpfs_volume()), stack.enter_context(overlay_volume())
        part = volume / "source" / "part"
        part.mkdir(parents=True)
        subprocess.run(["mount", "--bind", overlay.path, part], check=True)
        stack.callback(unmount, part)
        mounted = stack.enter_context(trashd_mount(volume / "source"))
        for name in ("part/one", "part/two", "here"):
            (mounted.path / name).write_bytes(CONTENT)
            assert (mounted.path / name).read_bytes() == CONTENT
        assert why_off(mounted) is None
        here = mounted.path / "here"
        with held(here):
            here.write_bytes(CONTENT)
            before = n_messages(mounted)
            assert here.read_bytes() == CONTENT
            assert n_messages(mounted) == before
        assert mounted.log.read_text().count("not passed through") == 1  # of the first, for all


# Now this way, now that.


def test_a_file_that_was_opened_for_what_is_not_passed_through_stays_so_while_it_is_open() -> None:
    """ramfs has no direct I/O: through the daemon it works all the same."""
    with tmpfs_volume() as volume, mounted_at(volume / "source", "ramfs") as source:
        (source / "file").write_bytes(CONTENT)
        with trashd_mount(source) as mounted:
            file = mounted.path / "file"
            before = n_messages(mounted)
            with opened(file, os.O_RDWR | os.O_DIRECT) as direct, mmap.mmap(-1, 4096) as aligned:
                aligned[:] = b"d" * 4096
                os.pwritev(direct, [aligned], 0)
                with opened(file, os.O_RDWR) as other:
                    assert os.pread(other, 5, 0) == b"ddddd"
                    os.pwrite(other, b"e", 0)
                    os.preadv(direct, [aligned], 0)
                    assert aligned[:2] == b"ed"
            assert all_closed(mounted)
            assert n_messages(mounted) > before
            before = n_messages(mounted)
            assert file.read_bytes()[:2] == b"ed"
            file.write_bytes(b"short")
            assert n_messages(mounted) == before
            with opened(file, os.O_RDWR | os.O_DIRECT) as direct:
                assert os.pread(direct, 10, 0) == b"short"
                os.pwrite(direct, b"again", 0)
            assert file.read_bytes() == b"again" == (source / "file").read_bytes()


def test_direct_io_on_what_passes_through_is_refused_as_it_is_below() -> None:
    with tmpfs_volume() as volume, mounted_at(volume / "source", "ramfs") as source:
        (source / "file").write_bytes(CONTENT)
        with trashd_mount(source) as mounted, opened(mounted.path / "file", os.O_RDONLY):
            assert errno_of(lambda: os.open(source / "file", os.O_RDONLY | os.O_DIRECT)) == errno.EINVAL
            assert errno_of(lambda: os.open(mounted.path / "file", os.O_RDONLY | os.O_DIRECT)) == errno.EINVAL


def test_a_mapping_of_pages_of_the_kernels_stays_until_it_is_gone() -> None:
    """Such a mapping keeps its handle: no other handle passes through beside it."""
    with tmpfs_volume() as volume, mounted_at(volume / "source", "ramfs") as source:
        (source / "file").write_bytes(CONTENT)
        with trashd_mount(source) as mounted:
            file = mounted.path / "file"
            with opened(file, os.O_RDWR | os.O_DIRECT) as direct:
                mapped = mmap.mmap(direct, 4096)
            mapped[0:3] = b"map"
            with opened(file, os.O_RDWR) as other:
                assert os.pread(other, 3, 0) == b"map"
                os.pwrite(other, b"new", 0)
                assert mapped[:3] == b"new"
            mapped.close()
            assert file.read_bytes()[:3] == b"new" == (source / "file").read_bytes()[:3]


# Refused as below.


def test_a_mount_for_reading_alone_lets_nobody_write() -> None:
    with fresh_mount("ro") as mounted:
        (mounted.backing / "file").write_bytes(CONTENT)
        file = mounted.path / "file"
        assert file.read_bytes() == CONTENT
        assert errno_of(lambda: os.open(file, os.O_WRONLY)) == errno.EROFS
        with opened(file, os.O_RDONLY) as fd, pytest.raises(PermissionError):
            mmap.mmap(fd, 100, prot=mmap.PROT_WRITE)
        assert n_messages(mounted) == 0


@pytest.mark.parametrize("flag", ["+i", "+a"])
@pytest.mark.needs("loop")
def test_what_is_immutable_below_is_so(flag: str) -> None:
    with fresh_mount(made=loop_volume("ext4", 32)) as mounted:
        file = mounted.backing / "file"
        file.write_bytes(CONTENT)
        subprocess.run(["chattr", flag, file], check=True)
        try:
            assert errno_of(lambda: os.open(mounted.path / "file", os.O_WRONLY)) == errno.EPERM
            if flag == "+a":
                with opened(mounted.path / "file", os.O_WRONLY | os.O_APPEND) as fd:
                    os.write(fd, b"more")
                assert file.read_bytes() == CONTENT + b"more"
        finally:
            subprocess.run(["chattr", "-ia", file], check=True)


# Whatever happens to the daemon.


def test_fuse_below_hears_of_each_close_itself() -> None:
    with ExitStack() as stack:
        volume = stack.enter_context(tmpfs_volume())
        slow = stack.enter_context(slow_volume(volume, delay_us=0))
        mounted = stack.enter_context(trashd_mount(slow.path, volume.with_name("shown")))
        (mounted.path / "file").write_bytes(CONTENT)
        assert n_messages(mounted) > 0
        assert "is FUSE" in (why_off(mounted) or "")
