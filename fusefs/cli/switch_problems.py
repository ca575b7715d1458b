"""The kernel's switches and limits, as doctor looks at them: only what something here wants and does not get."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

from fusefs.core.uring_reasons import why_not
from fusefs.linux.fd import Fd
from fusefs.linux.inotify import InotifyMask, open_inotify, watch
from fusefs.linux.mount_lines import MountLine, mount_lines
from fusefs.linux.pressure import PRESSURE, Psi, StallTimes
from fusefs.linux.uring_offer import read_facts
from fusefs.store.adopt import AdoptionProblem

_URING_SETTINGS = tuple(f"{place}/tmpfiles.d/trashd-uring.conf" for place in ("/etc", "/usr/local/lib", "/usr/lib"))
_FUSE_CONF = "/etc/fuse.conf"
_BY_USERS = frozenset({"user", "users", "owner", "group"})
"""Of fstab: others than root may mount it. Source  mount(8)"""


def switch_problems(*, is_reaping: bool) -> Iterator[AdoptionProblem]:
    """What is not as the mounts that this machine names want it, or the reaper; for root, who alone can change it.

    is_reaping  there is something for a reaper
    """
    lines = list(mount_lines())
    yield from _uring(lines)
    yield from _allow_other(lines)
    if is_reaping:
        yield from _inotify()
        yield from _pressure()


def _uring(lines: Sequence[MountLine]) -> Iterator[AdoptionProblem]:
    """A mount with uring=on sets the switch itself; what sets it at boot may not have been run."""
    settings = next(filter(os.path.exists, _URING_SETTINGS), None)
    wanted = [line.place for line in lines if "uring=on" in line.options]
    place = wanted[0] if wanted else settings
    if place is None:
        return
    facts = read_facts()._replace(barred=frozenset())  # cores that this very command may not use are a daemon's
    if wanted and facts.is_enabled is False:
        facts = facts._replace(is_enabled=True)
    why = why_not(facts)
    if why is None:
        return
    without = "take uring=on away there" if wanted else "trashd service install --no-uring"
    if facts.is_enabled is False:
        hint = f"systemd-tmpfiles --create {settings}"
    elif facts.disabled:
        hint = f"sysctl kernel.io_uring_disabled=0, or {without}"
    else:
        hint = without
    what = f"FUSE over io_uring is wanted, and can't be had ({why}): a mount with uring=on fails"
    yield AdoptionProblem(place, what, hint)


def _allow_other(lines: Sequence[MountLine]) -> Iterator[AdoptionProblem]:
    """What users may mount for others is refused by fusermount3."""
    wanted = [line.place for line in lines if "allow_other" in line.options and line.options & _BY_USERS]
    if wanted and "user_allow_other" not in map(str.strip, _text(_FUSE_CONF).splitlines()):
        what = f"users can't mount it: allow_other takes the line user_allow_other in {_FUSE_CONF}"
        yield AdoptionProblem(wanted[0], what, f"echo user_allow_other >>{_FUSE_CONF}")


def _inotify() -> Iterator[AdoptionProblem]:
    """What tells the reaper of what is new. Source  inotify(7)"""
    instances = {errno.EMFILE: "fs.inotify.max_user_instances"}
    yield from _used_up(lambda: open_inotify().close(), instances, "no reaper can start")
    watches = {errno.ENOSPC: "fs.inotify.max_user_watches"}
    yield from _used_up(_watch_directory, watches, "the reaper sees what is new some minutes late")


def _watch_directory() -> None:
    with Fd(os.open("/", os.O_PATH)) as root, open_inotify() as inotify:
        watch(inotify, root, InotifyMask.CREATE)


def _used_up(act: Callable[[], None], limits: Mapping[int, str], cost: str) -> Iterator[AdoptionProblem]:
    """The limit that something meets, if it does. limits: by the errno that tells it"""
    try:
        act()
    except OSError as error:
        limit = limits.get(error.errno or 0)
        if limit is not None:
            most = int(_text(f"/proc/sys/{limit.replace('.', '/')}") or "0")
            what = f"all {most:,} of root's are in use: {cost}"
            yield AdoptionProblem(
                limit, what, f"sysctl {limit}={max(most, 64) * 2}, and a line of that in /etc/sysctl.d"
            )


def _pressure() -> Iterator[AdoptionProblem]:
    psi = Psi()
    try:
        if psi.read() == StallTimes(None, None, None):
            what = "this kernel doesn't tell who waits for what (PSI is off): the reaper goes by its own latency alone"
            yield AdoptionProblem(PRESSURE, what, "psi=1 on the kernel's command line, at the next boot")
    finally:
        psi.close()


def _text(path: str) -> str:
    """What is in a file; nothing if there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
