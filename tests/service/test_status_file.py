"""The status file: whole at any moment, readable for all, and no dead service looks alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from fusefs.core.errors import TrashdError
from fusefs.core.service_status import SeenStatus, Status, StatusFault, VolumeStatus
from fusefs.linux.machine_identity import boot_id
from fusefs.service.state_files import FILE, read_status, write_status

SERVICE = """
import os, sys
import msgspec
from fusefs.core.service_status import Status, VolumeStatus
from fusefs.linux import file_locks
from fusefs.service.state_files import write_status
directory = sys.argv[1].encode()
lock = file_locks.take(directory)
status = Status(version="0", pid=os.getpid(), boot_id="b", started_ns=0, updated_ns=0)
write_status(directory, status)
print("ready", flush=True)
sys.stdin.readline()
n = 0
while True:
    n += 1
    volumes = tuple(VolumeStatus(path="/v", n_orphans=n) for _ in range(n % 50))
    write_status(directory, msgspec.structs.replace(status, updated_ns=n, volumes=volumes))
"""
SOME = Status(version="0", pid=1, boot_id="b", started_ns=0, updated_ns=0)


def status_in(directory: Path) -> SeenStatus:
    seen = read_status(os.fsencode(directory))
    assert seen is not None
    return seen


@contextmanager
def service(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has written its status, and writes it without end when it is told a line."""
    argv = [sys.executable, "-c", SERVICE, str(directory)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process
        finally:
            process.kill()


def test_no_service_ever_ran_there(tmp_path: Path) -> None:
    assert read_status(os.fsencode(tmp_path)) is None
    assert read_status(os.fsencode(tmp_path / "missing")) is None


def test_a_service_is_seen_alive_and_after_a_kill_dead(tmp_path: Path) -> None:
    with service(tmp_path) as process:
        assert status_in(tmp_path).is_running
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not status_in(tmp_path).is_running


def test_a_reader_sees_one_whole_status_after_the_other(tmp_path: Path) -> None:
    with service(tmp_path) as process:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
        last = 0
        while last < 500:
            seen = status_in(tmp_path)
            assert seen.status.updated_ns >= last
            last = seen.status.updated_ns
            assert {volume.n_orphans for volume in seen.status.volumes} <= {last}


def test_a_killed_writer_leaves_the_old_status_and_hinders_nobody(tmp_path: Path) -> None:
    directory = os.fsencode(tmp_path)
    write_status(directory, SOME)
    (tmp_path / "status.json.new").write_bytes(b"{ half")
    status_in(tmp_path)
    later = msgspec.structs.replace(SOME, updated_ns=7)
    write_status(directory, later)
    assert msgspec.structs.replace(status_in(tmp_path).status, updated_boot_ns=None) == later


def test_its_age_does_not_follow_the_wall_clock(tmp_path: Path) -> None:
    write_status(os.fsencode(tmp_path), msgspec.structs.replace(SOME, boot_id=boot_id(), updated_ns=2**62))
    assert 0 < status_in(tmp_path).age_s < 60


def test_everybody_may_read_it_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_status(os.fsencode(tmp_path), SOME)
    finally:
        os.umask(before)
    assert (tmp_path / os.fsdecode(FILE)).stat().st_mode & 0o777 == 0o644


def test_what_another_version_wrote_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(FILE)).write_bytes(b'{"pid": "one"}')
    with pytest.raises(TrashdError) as told:
        read_status(os.fsencode(tmp_path))
    assert "version" in told.value.hint


def test_a_status_of_many_volumes_is_small(tmp_path: Path) -> None:
    faults = tuple(StatusFault(1, "x" * 200) for _ in range(10))
    volumes = tuple(VolumeStatus(path=f"/volumes/{n}", faults=faults) for n in range(50))
    write_status(os.fsencode(tmp_path), msgspec.structs.replace(SOME, volumes=volumes))
    assert (tmp_path / os.fsdecode(FILE)).stat().st_size < 300_000
