"""Permissions: processes with a right that their ids alone don't give them, and where rights are looked at.

That is a capability, or a user namespace of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fusefs.linux.capabilities import Capability
from tests.support.foreground_mount import SHARED_LIMIT_S, trashd_mount
from tests.support.privileges import HE, Credentials
from tests.support.real_filesystems import loop_volume

FIRST, N_MAPPED = 720_000, 1000
WAYS = ("native", "exclusive", "shared", "slow")
"""A plain directory, and mounts of which nothing but what reaches them is new for an hour."""


@contextmanager
def seen_and_behind(way: str, *options: str) -> Iterator[tuple[Path, Path]]:
    """A directory for all users: as it is used, and as it is below. options: more of the mount's"""
    with loop_volume("ext4", 64) as volume:
        source = volume / "source"
        source.mkdir()
        source.chmod(0o777)
        if way == "native":
            yield source, source
            return
        coherence = "shared" if way == "shared" else "exclusive"
        backing = "slow" if way == "slow" else "local"
        own = [f"coherence={coherence}", "timeout=3600", f"backing={backing}"]
        with trashd_mount(source, options=[*own, *options], limit_s=SHARED_LIMIT_S) as mounted:
            yield mounted.path, source


def in_child(act: Callable[[], object], become: Callable[[], None]) -> int:
    """The errno of an act by a process that has become a user before."""
    pid = os.fork()
    if pid == 0:
        code = 255
        try:
            become()
            act()
            code = 0
        except OSError as error:
            code = error.errno or 255
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def keep_only(capability: Capability) -> None:
    Credentials(HE, HE, capability=capability).be()


def as_root_in_there() -> None:
    """Root of a user namespace that knows a thousand users, as one of rootless containers."""
    Credentials(FIRST, FIRST, maps=((0, FIRST, N_MAPPED),)).be()
