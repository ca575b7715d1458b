"""What changes behind a shared mount is seen within its timeout, a second; it keeps no client and no end waiting."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.linux import syscalls
from fusefs.linux.mountinfo import DAEMON_GONE
from tests.support.filesystem_params import ALL_FILESYSTEMS
from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, trashd_mount, until
from tests.support.real_filesystems import loop_volume, tmpfs_volume

pytestmark = pytest.mark.needs("root", "fuse", "loop")

SHARED = ("coherence=shared",)
N_CLIENTS = 4
LIMIT_S = 30.0
_NUMBERS = itertools.count()


class Place(NamedTuple):
    """One directory, through the mount and behind it."""

    seen: Path
    behind: Path


@contextmanager
def shared_mount(volume: Path, *, expect_end: bool = False, limit_s: float = SHARED_LIMIT_S) -> Iterator[Mounted]:
    source = volume / f"source{next(_NUMBERS)}"
    with trashd_mount(source, options=SHARED, limit_s=limit_s, expect_end=expect_end) as mounted:
        yield mounted


@pytest.fixture(scope="module", params=ALL_FILESYSTEMS)
def mounted(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    with (
        tmpfs_volume() if request.param == "tmpfs" else loop_volume(request.param, 64) as volume,
        shared_mount(volume) as mounted,
    ):
        yield mounted


@pytest.fixture
def place(mounted: Mounted) -> Place:
    """A directory of its own, known to the kernel, with a file and a directory that are known too."""
    return known_place(mounted)


def known_place(mounted: Mounted) -> Place:
    name = f"place{next(_NUMBERS)}"
    place = Place(mounted.path / name, mounted.backing / name)
    place.seen.mkdir()
    (place.seen / "file").write_bytes(b"old content")
    (place.seen / "inner").mkdir()
    (place.seen / "inner" / "child").write_bytes(b"child")
    for path in ("file", "inner", "inner/child"):
        (place.seen / path).stat()
    (place.seen / "file").read_bytes()
    return place


def exchange(one: Path, two: Path) -> None:
    syscalls.renameat2(
        syscalls.AT_FDCWD, os.fsencode(one), syscalls.AT_FDCWD, os.fsencode(two), syscalls.RENAME_EXCHANGE
    )


# Names.


def test_a_new_name_is_seen(place: Place) -> None:
    assert not (place.seen / "new").exists()
    before = place.seen.stat().st_mtime_ns
    (place.behind / "new").write_bytes(b"content")
    assert until((place.seen / "new").exists)
    assert (place.seen / "new").read_bytes() == b"content"
    assert "new" in os.listdir(place.seen)
    assert until(lambda: place.seen.stat().st_mtime_ns > before)


def test_a_name_that_goes_is_not_seen_any_more(place: Place) -> None:
    (place.behind / "file").unlink()
    assert until(lambda: not (place.seen / "file").exists())
    assert "file" not in os.listdir(place.seen)


def test_a_directory_that_goes_is_not_seen_any_more(place: Place) -> None:
    (place.behind / "inner" / "child").unlink()
    (place.behind / "inner").rmdir()
    assert until(lambda: not (place.seen / "inner").exists())
    assert until(lambda: place.seen.stat().st_nlink == place.behind.stat().st_nlink)


def test_what_gets_the_name_of_something_else_is_seen(place: Place) -> None:
    (place.behind / "other").write_bytes(b"another file")
    (place.behind / "other").rename(place.behind / "file")
    assert until(lambda: (place.seen / "file").read_bytes() == b"another file")
    assert (place.seen / "file").stat().st_size == len(b"another file")


def test_a_renamed_file_is_seen_where_it_is(place: Place) -> None:
    (place.behind / "file").rename(place.behind / "inner" / "moved")
    assert until(lambda: not (place.seen / "file").exists())
    assert until((place.seen / "inner" / "moved").exists)
    assert (place.seen / "inner" / "moved").read_bytes() == b"old content"


def test_a_renamed_directory_is_seen_where_it_is_with_what_is_in_it(place: Place) -> None:
    (place.behind / "inner").rename(place.behind / "moved")
    assert until(lambda: not (place.seen / "inner" / "child").exists())
    assert until((place.seen / "moved" / "child").exists)


def test_exchanged_directories_are_seen_exchanged(place: Place) -> None:
    (place.seen / "fresh").mkdir()
    exchange(place.behind / "inner", place.behind / "fresh")
    assert until(lambda: os.listdir(place.seen / "inner") == [])
    assert until(lambda: os.listdir(place.seen / "fresh") == ["child"])


def test_who_is_in_a_directory_that_left_and_came_back_has_not_noticed(place: Place) -> None:
    """A name that means the same as before is no other name: the working directory keeps its path."""
    with subprocess.Popen(
        ["bash", "-c", "read -r; /bin/pwd"], cwd=place.seen / "inner", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as inside:
        (place.behind / "inner").rename(place.behind / "away")
        (place.behind / "away").rename(place.behind / "inner")
        (place.behind / "told").touch()
        assert until((place.seen / "told").exists)
        assert inside.communicate(b"\n", LIMIT_S)[0] == os.fsencode(place.seen / "inner") + b"\n"


# Content and attributes.


def test_written_content_is_seen_by_who_has_it_open_and_mapped(place: Place) -> None:
    with (place.seen / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:3] == b"old"
        with (place.behind / "file").open("r+b") as other:
            other.write(b"new")
        assert until(lambda: os.pread(file.fileno(), 3, 0) == b"new")
        assert until(lambda: mapped[:3] == b"new")


def test_content_is_seen_though_size_and_time_are_as_before(place: Place) -> None:
    before = (place.behind / "file").stat()
    with (place.seen / "file").open("rb") as file, (place.behind / "file").open("r+b", buffering=0) as other:
        file.read()
        other.write(b"new")
        os.utime(other.fileno(), ns=(before.st_atime_ns, before.st_mtime_ns))
        assert until(lambda: os.pread(file.fileno(), 3, 0) == b"new")


@pytest.mark.parametrize("size", [0, 3, 1 << 20])
def test_a_cut_or_grown_file_is_seen(place: Place, size: int) -> None:
    os.truncate(place.behind / "file", size)
    assert until(lambda: (place.seen / "file").stat().st_size == size)
    assert (place.seen / "file").read_bytes() == (place.behind / "file").read_bytes()


def test_mode_owner_and_times_are_seen(place: Place) -> None:
    for path in ("file", "inner"):
        (place.behind / path).chmod(0o711)
        os.chown(place.behind / path, 12, 34)
        os.utime(place.behind / path, (1, 2))

        def seen(path: str = path) -> tuple[int, int, int, float]:
            st = (place.seen / path).stat()
            return st.st_mode & 0o777, st.st_uid, st.st_gid, st.st_mtime

        assert until(lambda: seen() == (0o711, 12, 34, 2))


def test_a_change_through_another_link_is_seen(place: Place) -> None:
    os.link(place.behind / "file", place.behind / "link")
    assert until(lambda: (place.seen / "file").stat().st_nlink == 2)
    (place.behind / "link").write_bytes(b"by the other name")
    assert until(lambda: (place.seen / "file").read_bytes() == b"by the other name")
    (place.behind / "link").unlink()
    assert until(lambda: (place.seen / "file").stat().st_nlink == 1)


# Clients on both sides.


_CLIENT = """
import errno, os, sys
top, number = os.fsencode(sys.argv[1]), int(sys.argv[2])
wanted = {errno.ENOENT, errno.EEXIST, errno.ESTALE}
print("begun", flush=True)
for i in range(10**9):
    name = b"%s/name%d-%d" % (top, i % 5, number)
    try:
        if number % 2:
            os.listdir(top)
            os.stat(name)
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY))
        os.rename(name, name + b"-renamed")
        os.unlink(name + b"-renamed")
    except OSError as error:
        if error.errno not in wanted:
            sys.exit(error.errno)
    if i % 10 == 0:
        print(i, flush=True)
"""


@contextmanager
def clients(*tops: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Busy in directories, with the same names, until an unexpected error: their exit code."""
    started = [
        subprocess.Popen([sys.executable, "-c", _CLIENT, top, str(i)], stdout=subprocess.PIPE)
        for i, top in enumerate(tops)
    ]
    try:
        yield started
    finally:
        for client in started:
            client.kill()
        for client in started:
            client.communicate()


def goes_on(client: subprocess.Popen[bytes], n: int = 5) -> bool:
    """Whether a client comes further, and further."""
    assert client.stdout is not None
    for _ in range(n):
        if not select.select([client.stdout], [], [], LIMIT_S)[0] or not os.read(client.stdout.fileno(), 1000):
            return False
    return True


def both_sides(mounted: Mounted) -> list[Path]:
    """A directory: through the mount for all clients but one, and behind it."""
    place = known_place(mounted)
    return [place.seen] * N_CLIENTS + [place.behind]


def test_clients_go_on_in_a_directory_that_changes_behind_them() -> None:
    with tmpfs_volume() as volume, shared_mount(volume) as mounted, clients(*both_sides(mounted)) as started:
        for client in started * 2:
            assert goes_on(client), client.poll()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_the_daemon_ends_while_clients_are_at_work_on_both_sides(how: signal.Signals) -> None:
    """No process tells the kernel what to forget: it would wait for a lock whose owner waits for the daemon."""
    with (
        tmpfs_volume() as volume,
        shared_mount(volume, expect_end=True, limit_s=LIMIT_S * 2) as mounted,
        clients(*both_sides(mounted)) as started,
    ):
        assert all(goes_on(client) for client in started)
        pid_fd = os.pidfd_open(mounted.pid)
        os.kill(mounted.pid, how)
        assert select.select([pid_fd], [], [], LIMIT_S)[0], "the daemon did not end"
        os.close(pid_fd)
        if how is not signal.SIGTERM:  # after that there is no mount
            for client in started[:-1]:
                client.communicate(timeout=LIMIT_S)  # what the kernel remembers keeps it going, and its pipe would fill
                assert client.returncode in (*DAEMON_GONE, errno.EIO)


def test_no_process_works_beside_the_daemon() -> None:
    with tmpfs_volume() as volume, shared_mount(volume) as mounted:
        known_place(mounted)
        assert Path(f"/proc/{mounted.pid}/task/{mounted.pid}/children").read_text() == ""


def test_an_unmount_is_not_held_up_by_changes_that_pour_in() -> None:
    with tmpfs_volume() as volume, shared_mount(volume, expect_end=True) as mounted:
        place = known_place(mounted)
        with clients(place.behind) as (behind,):
            assert goes_on(behind)
            os.listdir(place.seen)
            pid_fd = os.pidfd_open(mounted.pid)
            subprocess.run(["umount", mounted.path], check=True)
            assert select.select([pid_fd], [], [], LIMIT_S)[0]
            os.close(pid_fd)
            assert goes_on(behind)
