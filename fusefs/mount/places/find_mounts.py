"""Finds the trashd mounts that this process sees, and their counters. Never accesses a mount, since that may hang."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress

from fusefs.core import uring_choice
from fusefs.core.errors import NotFound, NotPermitted, TrashdError
from fusefs.core.mount_counters import MountStats, ObservedMount, decode_counters
from fusefs.core.printable_names import printable
from fusefs.linux.fd import Fd
from fusefs.linux.file_locks import is_locked
from fusefs.linux.mount_calls import claim_name
from fusefs.linux.mountinfo import Mount, read_mounts
from fusefs.linux.runtime_directories import MOUNTS_RUNTIME
from fusefs.mount.places import runtime_dir
from fusefs.mount.places.mount_points import top_mount

_MAX_BYTES = 1 << 18
_MAX_LINKS = 40


def all_mounts() -> list[Mount]:
    """Return the trashd mounts whose counters this user may read, without duplicates."""
    mounts = read_mounts()
    visible = [mount for mount in mounts if mount.is_trashd() and top_mount(mount.point, mounts) is mount]
    readable = [mount for mount in visible if mount.owner in (0, os.geteuid())]
    return list({mount.device: mount for mount in reversed(readable)}.values())[::-1]


def mounts_of(path: bytes) -> list[Mount]:
    """Return the mount that contains a path, or else the mounts whose source is the path. Raises  NotFound"""
    mounts = read_mounts()
    at = _follow(os.path.abspath(path), mounts)
    mount = top_mount(at, mounts)
    if mount is not None and mount.is_trashd():
        return [mount]
    serving = [one for one in mounts if one.is_trashd() and one.source == at and top_mount(one.point, mounts) is one]
    if not serving:
        raise NotFound(f"trashd mount at {printable(path)}", "findmnt -t fuse.trashd lists all trashd mounts")
    return serving


def read_counters(mount: Mount) -> ObservedMount:
    """Return the counters of a mount, and its fast paths.

    Raises  NotFound: the mount has no counters; NotPermitted: another user's mount; TrashdError: they can't be decoded
    """
    point = printable(mount.point)
    if mount.owner not in (0, os.geteuid()):
        raise NotPermitted(f"the counters of {point}", "only the user who mounted it can read them")
    device = mount.st_dev()
    for path in _counter_files(mount):
        with suppress(FileNotFoundError, NotADirectoryError):
            stats, is_running = _read(path)
            if stats.device == device:
                states = _fast_paths(os.path.join(os.path.dirname(path), runtime_dir.FAST_PATHS), stats)
                return ObservedMount(mount.point, mount.source, stats, is_running, states)
    hint = "its daemon has no runtime directory, or runs an older version of trashd"
    if mount.owner == 0 and os.geteuid():
        hint = "its daemon is of an older version, or in another mount namespace; root may be able to find the counters"
    raise NotFound(f"the counters of {point}", hint)


def remove_stale_counters(mount: Mount) -> None:
    """Remove the counters that killed daemons left behind, if they have the device number of this new mount.

    The kernel reuses these numbers, and processes in other mount namespaces find a mount's counters only by its number.
    """
    above, own, device = (
        runtime_dir.base_directory(),
        runtime_dir.path_of(mount.point, runtime_dir.STATS),
        mount.st_dev(),
    )
    for path in _all_counter_files(above) if above is not None else ():
        with suppress(OSError, TrashdError):  # removed in the meantime, or written by another version
            if path != own and _read(path)[0].device == device:
                os.unlink(path)


def _counter_files(mount: Mount) -> Iterator[bytes]:
    """Yield the paths where a mount's counters may be: first those for its current mount points, then all others, since
    it may have been moved."""
    above = MOUNTS_RUNTIME if mount.owner == 0 else runtime_dir.base_directory()
    if above is None:
        return
    places = [one.point for one in read_mounts() if one.device == mount.device]
    usual = [b"/".join([above, claim_name(point), runtime_dir.STATS]) for point in places]
    yield from usual
    yield from _all_counter_files(above)


def _all_counter_files(above: bytes) -> Iterator[bytes]:
    with suppress(FileNotFoundError, PermissionError):
        yield from (b"/".join([above, name, runtime_dir.STATS]) for name in os.listdir(above))


def _read(path: bytes) -> tuple[MountStats, bool]:
    with _open(path) as fd:
        is_running = is_locked(fd)  # before the counters are read: if the daemon has ended, these are its last ones
        return decode_counters(os.read(fd, _MAX_BYTES)), is_running


def _fast_paths(path: bytes, stats: MountStats) -> tuple[uring_choice.FastPathState, ...]:
    """Return the fast paths in a file, if the daemon of `stats` wrote it. Raises  TrashdError: it can't be decoded"""
    with suppress(FileNotFoundError), _open(path) as fd:
        report = uring_choice.decode_report(os.read(fd, _MAX_BYTES))
        if (report.device, report.pid) == (stats.device, stats.table.pid):
            return tuple(_limited_for_now(one, stats) for one in report.fast_paths)
    return ()


def _limited_for_now(state: uring_choice.FastPathState, stats: MountStats) -> uring_choice.FastPathState:
    """Return the state of a fast path, including a limit that applies only for the moment."""
    if state.name == uring_choice.FastPath.ENGINE.value and state.is_on and stats.gauges.get("is_slow"):
        return uring_choice.FastPathState(state.name, is_on=True, why=uring_choice.SLOW_BACKING)
    return state


def _open(path: bytes) -> Fd:
    fd = Fd(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        fd.close()
        raise FileNotFoundError(path)
    return fd


def _follow(path: bytes, mounts: Sequence[Mount]) -> bytes:
    """Resolve the symbolic links in a path, up to the first trashd mount on it."""
    remaining_names = path.split(b"/")[:0:-1]
    at, n_links = b"/", 0
    while remaining_names:
        name = remaining_names.pop()
        if name in (b"", b"."):
            continue
        child_path = os.path.dirname(at) if name == b".." else os.path.join(at, name)
        mount = top_mount(child_path, mounts)
        if mount is not None and mount.is_trashd():
            return child_path
        target = b""
        with suppress(OSError):  # not a link, or missing: then nothing is mounted there either
            target = os.readlink(child_path)
        if not target:
            at = child_path
            continue
        n_links += 1
        if n_links > _MAX_LINKS:
            break
        at = b"/" if target.startswith(b"/") else at
        remaining_names += target.split(b"/")[::-1]
    return at
