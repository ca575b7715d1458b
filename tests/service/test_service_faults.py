"""A volume fails, fills or hangs below the service: it rests and says why, others go on, and SIGTERM ends it all."""

import errno
import fcntl
import os
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fusefs.core.service_status import VolumePhase
from fusefs.linux.runtime_directories import SYSTEM_RUNTIME
from tests.support.fuse_eio import broken_volume
from tests.support.fuse_slow import slow_volume
from tests.support.many_files import fill
from tests.support.real_filesystems import full, loop_volume, mount_of, tmpfs_volume
from tests.support.service_process import LIMIT_S, QUICK, Service, configure, places, service
from tests.support.service_timers import SCALED
from tests.support.small_orphans import EXPIRED, orphan_in
from tests.support.store_verbs import assert_silent, init, own, recover_all, swap, tmpfs_store
from tests.support.volume_under_service import events_in

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(180)]

SLOWLY = QUICK + 'max_rate = "100/s"\n'
_EXT4_IOC_SHUTDOWN = 0x8004587D
_WITHOUT_LOG = struct.pack("=I", 2)


def is_gone(volume: Path, identifier: str) -> bool:
    """Whether a container is in no state any more; asks only names, of root's own folder."""
    return not any((volume / ".trashd/u/0").glob(f"*/{identifier}"))


def is_in(volume: Path, identifier: str, state: str) -> bool:
    return (volume / ".trashd/u/0" / state / identifier).exists()


def assert_served(running: Service, volume: Path, name: str) -> None:
    identifier = orphan_in(volume, name, EXPIRED).id
    running.until(lambda: is_gone(volume, identifier))


def succeeds(*command: str | Path) -> bool:
    """Whether a command does what it is for: a volume may be busy for a moment."""
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def events(base: Path) -> list[str]:
    return [event["event"] for event in events_in(base)]


# Errors


@pytest.mark.long
@pytest.mark.needs("fuse")
def test_errors_in_many_orphans_give_the_volume_a_rest_and_the_reason_is_told(base: Path, volume: Path) -> None:
    with broken_volume() as broken:
        init(broken.path)
        ids = [orphan_in(broken.path, f"job{n}", EXPIRED, {"unlink-a": "1"}).id for n in range(4)]
        with service(base, broken.path, volume) as running:
            status = running.until_phase(broken.path, VolumePhase.BROKEN)
            assert "Input/output error" in status.why
            assert "tried again" in status.why
            assert status.faults
            assert_served(running, volume, "a")
            assert running.volume(broken.path).phase is VolumePhase.BROKEN
            left = [one for one in ids if not is_in(broken.path, one, "quarantine")]
            running.reload()
            running.until(lambda: all(is_in(broken.path, one, "quarantine") for one in left))
            running.until(lambda: "mended" in events(base))
            assert_served(running, broken.path, "healthy")
            running.stop()
        assert events(base).index("broken") < events(base).index("mended")
        assert_silent(broken.path)


def shut_down(filesystem: Path) -> None:
    root = os.open(filesystem, os.O_RDONLY)
    fcntl.ioctl(root, _EXT4_IOC_SHUTDOWN, _WITHOUT_LOG)
    os.close(root)


def find_fault(filesystem: Path) -> None:
    """Have the kernel find an error in it, of which it becomes read-only."""
    entry = mount_of(filesystem)
    assert entry is not None
    Path("/sys/fs/ext4", Path(os.fsdecode(entry.source)).name, "trigger_fs_error").write_text("test")


@pytest.mark.needs("loop")
@pytest.mark.parametrize(("harm", "why"), [(shut_down, "Input/output error"), (find_fault, "Read-only file system")])
def test_filesystem_that_fails_in_the_middle_of_a_reap_is_left_alone(
    base: Path, volume: Path, harm: Callable[[Path], None], why: str
) -> None:
    with loop_volume("ext4", 64, mount_options=["errors=remount-ro"]) as sick:
        init(sick)
        large = swap(fill(sick / "large", 3000), options=EXPIRED).id
        with service(base, sick, volume, config=SLOWLY) as running:
            running.until(lambda: is_in(sick, large, "reaping"))
            harm(sick)
            assert why in running.until_phase(sick, VolumePhase.BROKEN).why
            assert_served(running, volume, "a")
            running.stop()


@pytest.mark.needs("loop")
def test_volume_that_is_read_only_for_a_while_is_served_afterwards(base: Path, volume: Path) -> None:
    with loop_volume("ext4", 64) as sick:
        init(sick)
        identifier = orphan_in(sick, "job").id
        with service(base, sick, volume, timers=SCALED._replace(rest_pause_s=0.5)) as running:
            running.until_phase(sick, VolumePhase.IDLE)
            running.until(lambda: succeeds("mount", "-o", "remount,ro", sick))
            configure(base, QUICK + 'retention = "0s"\nminimum_age = "0s"\n')
            running.reload()
            assert "Read-only file system" in running.until_phase(sick, VolumePhase.BROKEN).why
            assert_served(running, volume, "a")
            assert succeeds("mount", "-o", "remount,rw", sick)
            running.until(lambda: is_gone(sick, identifier))
        assert_silent(sick)


# No space


@contextmanager
def served_small(filesystem: str) -> Iterator[tuple[Path, Path]]:
    few = [["-N", "3000"]] if filesystem == "ext4" else []
    tmpfs = tmpfs_volume("16m", ["nr_inodes=3000"])
    with tmpfs if filesystem == "tmpfs" else loop_volume(filesystem, 64, *few) as volume:
        init(volume)
        with own(volume) as folder:
            drop = Path(os.fsdecode(folder.path())) / "drop"
        yield volume, drop
        assert recover_all(volume) == []  # fills the reserve up again
        assert_silent(volume)


SMALL = [
    "tmpfs",
    pytest.param("ext4", marks=pytest.mark.needs("loop")),
    pytest.param("xfs", marks=pytest.mark.needs("loop", "xfs")),
]


@pytest.mark.parametrize("filesystem", SMALL)
def test_full_volume_is_reaped(filesystem: str) -> None:
    with served_small(filesystem) as (volume, _drop), places() as base:
        early = orphan_in(volume, "early", EXPIRED).id
        late = fill(volume / "late", 10)
        with full(volume), service(base, volume) as running:
            running.until(lambda: is_gone(volume, early))
            thrown = swap(late, options=EXPIRED).id
            running.until(lambda: is_gone(volume, thrown))
            assert running.volume(volume).phase is not VolumePhase.BROKEN


@pytest.mark.needs("loop")
def test_what_could_not_be_taken_in_for_want_of_space_is_taken_in_later() -> None:
    with served_small("ext4") as (volume, drop), places() as base:
        dropped = [fill(volume / f"dropped{n}", 10) for n in range(3)]
        with service(base, volume) as running:
            with full(volume):
                for one in dropped:
                    one.rename(drop / one.name)
                running.until(lambda: running.volume(volume).faults)
                assert any(drop.iterdir())
            running.until(lambda: not any(drop.iterdir()))


def test_service_goes_on_where_nothing_of_its_own_can_be_written() -> None:
    with tmpfs_store() as volume, places() as base, tmpfs_volume("1m") as state:
        runtime = Path(os.fsdecode(SYSTEM_RUNTIME))
        config = f'audit = "{state}/audit"\n{QUICK}'
        with _service_with(base, volume, config, state) as running:
            running.until_phase(volume, VolumePhase.IDLE)
            with full(state, inodes=False), full(runtime.parent, inodes=False):
                for n in range(30):
                    orphan_in(volume, f"job{n}", EXPIRED)
                for part in ("orphans", "reaping"):
                    running.until(lambda part=part: not any((volume / ".trashd/u/0" / part).iterdir()))  # type: ignore[misc]
            assert_served(running, volume, "after")
            running.until(lambda: running.volume(volume).n_reaped > 30)
            running.stop()
            assert running.process.returncode == 0
        assert "it lacks" in running.log.read_text()


def test_service_starts_where_it_can_remember_nothing() -> None:
    with tmpfs_store() as volume, places() as base, tmpfs_volume(options=["ro"]) as state:
        config = f'audit = "{state}/log/audit"\n{QUICK}'
        with _service_with(base, volume, config, state / "missing") as running:
            assert_served(running, volume, "a")
            running.stop()
            assert running.process.returncode == 0


@contextmanager
def _service_with(base: Path, volume: Path, config: str, state: Path) -> Iterator[Service]:
    (base / "config.d").mkdir()
    (base / "config.d/test.toml").write_text(config)
    with service(base, volume, environment={"STATE_DIRECTORY": str(state)}) as running:
        yield running


# A server that is away


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("what", ["", "f"], ids=["all-of-it", "some-of-it"])
def test_server_that_is_away_for_a_while_is_waited_for_and_that_is_said(what: str) -> None:
    with tmpfs_volume() as source, slow_volume(source, 0) as slow, places() as base:
        init(slow.path)
        identifier = swap(fill(slow.path / "large", 300), options=EXPIRED).id
        with service(base, slow.path, config=SLOWLY) as running:
            running.until(lambda: slow.n_messages.get("unlink", 0) > 20)
            slow.refuse(errno.ENOTCONN, what)
            running.until(lambda: "waiting for the server: Transport" in running.volume(slow.path).why)
            slow.refuse(0)
            running.until(lambda: is_gone(source, identifier))
        assert not {"broken", "quarantined"} & set(events(base))
        assert_silent(slow.path)


# A volume that hangs


@contextmanager
def hanging(pid: int) -> Iterator[None]:
    """A FUSE daemon that answers nothing for the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def daemon_of(mount_point: Path) -> int:
    wanted = {os.fsencode(mount_point), b"tests.support.fuse_eio"}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError):
            if wanted <= set(Path("/proc", name, "cmdline").read_bytes().split(b"\0")):
                return int(name)
    raise LookupError(mount_point)


@pytest.mark.long
@pytest.mark.needs("fuse")
def test_volume_that_hangs_in_the_middle_of_a_reap_holds_nothing_else_up(base: Path, volume: Path) -> None:
    with broken_volume() as hung:
        init(hung.path)
        large = swap(fill(hung.path / "large", 2000), options=EXPIRED).id
        with service(base, hung.path, volume, config=SLOWLY) as running:
            running.until(lambda: is_in(hung.backing, large, "reaping"))
            with hanging(daemon_of(hung.path)):
                assert_served(running, volume, "a")
                assert_served(running, volume, "b")
                running.stop()
        with service(base, hung.path) as running:
            running.until(lambda: is_gone(hung.backing, large))
        assert_silent(hung.path)


@pytest.mark.needs("fuse")
def test_service_that_looks_for_volumes_ends_at_once_though_one_hangs(base: Path, volume: Path) -> None:
    with broken_volume() as hung:
        init(hung.path)
        with service(base, hung.path, volume) as running:
            running.until_phase(hung.path, VolumePhase.IDLE)
            with hanging(daemon_of(hung.path)):
                running.process.send_signal(signal.SIGHUP)
                running.until(lambda: "RELOADING=1" in running.said())
                assert_served(running, volume, "a")
                running.stop()


def test_idle_service_ends_with_its_forker() -> None:
    """Its manager starts it again; it would not notice itself before something is due."""
    with tmpfs_store() as volume, places() as base, service(base, volume) as running:
        os.kill(running.forker(), signal.SIGKILL)
        assert running.process.wait(LIMIT_S) != 0
