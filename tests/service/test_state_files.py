"""The service's files: a status that is whole at any moment, pauses, and a node's own beat."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusefs.core.errors import Untrusted
from fusefs.core.node_heartbeats import Heartbeat
from fusefs.core.service_status import ObservedStatus, Status, StatusFault, VolumeStatus
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.service.open_volume import HeldBeat, hold_beat, own_beat_name
from fusefs.service.state_files import (
    FILE,
    Pause,
    pause_dir,
    read_pauses,
    read_status,
    remove_pause,
    write_pause,
    write_status,
)
from tests.support.store_verbs import ActingBefore

SERVICE = """
import os, sys
import msgspec
from fusefs.core.service_status import Status, VolumeStatus
from fusefs.linux import file_locks
from fusefs.service.state_files import write_status
directory = sys.argv[1].encode()
lock = file_locks.take_lock(directory)
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


def status_in(directory: Path) -> ObservedStatus:
    status = read_status(os.fsencode(directory))
    assert status is not None
    return status


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


def test_everybody_may_read_it_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_status(os.fsencode(tmp_path), SOME)
    finally:
        os.umask(before)
    assert (tmp_path / os.fsdecode(FILE)).stat().st_mode & 0o777 == 0o644


def test_a_status_of_many_volumes_is_small(tmp_path: Path) -> None:
    faults = tuple(StatusFault(1, "x" * 200) for _ in range(10))
    volumes = tuple(VolumeStatus(path=f"/volumes/{n}", faults=faults) for n in range(50))
    write_status(os.fsencode(tmp_path), msgspec.structs.replace(SOME, volumes=volumes))
    assert (tmp_path / os.fsdecode(FILE)).stat().st_size < 300_000


NOW_S = 1000.0
FOREVER = Pause("paused by root until it is resumed", None)


@pytest.fixture
def runtime(tmp_path: Path) -> bytes:
    return os.fsencode(tmp_path)


def test_without_a_pause_there_is_none(runtime: bytes) -> None:
    assert read_pauses(runtime, NOW_S) == {}


@pytest.mark.parametrize("volume", [None, b"/scratch", b"/a b/%/\xff\n", b"/" + b"x" * 4000])
def test_what_is_paused_is_read_back(runtime: bytes, volume: bytes | None) -> None:
    write_pause(runtime, volume, FOREVER)
    assert read_pauses(runtime, NOW_S) == {volume: FOREVER}


def test_pause_ends_at_its_time(runtime: bytes) -> None:
    pause = Pause("for a minute", NOW_S + 60)
    write_pause(runtime, b"/scratch", pause)
    assert read_pauses(runtime, NOW_S + 59) == {b"/scratch": pause}
    assert pause.remaining_s(NOW_S + 59) == 1.0
    assert read_pauses(runtime, NOW_S + 60) == {}


def test_another_pause_takes_the_place_of_the_old_one(runtime: bytes) -> None:
    write_pause(runtime, b"/scratch", Pause("for a minute", NOW_S + 60))
    write_pause(runtime, b"/scratch", FOREVER)
    assert read_pauses(runtime, NOW_S) == {b"/scratch": FOREVER}


def test_pause_of_one_is_not_ended_by_the_end_of_another(runtime: bytes) -> None:
    for volume in (None, b"/scratch", b"/data"):
        write_pause(runtime, volume, FOREVER)
    assert remove_pause(runtime, b"/data")
    assert read_pauses(runtime, NOW_S).keys() == {None, b"/scratch"}


def test_what_is_not_paused_is_not_resumed(runtime: bytes) -> None:
    assert not remove_pause(runtime, b"/scratch")
    write_pause(runtime, b"/scratch", FOREVER)
    assert not remove_pause(runtime, None)


def test_unfinished_file_is_no_pause(runtime: bytes) -> None:
    Path(os.fsdecode(pause_dir(runtime)), "all.new").write_text("{")
    assert read_pauses(runtime, NOW_S) == {}


def test_nobody_else_can_write_there(runtime: bytes) -> None:
    assert os.stat(pause_dir(runtime)).st_mode & 0o022 == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.binary(max_size=100) | st.sampled_from([b"null", b"{}", b'{"volume":"%","why":"","until_s":null}']))
def test_file_that_says_nothing_sensible_pauses_everything(runtime: bytes, text: bytes) -> None:
    Path(os.fsdecode(pause_dir(runtime)), "all").write_bytes(text)
    (pause,) = [read_pauses(runtime, NOW_S)[None]]
    assert pause.until_s is None
    assert "can't be read" in pause.why


def test_a_fifo_pauses_everything_and_holds_up_nobody(runtime: bytes) -> None:
    os.mkfifo(Path(os.fsdecode(pause_dir(runtime)), "all"))
    assert "can't be read" in read_pauses(runtime, NOW_S)[None].why


BEAT = Heartbeat(started_ns=1, n=1, version="0", phase="idle")


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Fd]:
    with Fd(os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        yield fd


def beat_in(hold: Fd, kernel: Kernel | None = None) -> HeldBeat:
    held = hold_beat(kernel or Kernel(), hold)
    assert held is not None
    return held


def test_a_beat_is_told_to_all_that_look(hold: Fd) -> None:
    with beat_in(hold) as held:
        held.write(BEAT)
        assert held.read_all() == {own_beat_name(): BEAT}


def test_another_service_of_this_boot_has_it_as_long_as_it_is_open(hold: Fd) -> None:
    with beat_in(hold):
        assert hold_beat(Kernel(), hold) is None
    with beat_in(hold):
        pass


def test_one_that_was_removed_is_made_anew(hold: Fd, tmp_path: Path) -> None:
    for _ in range(2):
        with beat_in(hold) as held:
            held.write(BEAT)
            held.remove(held.name)
    assert list((tmp_path / "nodes").iterdir()) == []


def test_nodes_that_others_can_write_are_not_used(hold: Fd, tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes").chmod(0o777)
    with pytest.raises(Untrusted, match="mode 0777"):
        hold_beat(Kernel(), hold)


def test_what_a_thread_that_hung_writes_late_goes_into_the_beat_and_no_other_file(hold: Fd, tmp_path: Path) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        goes_on.wait()

    with beat_in(hold, Kernel(ActingBefore("write", hang))) as held:
        late = threading.Thread(target=held.write, args=(BEAT,))
        late.start()
        begun.wait()
    others = [Fd(os.open(tmp_path / f"other{n}", os.O_RDWR | os.O_CREAT)) for n in range(20)]
    goes_on.set()
    late.join()
    for other in others:
        with other:
            assert os.fstat(other).st_size == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        held.write(BEAT)
    assert (tmp_path / "nodes" / os.fsdecode(own_beat_name())).stat().st_size > 0
