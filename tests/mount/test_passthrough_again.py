"""Small files that are read again are kept by the kernel; all others are passed through (docs/decisions/0012)."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.foreground_mount import Mounted, trashd_mount, until
from tests.support.open_files import held, opened
from tests.support.passthrough_files import all_closed, n_messages
from tests.support.real_filesystems import tmpfs_volume

pytestmark = [pytest.mark.needs("root", "fuse", "passthrough"), pytest.mark.rests_on("passthrough")]

SMALL, LARGE = b"small" * 1000, b"large" * 100_000


@pytest.fixture
def source() -> Iterator[Path]:
    """A directory with a small file and a large one."""
    with tmpfs_volume("64m") as volume:
        path = volume / "source"
        path.mkdir()
        (path / "small").write_bytes(SMALL)
        (path / "large").write_bytes(LARGE)
        yield path


@pytest.fixture
def mount(source: Path) -> Iterator[Mounted]:
    """A mount of it, which is never bypassed, and which knows both files throughout."""
    with trashd_mount(source) as mounted, held(mounted.path / "small", mounted.path / "large"):
        yield mounted


def n_asked_by_reading(mounted: Mounted, name: str, content: bytes) -> int:
    """How many messages it takes to read a file."""
    before = n_messages(mounted)
    assert (mounted.path / name).read_bytes() == content
    assert all_closed(mounted)
    return n_messages(mounted) - before


def test_a_small_file_that_is_read_again_is_asked_for_once(mount: Mounted) -> None:
    assert n_asked_by_reading(mount, "small", SMALL) == 0  # passed through
    assert n_asked_by_reading(mount, "small", SMALL) > 0
    assert until(lambda: n_asked_by_reading(mount, "small", SMALL) == 0)  # kept, unless memory is short just now


def test_a_large_file_is_passed_through_however_often_it_is_read(mount: Mounted) -> None:
    assert [n_asked_by_reading(mount, "large", LARGE) for _ in range(4)] == [0] * 4


def test_what_was_written_is_passed_through_when_it_is_read(mount: Mounted) -> None:
    with opened(mount.path / "small", os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, b"line")
    assert [n_asked_by_reading(mount, "small", SMALL + b"line") for _ in range(4)] == [0] * 4
    (mount.path / "made").touch()
    with held(mount.path / "made"):
        (mount.path / "made").write_bytes(SMALL)
        assert [n_asked_by_reading(mount, "made", SMALL) for _ in range(4)] == [0] * 4


def test_what_is_written_after_it_was_kept_is_read_and_passed_through_from_then_on(mount: Mounted) -> None:
    for _ in range(3):
        n_asked_by_reading(mount, "small", SMALL)
    with opened(mount.path / "small", os.O_RDWR) as fd, mmap.mmap(fd, 4096) as mapped:
        mapped[:5] = b"other"
        os.pwrite(fd, b"again", 5)
    written = b"otheragain" + SMALL[10:]
    assert (mount.backing / "small").read_bytes() == written
    assert [n_asked_by_reading(mount, "small", written) for _ in range(4)] == [0] * 4


def test_what_is_cut_after_it_was_kept_is_read_as_it_is(mount: Mounted) -> None:
    for _ in range(3):
        n_asked_by_reading(mount, "small", SMALL)
    os.truncate(mount.path / "small", 7)
    assert (mount.path / "small").read_bytes() == SMALL[:7]
    os.truncate(mount.path / "small", 9)
    assert (mount.path / "small").read_bytes() == SMALL[:7] + b"\0\0" == (mount.backing / "small").read_bytes()


def test_who_has_kept_pages_open_reads_what_others_write(mount: Mounted) -> None:
    for _ in range(2):
        n_asked_by_reading(mount, "small", SMALL)
    with opened(mount.path / "small", os.O_RDONLY) as reader, mmap.mmap(reader, 0, prot=mmap.PROT_READ) as mapped:
        assert os.pread(reader, 5, 0) == mapped[:5] == b"small"
        with opened(mount.path / "small", os.O_WRONLY | os.O_APPEND) as writer:
            os.write(writer, b"line")
        with opened(mount.path / "small", os.O_WRONLY) as writer:
            os.write(writer, b"other")
        assert os.pread(reader, 5, 0) == mapped[:5] == b"other"
        assert os.pread(reader, 100, len(SMALL)) == b"line"
        assert (mount.backing / "small").read_bytes() == b"other" + SMALL[5:] + b"line"
    assert n_asked_by_reading(mount, "small", b"other" + SMALL[5:] + b"line") == 0


def test_kept_pages_of_an_unlinked_file_are_read_until_it_is_closed(mount: Mounted) -> None:
    for _ in range(2):
        n_asked_by_reading(mount, "small", SMALL)
    with opened(mount.path / "small", os.O_RDONLY) as fd:
        (mount.path / "small").unlink()
        (mount.path / "small").write_bytes(b"another one")
        assert os.pread(fd, len(SMALL), 0) == SMALL
    assert (mount.path / "small").read_bytes() == b"another one"


def test_whoever_insists_has_all_passed_through(source: Path) -> None:
    with trashd_mount(source, options=["passthrough=on"]) as mounted:
        assert [n_asked_by_reading(mounted, "small", SMALL) for _ in range(4)] == [0] * 4


def test_where_others_may_change_files_behind_the_mount_none_is_kept(source: Path) -> None:
    with trashd_mount(source, options=["coherence=shared"]) as mounted:
        assert [n_asked_by_reading(mounted, "small", SMALL) for _ in range(4)] == [0] * 4
        (source / "small").write_bytes(b"changed behind")
        assert (mounted.path / "small").read_bytes() == b"changed behind"
