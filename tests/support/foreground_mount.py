"""`trashd mount` for a test: under a watchdog, and held to its word at the end: no fd more, no traceback.

A daemon is a forked child, which has loaded what this module imports: all of a daemon's modules.
"""

import contextlib
import ctypes
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from resource import RLIMIT_NOFILE, setrlimit

import fusefs.mount.life.daemon  # noqa: F401
from fusefs.core.errors import NotFound
from fusefs.core.mount_counters import MountStats
from fusefs.mount.places.find_mounts import mounts_of, read_counters
from tests.support.fake_dev_fuse import daemon_command
from tests.support.fuse_watchdog import FuseMount, fuse_mount
from tests.support.real_filesystems import tmpfs_volume
from tests.support.seccomp import deny
from tests.support.transports import transport_words
from tests.support.trashd_command import TRASHD

SHARED_LIMIT_S = 4800.0
"""For a mount that many tests have in turn: as long as CI may take."""
_SETTLE_S = 30.0
_GLANCE_S = 0.005
_FSPICK, _FSCONFIG, _FSCONFIG_CMD_RECONFIGURE = 433, 431, 7  # the same numbers on every architecture
_AT_FDCWD = -100

_libc = ctypes.CDLL(None, use_errno=True)
_FAULTS = ("Traceback", "Sanitizer", "runtime error")
"""Of what a daemon says, what never may be; the last two are said by a core that looks for them (make sanitize)."""
_OF_RINGS = ("anon_inode:[io_uring]", "anon_inode:[eventfd]")


@dataclass(frozen=True, slots=True)
class Mounted:
    """A live mount of ours."""

    path: Path
    backing: Path
    fuse: FuseMount
    log: Path  # the daemon's stderr
    n_fds_at_start: int

    @property
    def pid(self) -> int:
        """The daemon's."""
        return self.fuse.pid

    def stats(self) -> MountStats:
        """What the daemon has counted, as `trashd status` finds it; without the start of a command."""
        return read_counters(mounts_of(os.fsencode(self.path))[0]).stats

    def n_nodes(self) -> int:
        """How many nodes the daemon has."""
        return self.stats().gauges["n_nodes"]

    def n_requests_for(self, *operations: str) -> int:
        """Return how many requests for any of these operations the daemon has had."""
        counted = self.stats().operations
        return sum(counted[name].n() for name in operations)

    def n_requests(self) -> int:
        """Return how many requests the daemon has had, except forgets: the kernel sends those at any time."""
        return sum(operation.n() for name, operation in self.stats().operations.items() if name != "forget")

    def n_fds(self) -> int:
        """How many fds the daemon has open now, but for its rings: of these each core may have some more in time."""
        return n_fds_beside_rings(self.pid)

    def forget_all(self) -> None:
        """Let the kernel forget every unused name and node of this mount."""
        forget_all(self.path)

    def settles(self) -> bool:
        """Whether the daemon, all being forgotten, comes back to the fds that it started with.

        The kernel keeps what it is told of at that moment, of a change behind the mount: so it is asked again.
        """

        def has_settled() -> bool:
            self.forget_all()
            return self.n_fds() <= self.n_fds_at_start

        return until(has_settled)


def links(directory: str) -> Iterator[tuple[str, str]]:
    """The symbolic links of a directory of /proc, and where they lead; some may go meanwhile."""
    for name in os.listdir(directory):
        with contextlib.suppress(FileNotFoundError):
            yield name, os.readlink(f"{directory}/{name}")


def n_fds_beside_rings(pid: int) -> int:
    return sum(1 for _fd, target in links(f"/proc/{pid}/fd") if not target.startswith(_OF_RINGS))


def forget_all(mount_point: Path) -> None:
    """Let the kernel forget every unused name and node of a filesystem, as if memory were short.

    A reconfiguration without a change does that for one filesystem, where drop_caches does it for all.
    Source  fs/super.c, reconfigure_super: shrink_dcache_sb
    """
    fd = _checked(_libc.syscall(_FSPICK, _AT_FDCWD, os.fsencode(mount_point), 0))
    try:
        _checked(_libc.syscall(_FSCONFIG, fd, _FSCONFIG_CMD_RECONFIGURE, None, None, 0))
    finally:
        os.close(fd)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def until(is_so: Callable[[], bool], limit_s: float = _SETTLE_S) -> bool:
    """Whether something comes true in time; for what is not announced. To check it takes a quarter of a processor."""
    deadline_s, began_s = time.monotonic() + limit_s, time.thread_time()
    while not is_so():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(max(_GLANCE_S, 3 * (time.thread_time() - began_s)))
        began_s = time.thread_time()
    return True


@contextlib.contextmanager
def trashd_mount(
    source: Path,
    mount_point: Path | None = None,
    options: Sequence[str] = ("coherence=exclusive",),
    *,
    limit_s: float = 100,
    n_fds_max: int | None = None,
    denied: Sequence[int] = (),
    expect_end: bool = False,
    command: Sequence[str | Path] = (TRASHD,),
) -> Iterator[Mounted]:
    """`source` served on `mount_point` (beside it by default) for the time of the `with`; both are made if need be.

    options     as for -o, one each
    n_fds_max   the daemon's RLIMIT_NOFILE, hard
    denied      system calls that it has not, by number
    expect_end  the body ends the daemon: nothing is asked of its fds
    command     what runs `trashd`
    Raises      AssertionError: the daemon kept fds, or wrote a traceback; see fuse_mount for the rest
    """
    mount_point = mount_point or source.with_name(source.name + "-mounted")
    for directory in (source, mount_point):
        directory.mkdir(exist_ok=True)

    def prepare() -> None:
        if n_fds_max is not None:
            setrlimit(RLIMIT_NOFILE, (n_fds_max, n_fds_max))
        for call in denied:
            deny(call)

    if tuple(command) == (TRASHD,) and os.environ.get("TRASHD_TEST_SANITIZED"):
        command = daemon_command()
    options = [*transport_words(options), *options]
    words = ["-o", ",".join(options)] if options else []
    with tempfile.NamedTemporaryFile("ab", prefix="trashd-mount-log-") as log:
        argv = [*command, "mount", source, mount_point, "--foreground", *words]
        try:
            with fuse_mount(argv, mount_point, limit_s, stderr=log.fileno(), prepare=prepare) as fuse:
                os.statvfs(mount_point)
                assert until(lambda: has_begun(mount_point)), "it answers, and never says that it does"
                mounted = Mounted(mount_point, source, fuse, Path(log.name), len(os.listdir(f"/proc/{fuse.pid}/fd")))
                yield mounted
                if not expect_end:
                    assert mounted.settles(), f"fds left: {_list_fds(fuse.pid)}"
        finally:
            said = Path(log.name).read_text(errors="replace")
            assert not any(word in said for word in _FAULTS), said
            if said:
                print("the daemon said:", said)


@contextlib.contextmanager
def fresh_mount(
    *options: str,
    made: contextlib.AbstractContextManager[Path] | None = None,
    limit_s: float = 100,
    n_fds_max: int | None = None,
    expect_end: bool = False,
) -> Iterator[Mounted]:
    """A mount of the empty directory `source` of a fresh volume: a tmpfs, unless `made` makes another."""
    with (
        made or tmpfs_volume() as volume,
        trashd_mount(
            volume / "source",
            options=options or ("coherence=exclusive",),
            limit_s=limit_s,
            n_fds_max=n_fds_max,
            expect_end=expect_end,
        ) as mounted,
    ):
        yield mounted


def has_begun(mount_point: Path) -> bool:
    """Whether a mount of root's, which answers, has all that makes it fast, and has opened what it needs."""
    with contextlib.suppress(NotFound):
        return bool(read_counters(mounts_of(os.fsencode(mount_point))[0]).fast_paths)
    return False


def _list_fds(pid: int) -> list[str]:
    return sorted(f"{fd} -> {target}" for fd, target in links(f"/proc/{pid}/fd"))
