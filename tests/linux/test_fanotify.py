"""What fanotify tells, and that its handles are those by which nodes are known."""

from __future__ import annotations

import os
import select
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.linux import fanotify, syscalls
from fusefs.linux.fanotify import FanotifyChange, parse_changes, read_changes, watch_filesystem
from fusefs.linux.fd import Fd
from fusefs.linux.syscalls import handle_of
from tests.support.filesystem_params import ALL_FILESYSTEMS
from tests.support.other_users import as_user
from tests.support.real_filesystems import btrfs_subvolume, loop_volume, tmpfs_volume

needs_root = pytest.mark.needs("root", "loop")
NOBODY = 65534
NOT_ME = 0


@pytest.fixture(scope="module", params=ALL_FILESYSTEMS)
def volume(request: pytest.FixtureRequest) -> Iterator[Path]:
    with tmpfs_volume() if request.param == "tmpfs" else loop_volume(request.param, 64) as path:
        yield path


@pytest.fixture
def top(volume: Path) -> Path:
    path = volume / f"test{len(os.listdir(volume))}"
    path.mkdir()
    return path


def opened(path: Path) -> Fd:
    return Fd(os.open(path, os.O_PATH | os.O_NOFOLLOW))


def handle(path: Path) -> bytes:
    with opened(path) as fd:
        return handle_of(fd)


def told_of(top: Path, act: Callable[[], object], but_of: int = NOT_ME) -> list[FanotifyChange]:
    """All that is told while something is done."""
    with opened(top) as fd, watch_filesystem(fd) as watch:
        act()
        found = []
        while select.select([watch], [], [], 0)[0]:
            found += read_changes(watch, but_of)
        return found


ACTS: list[tuple[Callable[[Path], object], int]] = [
    (lambda top: (top / "file").write_bytes(b"changed"), fanotify.FAN_MODIFY),
    (lambda top: os.truncate(top / "file", 1), fanotify.FAN_MODIFY),
    (lambda top: (top / "file").chmod(0o600), fanotify.FAN_ATTRIB),
    (lambda top: os.utime(top / "file", (1, 1)), fanotify.FAN_ATTRIB),
    (lambda top: (top / "file").unlink(), fanotify.FAN_DELETE),
    (lambda top: (top / "file").rename(top / "inner" / "other"), fanotify.FAN_MOVED_FROM),
]


@needs_root
@pytest.mark.parametrize(("act", "kind"), ACTS)
def test_a_change_comes_with_the_handles_that_name_to_handle_at_gives(
    top: Path, act: Callable[[Path], object], kind: int
) -> None:
    (top / "inner").mkdir()
    (top / "file").write_bytes(b"content")
    directory, subject = handle(top), handle(top / "file")
    changes = told_of(top, lambda: act(top))
    assert (directory, b"file", subject) in [c[2:] for c in changes if c.mask & kind]


@needs_root
def test_a_new_name_comes_with_the_handle_of_what_was_made(top: Path) -> None:
    changes = told_of(top, (top / "new").mkdir)
    assert changes == [
        FanotifyChange(fanotify.FAN_CREATE | fanotify.FAN_ONDIR, os.getpid(), handle(top), b"new", handle(top / "new"))
    ]


@needs_root
def test_a_new_link_tells_of_the_inode_that_it_is_of(top: Path) -> None:
    (top / "file").touch()
    changes = told_of(top, lambda: os.link(top / "file", top / "link"))
    assert {c.subject for c in changes} == {handle(top / "file")}
    assert {c.mask for c in changes} == {fanotify.FAN_ATTRIB, fanotify.FAN_CREATE}


@needs_root
def test_an_exchange_tells_of_both_names_twice(top: Path) -> None:
    for name in ("one", "two"):
        (top / name).mkdir()
    with opened(top) as fd:
        changes = told_of(top, lambda: syscalls.renameat2(fd, b"one", fd, b"two", syscalls.RENAME_EXCHANGE))
    assert sorted(c.name for c in changes) == [b"one", b"one", b"two", b"two"]
    assert {c.directory for c in changes} == {handle(top)}


@needs_root
def test_what_happens_to_a_directory_itself_has_no_name(top: Path) -> None:
    changes = told_of(top, lambda: top.chmod(0o700))
    assert [c[2:] for c in changes] == [(b"", b"", handle(top))]


@needs_root
def test_a_name_of_any_bytes_comes_whole(top: Path) -> None:
    name = b"\xff\n'" + b"n" * 252
    changes = told_of(top, lambda: os.mkdir(os.fsencode(top) + b"/" + name))
    assert [c.name for c in changes] == [name]


@needs_root
def test_who_is_left_out_is_not_told_of_and_others_are(top: Path) -> None:
    def act() -> None:
        (top / "mine").mkdir()
        subprocess.run(["mkdir", top / "theirs"], check=True)

    assert [c.name for c in told_of(top, act, but_of=os.getpid())] == [b"theirs"]


def make_too_many(top: Path) -> None:
    n = int(Path("/proc/sys/fs/fanotify/max_queued_events").read_text()) + 1
    with opened(top) as fd:
        for i in range(n):
            os.mkdir(b"%d" % i, dir_fd=fd)


@needs_root
def test_too_many_changes_are_told_as_such_even_if_all_are_ours() -> None:
    with tmpfs_volume() as volume:
        changes = told_of(volume, lambda: make_too_many(volume), os.getpid())
        assert [c.mask for c in changes] == [fanotify.FAN_Q_OVERFLOW]


@needs_root
def test_without_root_a_filesystem_is_not_watched(top: Path) -> None:
    def watched() -> bool:
        try:
            with opened(top) as fd:
                watch_filesystem(fd).close()
        except PermissionError:
            return False
        return True

    assert not as_user(NOBODY, watched)


@pytest.mark.needs("root", "btrfs")
def test_a_subvolume_is_refused() -> None:
    with (
        loop_volume("btrfs") as volume,
        opened(btrfs_subvolume(volume, "sub")) as fd,
        pytest.raises(OSError, match="cross-device"),
    ):
        watch_filesystem(fd).close()


EVENT = struct.Struct("=IBBHQii")
RECORD = struct.Struct("=BBHii")


def record(kind: int, its_handle: bytes, name: bytes = b"", pad: int = 0) -> bytes:
    body = its_handle + (name + b"\0" if name else b"") + bytes(pad)
    return RECORD.pack(kind, 0, RECORD.size + len(body), 1, 2) + body


def event(mask: int, *records: bytes, pid: int = 7) -> bytes:
    body = b"".join(records)
    return EVENT.pack(EVENT.size + len(body), 3, 0, EVENT.size, mask, -1, pid) + body


H1, H2 = struct.pack("=Ii", 8, 1) + b"12345678", struct.pack("=Ii", 12, 2) + b"123456789012"
SAMPLE = event(0x100, record(2, H1, b"name", pad=3), record(1, H2)) + event(2, record(4, b"skipped"), record(1, H2))


def test_records_of_other_kinds_are_passed_over() -> None:
    assert parse_changes(SAMPLE, NOT_ME) == [
        FanotifyChange(0x100, 7, H1, b"name", H2),
        FanotifyChange(2, 7, b"", b"", H2),
    ]


def test_a_buffer_that_is_cut_off_is_an_error_and_no_half_change() -> None:
    whole = parse_changes(SAMPLE, NOT_ME)
    first = EVENT.unpack_from(SAMPLE)[0]
    for size in range(len(SAMPLE)):
        if size in (0, first):
            assert parse_changes(SAMPLE[:size], NOT_ME) == whole[: bool(size)]
        else:
            with pytest.raises(OSError, match="fanotify"):
                parse_changes(SAMPLE[:size], NOT_ME)


@given(st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255))))
def test_whatever_the_bytes_are_nothing_but_an_oserror_comes(changed: list[tuple[int, int]]) -> None:
    raw = bytearray(SAMPLE)
    for at, value in changed:
        raw[at] = value
    with suppress(OSError):
        parse_changes(bytes(raw), NOT_ME)
