"""The service's lock: one holder, seen by every process, gone with it, and no other user can keep it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.linux import file_locks
from tests.support.other_users import as_user, passable_directory
from tests.support.real_filesystems import tmpfs_volume

HOLDS = """
import sys
from fusefs.linux import file_locks
fd = file_locks.take_lock(sys.argv[1].encode())
print("held" if fd else "refused", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the lock until it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        try:
            yield process
        finally:
            process.kill()


def test_the_second_service_gets_no_lock(tmp_path: Path) -> None:
    with holder(tmp_path):
        assert file_locks.take_lock(os.fsencode(tmp_path)) is None


def test_the_holder_is_seen_and_his_death_too(tmp_path: Path) -> None:
    directory = os.fsencode(tmp_path)
    with holder(tmp_path) as process:
        assert file_locks.holds_service_lock(directory, process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not file_locks.holds_service_lock(directory, process.pid)
    fd = file_locks.take_lock(directory)
    assert fd is not None
    fd.close()


@pytest.mark.needs("root")
def test_the_holder_of_a_file_of_the_same_number_on_another_filesystem_is_not_the_holder() -> None:
    with tmpfs_volume() as here, tmpfs_volume() as there, holder(here) as ours, holder(there) as theirs:
        assert len({os.stat(path).st_ino for volume in (here, there) for path in volume.iterdir()}) == 1
        assert file_locks.holds_service_lock(os.fsencode(here), ours.pid)
        assert not file_locks.holds_service_lock(os.fsencode(here), theirs.pid)
        ours.kill()
        ours.wait()
        # Nobody has a lock on this one now, and the list has one on a file of the same number.
        assert not file_locks.holds_service_lock(os.fsencode(here), theirs.pid)


def test_another_process_is_not_the_holder(tmp_path: Path) -> None:
    with holder(tmp_path):
        assert not file_locks.holds_service_lock(os.fsencode(tmp_path), os.getpid())


def test_no_lock_was_ever_taken_there(tmp_path: Path) -> None:
    assert not file_locks.holds_service_lock(os.fsencode(tmp_path), os.getpid())
    assert not file_locks.holds_service_lock(os.fsencode(tmp_path / "missing"), os.getpid())


@pytest.mark.needs("root")
def test_others_see_it_and_cannot_take_it() -> None:
    with passable_directory() as place, holder(place) as process:
        path = os.fsencode(place)
        assert as_user(54321, lambda: file_locks.holds_service_lock(path, process.pid))
        with pytest.raises(PermissionError):
            as_user(54321, lambda: file_locks.take_lock(path))


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    (tmp_path / "lock").symlink_to("elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        file_locks.take_lock(os.fsencode(tmp_path))
