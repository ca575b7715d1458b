"""Many clients at work in the same few directories, at a time: when it is quiet, all that is told is true.

Errors that names cause each other are as they are on any filesystem; no other may come.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from fusefs.linux.syscalls import AT_FDCWD, RENAME_EXCHANGE, RENAME_NOREPLACE, renameat2
from tests.support.background_processes import clients, ends, workers
from tests.support.foreground_mount import Mounted
from tests.support.fuse_slow import slow_volume
from tests.support.mount_and_backing import Sides, sides, sides_on
from tests.support.real_filesystems import tmpfs_volume

pytestmark = pytest.mark.needs("root", "fuse", "loop")

N_CLIENTS, N_STEPS, N_ROUNDS = 5, 60, 3
DIRECTORIES = ("a", "b", "a/c")
NAMES = ("1", "2", "3", "c", "link")
# Of a path that changes while it is walked; EBUSY: overlayfs, for a name that another is just replacing.
EXPECTED = {
    errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EINVAL, errno.ELOOP, errno.ESTALE,
    errno.EBUSY, errno.ENODATA, errno.EPERM,
}  # fmt: skip
MOUNTS = {
    "local": ("ext4", ["coherence=exclusive"]),
    "local, shared": ("tmpfs", ["coherence=shared", "timeout=3600"]),
    "in threads": ("ext4", ["coherence=exclusive", "backing=slow"]),
    "in threads, shared": ("tmpfs", ["coherence=shared", "timeout=3600", "backing=slow"]),
    "in threads, by names": ("overlay", ["coherence=exclusive", "backing=slow", "cache_size=8K"]),
    "slow": ("slowfs", ["coherence=exclusive", "backing=slow"]),
}


@contextmanager
def mount_on(fs_type: str, options: list[str]) -> Iterator[tuple[Mounted, Sides]]:
    if fs_type != "slowfs":
        with sides_on(fs_type, options) as both:
            yield both
        return
    with (
        tmpfs_volume() as volume,
        slow_volume(volume, delay_us=300, ttl_s=0, limit_s=100) as slow,
        sides(slow.path / "source", options, backing=volume / "source") as both,
    ):
        yield both


def step(top: Path, chance: random.Random) -> None:
    one, two = (top / chance.choice(DIRECTORIES) / chance.choice(NAMES) for _ in range(2))
    match chance.randrange(14):
        case 0 | 1:
            one.write_bytes(b"x" * chance.randrange(5000))
        case 2:
            one.mkdir()
        case 3:
            one.rmdir()
        case 4:
            one.unlink()
        case 5:
            one.rename(two)
        case 6:
            renameat2(AT_FDCWD, bytes(one), AT_FDCWD, bytes(two), RENAME_EXCHANGE)
        case 7:
            renameat2(AT_FDCWD, bytes(one), AT_FDCWD, bytes(two), RENAME_NOREPLACE)
        case 8:
            os.link(one, two, follow_symlinks=False)
        case 9:
            one.symlink_to(two.name)
        case 10:
            os.chmod(one, chance.choice([0o600, 0o644, 0o755]))
        case 11:
            os.truncate(one, chance.randrange(9000))
        case 12:
            os.setxattr(one, "user.x", b"%d" % chance.randrange(9))
        case _:
            os.utime(one, ns=(chance.randrange(10**18), chance.randrange(10**18)))


@contextmanager
def as_expected() -> Iterator[None]:
    """Raises  OSError that names can't cause"""
    try:
        yield
    except OSError as error:
        if error.errno not in EXPECTED:
            raise


def changes(top: Path, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(N_STEPS):
        with as_expected():
            step(top, chance)


def looks(top: Path) -> None:
    """Another one lists, without an end."""
    while True:
        for directory in ("", *DIRECTORIES):
            with as_expected(), os.scandir(top / directory) as entries:
                for entry in entries:
                    with as_expected():
                        entry.stat(follow_symlinks=False)
                        os.readlink(entry.path)


def paths_of(top: Path) -> list[str]:
    """All that is there, and all that may be."""
    found = {str(path.relative_to(top)) for path in top.rglob("*")}
    return sorted(found | {f"{directory}/{name}" for directory in DIRECTORIES for name in NAMES})


@pytest.mark.parametrize("kind", MOUNTS)
def test_after_many_changed_the_same_names_nothing_is_stale(kind: str) -> None:
    fs_type, options = MOUNTS[kind]
    with mount_on(fs_type, options) as (mounted, top):
        both = top.below("work")
        for directory in ("", *DIRECTORIES):
            (both.seen / directory).mkdir()
        for i in range(N_ROUNDS):
            with workers([lambda: looks(both.seen)] * 2):
                seeds = range(i * N_CLIENTS, (i + 1) * N_CLIENTS)
                with clients([partial(changes, both.seen, seed) for seed in seeds]) as pids:
                    assert [ends(pid) for pid in pids] == [0] * N_CLIENTS
            for _ in range(2):
                both.assert_alike([".", *paths_of(both.behind)])
                mounted.forget_all()
