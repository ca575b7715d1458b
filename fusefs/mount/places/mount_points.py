"""Checks of mount points: what is mounted there, whether its daemon answers, and whether a new mount is possible."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import Enum

from fusefs.core.errors import IsMountPoint, MountInside, NotFound, NotPermitted, Refused
from fusefs.core.printable_names import printable, shell_word
from fusefs.linux.children import ask_each
from fusefs.linux.mountinfo import (
    DAEMON_GONE,
    FilesystemPath,
    Mount,
    covering_mount_id,
    find_place,
    is_inside,
    read_mounts,
    relative_to,
)
from fusefs.linux.runtime_directories import MOUNTS_RUNTIME

_DEAD = b"dead"


class Health(Enum):
    """Whether a daemon serves a mount. SILENT: the daemon is running, but does not answer."""

    ALIVE = "alive"
    DEAD = "dead"
    SILENT = "silent"


def real_path(path: bytes) -> bytes:
    """Return the path without symbolic links, as in mountinfo. Does not access a mount at the path itself."""
    parent, name = os.path.split(os.path.abspath(path))
    path = os.path.join(os.path.realpath(parent), name)
    return path if top_mount(path, read_mounts()) else os.path.realpath(path)


def top_mount(point: bytes, mounts: Sequence[Mount]) -> Mount | None:
    """Return the mount that is visible at exactly this path."""
    return next((mount for mount in reversed(mounts) if mount.point == point), None)


def other_paths(path: bytes, mounts: Sequence[Mount]) -> list[bytes]:
    """Return the paths at which other mounts of the same filesystem show a directory, or something in it.

    path  without symbolic links
    """
    place = find_place(path, [mount for mount in mounts if not mount.is_trashd()])
    paths = []
    for mount in mounts:
        root = FilesystemPath(mount.device, mount.root)
        if place is None or not (root.holds(place) or place.holds(root)):
            continue
        visible_path = (
            os.path.join(mount.point, relative_to(place.path, root.path)) if root.holds(place) else mount.point
        )
        is_visible = covering_mount_id(visible_path, mounts) == mount.mnt_id and not is_inside(
            visible_path, MOUNTS_RUNTIME
        )
        if is_visible and not is_inside(visible_path, path):
            paths.append(visible_path)
    return paths


def mount_of_device(device: bytes) -> Mount | None:
    """Return the mount of a FUSE connection, even if it was moved; None if it does not exist (any more)."""
    return next((mount for mount in reversed(read_mounts()) if mount.device == device and mount.is_trashd()), None)


def health(point: bytes) -> Health:
    """Check a trashd mount with statfs, since the kernel might answer a stat without asking the daemon."""
    (_point, reply), *_ = ask_each([point], _probe, set(), lambda point: point)
    return Health.SILENT if reply is None else Health.DEAD if reply == _DEAD else Health.ALIVE


def _probe(point: bytes) -> bytes:
    try:
        os.statvfs(point)
    except OSError as error:
        return _DEAD if error.errno in DAEMON_GONE else b""
    return b""


def check_mount(source: bytes, target: bytes, *, replaces: bool) -> Mount | None:
    """Check that a mount is possible. Returns  the dead trashd mount to be replaced, if there is one

    source, target  as returned by `real_path`
    Raises          Refused and its subclasses, NotFound, NotPermitted: the mount is not possible
    """
    mounts = read_mounts()
    dead = _find_dead_mount(target, top_mount(target, mounts), replaces=replaces)
    if target == b"/":
        raise IsMountPoint(target, "choose another mount point: a mount over the root directory would not be visible")
    for path, hint in (
        (source, "name an existing directory to mount"),
        (target, f"create it first: mkdir {shell_word(target)}"),
    ):
        if dead is None or path != target:
            _require_directory(path, hint)
    _refuse_ours_below(source, [mount for mount in mounts if mount is not dead])
    if source != target:
        _refuse_overlap(source, target, mounts)
    if dead is None and (inside := [m for m in mounts if m.point != target and is_inside(m.point, target)]):
        raise MountInside(
            target,
            f"the new mount would hide {printable(inside[0].point)}: unmount that first, and mount it again afterwards",
        )
    return dead


def silent_daemon_error(target: bytes) -> Refused:
    """Return the error for a trashd mount whose daemon is running, but does not answer."""
    path = printable(target)
    hint = f"if this persists, remove the mount: trashd umount --force {shell_word(target)}"
    return Refused(f"{path}: already mounted by trashd, but the daemon does not respond", hint)


def _find_dead_mount(target: bytes, mount: Mount | None, *, replaces: bool) -> Mount | None:
    if mount is None or not mount.is_trashd():
        return None
    path = printable(target)
    match health(target):
        case Health.ALIVE:
            hint = f"the mount works; to remove it, run: trashd umount {shell_word(target)}"
            raise Refused(f"{path}: already mounted by trashd", hint)
        case Health.SILENT:
            raise silent_daemon_error(target)
        case Health.DEAD if not replaces:
            raise Refused(
                f"{path}: this is a trashd mount whose daemon has died",
                "to restart it, run the same command with --replace",
            )
    return mount


def _require_directory(path: bytes, hint: str) -> None:
    try:
        os.close(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    except FileNotFoundError as error:
        raise NotFound(path, hint) from error
    except NotADirectoryError as error:
        raise Refused(f"{printable(path)}: not a directory", hint) from error
    except PermissionError as error:
        raise NotPermitted(path, "a directory on the path belongs to another user") from error
    except OSError as error:
        if error.errno not in DAEMON_GONE:
            raise
        raise Refused(
            f"{printable(path)}: inside a FUSE mount whose daemon has died", "unmount that mount first"
        ) from error


def _refuse_ours_below(source: bytes, mounts: Sequence[Mount]) -> None:
    """Refuse a tree inside a trashd mount: two daemons would serve it, and its trash would not be found."""
    held_by = max((m for m in mounts if is_inside(source, m.point)), key=lambda m: len(m.point), default=None)
    if held_by is not None and held_by.is_trashd():
        raise Refused(
            f"{printable(source)}: inside the trashd mount at {printable(held_by.point)}",
            f"mount its source directory instead: {printable(held_by.source)}",
        )


def _refuse_overlap(source: bytes, target: bytes, mounts: Sequence[Mount]) -> None:
    """Refuse if one directory contains the other, by path or through bind mounts."""
    below_source, below_target = find_place(source, mounts), find_place(target, mounts)
    if below_source is not None and below_source == below_target:
        raise Refused(
            f"{printable(source)}: the same directory as {printable(target)}",
            f"to mount it over itself, name it only once: trashd mount {shell_word(target)}",
        )
    sides = ((source, below_source), (target, below_target))
    for (outer, outer_place), (inner, inner_place) in (sides, sides[::-1]):
        if is_inside(inner, outer) or (outer_place and inner_place and outer_place.holds(inner_place)):
            raise Refused(
                f"{printable(inner)}: inside {printable(outer)}",
                "choose a mount point that does not overlap SRC, or mount SRC over itself: trashd mount SRC",
            )
