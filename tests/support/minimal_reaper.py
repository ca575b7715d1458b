"""A small reaper: a process that holds the service's lock, tells its status, and reaps what was left to it."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from fusefs.core.container_states import State
from fusefs.core.names import ContainerId
from fusefs.core.record import quote_path
from fusefs.core.service_status import Status, VolumePhase, VolumeStatus
from fusefs.linux.file_locks import take_lock
from fusefs.linux.runtime_directories import make_dir, runtime_dir
from fusefs.reaper.reap import reap
from fusefs.service.state_files import write_status
from fusefs.store.as_owner import call_as_owner
from fusefs.store.find_stores import folders_for_caller
from fusefs.store.layout import UserFolder
from tests.support.real_filesystems import tmpfs_over
from tests.support.store_verbs import opened, raw

_PAUSE_S = 0.01


@contextmanager
def own_runtime_dir() -> Iterator[bytes]:
    """The service's runtime directory, with no other service in it."""
    directory = make_dir(runtime_dir())
    with tmpfs_over(Path(os.fsdecode(directory))):
        yield directory


@contextmanager
def small_reaper(
    volume: Path,
    phase: VolumePhase = VolumePhase.REAPING,
    why: str = "",
    *,
    reaps: bool = True,
    also: Callable[[], object] = lambda: None,
) -> Iterator[int]:
    """Start a process that reports a volume in that phase, as the service does; yield its pid.

    reaps  whether the process reaps orphans
    also   called in that process before each scan for orphans
    """
    with own_runtime_dir() as directory:
        ready, ready_write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(ready)
                _serve(volume, directory, phase, why, ready_write_fd, reaps=reaps, also=also)
            finally:
                os._exit(1)
        os.close(ready_write_fd)
        try:
            with os.fdopen(ready, "rb") as pipe:
                assert pipe.read(1) == b"+"
            yield pid
        finally:
            # In the middle of a reap a kill could leave a container that the checker wonders at.
            os.kill(pid, signal.SIGTERM if reaps else signal.SIGKILL)
            os.waitpid(pid, 0)


def _serve(
    volume: Path,
    directory: bytes,
    phase: VolumePhase,
    why: str,
    ready_fd: int,
    *,
    reaps: bool,
    also: Callable[[], object],
) -> None:
    lock = take_lock(directory)
    assert lock is not None
    with opened(volume) as store:
        status = VolumeStatus(path=quote_path(raw(volume)), id=store.volume.id, phase=phase, why=why)
        write_volume_status(directory, status)
        ends: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _frame: ends.append(number))
        os.write(ready_fd, b"+")
        os.close(ready_fd)
        while not ends:
            also()
            for folder in folders_for_caller(store) if reaps else ():
                with folder:
                    call_as_owner(folder, partial(_reap_claimed, folder), None)
            time.sleep(_PAUSE_S)


def _reap_claimed(folder: UserFolder, _visible: object) -> None:
    """Reap what is past its retention: what was claimed."""
    with folder.open(State.REAPING) as claimed:
        for name in folder.store.kernel.list(claimed):
            reap(folder, ContainerId(name.decode()))


def write_volume_status(directory: bytes, *volumes: VolumeStatus) -> None:
    """Write a service's status file with these volumes."""
    now = time.time_ns()
    write_status(
        directory,
        Status(version="0", pid=os.getpid(), boot_id="", started_ns=now, updated_ns=now, volumes=volumes),
    )
