"""The reaper service as tests run it: the real command, told apart from the machine's own by its directories."""

import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fusefs.core.service_status import ObservedStatus, VolumePhase, VolumeStatus
from fusefs.linux.runtime_directories import SYSTEM_RUNTIME
from fusefs.service import timers as service_timers
from fusefs.service.state_files import read_status
from fusefs.service.timers import ServiceTimers
from fusefs.store.stage import SwapOptions
from tests.support.make_trees import fill
from tests.support.mount_namespaces import ROOTS
from tests.support.other_users import become
from tests.support.proc_stat import all_stats, stop
from tests.support.real_filesystems import tmpfs_over
from tests.support.small_orphans import EXPIRED, orphan_in
from tests.support.store_verbs import forge, place, swap, tree_of
from tests.support.trashd_command import TRASHD, instead_of_exec

REAL = ServiceTimers()
_WAITED_FOR = (
    "find_pause_s", "session_pause_s", "around_pause_s", "around_least_pause_s", "space_pause_s", "linger_pause_s",
    "registries_pause_s", "status_pause_s", "node_poll_pause_s", "retry_pause_s", "child_pause_s", "tend_pause_s",
    "unread_pause_s", "patience_s", "silent_limit_s",
)  # fmt: skip
SCALED = REAL._replace(
    **{name: getattr(REAL, name) / 10 for name in _WAITED_FOR},
    registries_pauses=2,
    node_beat_pause_s=0.3,
    doubt_pauses_s=tuple(pause_s / 10 for pause_s in REAL.doubt_pauses_s),
)
"""What tests wait for. A volume that failed rests as long as ever: tests see it rest, and end that by a reload."""
QUICK = "[defaults]\npaced = false\n"
"""As fast as it can: by default it yields to what else the machine does, here the other tests of a run."""
LIMIT_S = 60.0
END_S = 20.0
"""SIGTERM ends the service within a second; the rest is this machine's, which may be busy."""
_GLANCE_S = 0.02


class Service:
    """A running `trashd service run`."""

    def __init__(
        self, process: subprocess.Popen[bytes], notified: socket.socket, log: Path, runtime: bytes = SYSTEM_RUNTIME
    ) -> None:
        self.process = process
        self._runtime = runtime
        self.log = log
        self._notified = notified
        self._messages = b""

    def read_messages(self) -> str:
        """Return all messages that the service has sent to systemd, as sd_notify(3) does."""
        while select.select([self._notified], [], [], 0)[0]:
            self._messages += self._notified.recv(4096) + b"\n"
        return self._messages.decode()

    def wait_ready(self, n_times: int = 1) -> None:
        """Wait until the service has sent READY so many times."""
        self.until(lambda: self.read_messages().count("READY=1") >= n_times)

    def until(self, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        """Wait for something to become true. Raises  TimeoutError with the service's log"""
        ends_at, looked_s = time.monotonic() + limit_s, time.thread_time()
        while not condition():
            if time.monotonic() > ends_at or self.process.poll() is not None:
                what = "ended" if self.process.poll() is not None else "goes on"
                raise TimeoutError(f"the service {what}: {self.read_status()}; its log:\n{self.log.read_text()}")
            # A process that looks all the time leaves nothing to the service, which is idle by its priority.
            select.select([], [], [], max(_GLANCE_S, 3 * (time.thread_time() - looked_s)))
            looked_s = time.thread_time()

    def read_status(self) -> ObservedStatus | None:
        return read_status(self._runtime)

    def volume(self, path: Path) -> VolumeStatus:
        observed_status = self.read_status()
        assert observed_status is not None
        (found,) = [one for one in observed_status.status.volumes if one.root_path() == os.fsencode(path)]
        return found

    def knows(self, path: Path) -> bool:
        """Return whether the service's status lists a volume."""
        observed_status = self.read_status()
        return observed_status is not None and any(
            one.root_path() == os.fsencode(path) for one in observed_status.status.volumes
        )

    def until_phase(self, path: Path, *phases: VolumePhase) -> VolumeStatus:
        self.until(lambda: self.volume(path).phase in phases)
        return self.volume(path)

    def children(self) -> list[int]:
        """The processes that act for users."""
        forker = _children_of(self.process.pid)
        return [child for one in forker for child in _children_of(one)]

    def forker(self) -> int:
        (pid,) = _children_of(self.process.pid)
        return pid

    def processes(self) -> list[int]:
        """All that live of it: itself, the forker, those that act for users, and their workers."""
        return _group_of(self.process.pid)

    def is_alone(self) -> bool:
        """Whether no child acts for users, or is about to end."""
        return set(self.processes()) == {self.process.pid, self.forker()}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Stopped for the block: what happens meanwhile it learns of all at once."""
        stop(self.process.pid)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """SIGTERM, which ends it soon, whatever hangs."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(END_S)

    def reload(self) -> None:
        """SIGHUP, and wait until it is done."""
        n_ready = self.read_messages().count("READY=1")
        self.process.send_signal(signal.SIGHUP)
        self.wait_ready(n_ready + 1)

    def kill(self) -> None:
        """kill -9, and wait for its children too."""
        self.process.kill()
        self.process.wait()
        ends_at = time.monotonic() + LIMIT_S
        while self.processes():
            assert time.monotonic() < ends_at, "children outlive their service"
            select.select([], [], [], _GLANCE_S)


@contextmanager
def places() -> Iterator[Path]:
    """A directory for the service's configuration, state and logs; what it runs with is its own for the block.

    Root's registry neither: it is watched, so what other tests' commands register would wake the service.
    """
    runtime = Path(os.fsdecode(SYSTEM_RUNTIME)).parent
    with tmpfs_over(runtime, "0711"), tmpfs_over(ROOTS, "0755"), tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o755)
        yield Path(base)


def configure(base: Path, config: str) -> None:
    """Write a configuration; the audit log is `audit` beside it."""
    # An orphan that a test makes before the service comes would be kept for an hour.
    grace = "" if "grace" in config else 'grace = "0s"\n'
    (base / "config.toml").write_text(f'audit = "{base}/audit"\n{grace}{config}')


@contextmanager
def service(
    base: Path,
    *volumes: Path,
    config: str = QUICK,
    environment: dict[str, str] | None = None,
    user: int | None = None,
    command: Sequence[str | Path] = (TRASHD,),
    runtime: Path | None = None,
    timers: ServiceTimers = SCALED,
    prepare: Callable[[], object] = lambda: None,
) -> Iterator[Service]:
    """`trashd service run` on some volumes, ready; stopped at the end of the block, so that nothing is left half-done.

    base  of `places`: a second service there finds what the first one left; a user may write in their own
    user  whose own service it is; root's if None
    command  what runs `trashd`; another program than the script has the timers of production
    runtime  its runtime directory, if not the machine's
    timers   how long it pauses and waits
    prepare  what its process calls first
    """
    configure(base, config)
    log, address = base / "log", base / "notify"
    address.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified, log.open("ab") as stderr:
        notified.bind(str(address))
        address.chmod(0o777)
        argv = [*command, "service", "run", "--config", base, *(f"--volume={volume}" for volume in volumes)]
        variables = {**os.environ, "NOTIFY_SOCKET": str(address), "STATE_DIRECTORY": str(base), **(environment or {})}
        variables |= {"RUNTIME_DIRECTORY": str(runtime)} if runtime is not None else {}
        default = SYSTEM_RUNTIME if user is None else os.fsencode(base / "trashd")
        if user is not None:
            variables |= {"XDG_RUNTIME_DIR": str(base), "RUNTIME_DIRECTORY": ""}

        def begin() -> None:
            service_timers.current = timers
            prepare()
            if user is not None:
                become(user)

        with subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            env=variables,
            process_group=0,
            preexec_fn=instead_of_exec(argv, variables, begin),  # noqa: PLW1509
        ) as process:
            running = Service(process, notified, log, default if runtime is None else os.fsencode(runtime))
            try:
                running.wait_ready()
                yield running
                if process.poll() is None:
                    running.stop()
            finally:
                if process.poll() is None:
                    running.kill()


def _group_of(leader: int) -> list[int]:
    """The processes of a group that have not ended."""
    return [pid for pid, (state, _parent, group, *_) in all_stats() if int(group) == leader and state != "Z"]


def _children_of(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


SLOW = QUICK + 'max_rate = "1000/s"\n'
"""What is large takes its time, on the fastest disk too."""


def outwait(running: Service, volume: Path) -> None:
    """Wait until all that is due by now has had its turn: it comes before this one."""
    marker = tree_of(orphan_in(volume, f"marker-{time.monotonic_ns()}", EXPIRED)).parent
    claimed = marker.parents[1] / "reaping" / marker.name
    running.until(lambda: not marker.exists() and not claimed.exists())


def aged(volume: Path, name: str, age_s: int, size_mb: int = 0, options: SwapOptions | None = None) -> str:
    """The id of an orphan that is so old, by its record, and so large."""
    (volume / name).mkdir()
    with (volume / name / "file").open("wb") as file:
        if size_mb:
            os.posix_fallocate(file.fileno(), 0, size_mb << 20)
    identifier = swap(volume / name, options=options or SwapOptions()).id
    record = place(volume, identifier) / "record.json"
    forge(record, created_ns=json.loads(record.read_text())["created_ns"] - age_s * 10**9)
    return identifier


def begin_large(running: Service, volume: Path, n_files: int = 20_000) -> str:
    """The id of an orphan that is being reaped, and with `SLOW` keeps the service busy for a while."""
    fill(volume / "large", n_files)
    identifier = swap(volume / "large", options=EXPIRED).id
    running.until(lambda: is_begun(volume, identifier, n_files))
    return identifier


def is_begun(volume: Path, identifier: str, n_files: int) -> bool:
    if any(volume.glob(f".trashd/u/*/orphans/{identifier}")):
        return False
    for tree in volume.glob(f".trashd/u/*/reaping/{identifier}/tree"):
        with suppress(FileNotFoundError):
            return len(os.listdir(tree)) < n_files
    return True


def objects_in(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one from each line; a line that is being written is none yet."""
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def events_in(base: Path) -> list[dict[str, Any]]:
    """All that the audit log tells."""
    return objects_in(base / "audit")


def audited(base: Path) -> list[dict[str, Any]]:
    """What the audit log tells of orphans."""
    return [event for event in events_in(base) if event["id"]]


def next_due_s(running: Service, volume: Path) -> float:
    """Seconds until something is to be done there, as the service tells it; infinity for never."""
    due_ns = running.volume(volume).next_due_ns
    return float("inf") if due_ns is None else (due_ns - time.time_ns()) / 1e9
