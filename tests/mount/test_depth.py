"""However deep in the tree something is done, it takes the daemon as many steps as it takes near the top."""

from __future__ import annotations

import gc
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import pytest

from fusefs.core.names import STORE
from fusefs.core.nodeids import ROOT
from fusefs.linux.syscalls import RENAME_EXCHANGE
from fusefs.mount.tree.opening import OpenedFile
from fusefs.mount.tree.vfs import Vfs
from tests.support.foreground_mount import Mounted, fresh_mount
from tests.support.nested_directories import make_chain, walk_chain
from tests.support.real_filesystems import tmpfs_volume, volume_of
from tests.support.vfs_without_mount import Names, Somebody, vfs_at

pytestmark = pytest.mark.needs("root", "fuse", "loop")

ME = Somebody(0, 0, os.getpid(), 0o022)
SHALLOW, DEEP = 20, 600
N_FDS = 256
N_LEVELS, N_LEVELS_BESIDE = 600, 60


@pytest.fixture
def vfs() -> Iterator[Vfs]:
    with tmpfs_volume() as volume, vfs_at(volume, max_fds=4 * DEEP) as vfs:
        yield vfs


def n_steps(act: Callable[[], object]) -> int:
    """How many lines of Python something takes."""
    n = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal n
        n += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # what others have left to it would count
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
        gc.enable()
    return n


def chain(vfs: Vfs, top: int, n: int) -> int:
    """The last of so many directories, each in the one before."""
    for _ in range(n):
        top = Names(vfs).mkdir(top, b"d", 0o755, ME).nodeid
    return top


def look(vfs: Vfs, directory: int, name: bytes) -> None:
    """At a name that may be missing, which in a store is an error."""
    with suppress(FileNotFoundError):
        Names(vfs).lookup(directory, name, ME)


def everything(vfs: Vfs, directory: int) -> list[int]:
    """The steps of what is done in a directory."""
    found = []

    def step(act: Callable[..., object], *args: object) -> object:
        told: list[object] = []
        found.append(n_steps(lambda: told.append(act(*args))))
        return told[0]

    def known(name: bytes) -> int:
        return Names(vfs).lookup(directory, name, ME).nodeid

    step(Names(vfs).mkdir, directory, b"a", 0o755, ME)
    step(Names(vfs).mknod, directory, b"f", stat.S_IFREG | 0o644, 0, ME)
    opened = step(Names(vfs).create, directory, b"o", 0o644, os.O_RDWR, ME)
    assert isinstance(opened, tuple)
    assert isinstance(opened[0], OpenedFile)
    step(vfs.opening.release, opened[0].fh)
    for name in (b"a", b"f", b"none"):
        step(look, vfs, directory, name)
    for nodeid in (directory, known(b"a"), known(b"f")):
        step(vfs.lookups.getattr, nodeid, ME)
    Names(vfs).mkdir(known(b"a"), b"b", 0o755, ME)
    step(Names(vfs).rename, directory, b"a", directory, b"c", 0, ME)
    step(Names(vfs).rename, directory, b"f", known(b"c"), b"f", 0, ME)
    step(Names(vfs).rename, directory, b"o", directory, b"c", RENAME_EXCHANGE, ME)
    Names(vfs).rename(directory, b"o", directory, b"c", RENAME_EXCHANGE, ME)
    step(lambda: list(vfs.unopened.read(directory, 0, 4096)))
    fh = step(vfs.listings.opendir, directory, ME)
    assert isinstance(fh, int)
    step(lambda: list(vfs.listings.read(fh, 0)))
    step(vfs.listings.releasedir, fh)
    step(Names(vfs).rmdir, known(b"c"), b"b", ME)
    step(Names(vfs).unlink, known(b"c"), b"f", ME)
    step(Names(vfs).rmdir, directory, b"c", ME)
    step(Names(vfs).unlink, directory, b"o", ME)
    step(vfs.references.forget, directory, 1)
    return found


def test_every_operation_takes_as_many_steps_however_deep(vfs: Vfs) -> None:
    found = []
    for n in (1, SHALLOW, DEEP):  # the first of all may have to find out more
        top = Names(vfs).mkdir(ROOT, b"%d" % n, 0o755, ME).nodeid
        found.append(everything(vfs, chain(vfs, top, n)))
    assert found[2] == found[1]


def test_every_operation_in_a_dropped_tree_takes_as_many_steps_however_deep(vfs: Vfs) -> None:
    """And so does removing it, level by level."""
    root = vfs.directories.fd_of(vfs.nodes.root)
    os.makedirs(f"/proc/self/fd/{root}/{os.fsdecode(STORE)}/u/0/drop")
    drop: int = ROOT
    for name in (STORE, b"u", b"0", b"drop"):
        drop = Names(vfs).lookup(drop, name, ME).nodeid
    found = []
    for n in (1, SHALLOW, DEEP):
        top = Names(vfs).mkdir(ROOT, b"top", 0o755, ME).nodeid
        above = chain(vfs, top, n)
        bottom = chain(vfs, above, 1)
        Names(vfs).rename(ROOT, b"top", drop, b"%d" % n, 0, ME)
        vfs.lookups.getattr(bottom, ME)  # who comes first after a drop finds out for all above where they lie now
        steps = everything(vfs, bottom)
        steps.append(n_steps(partial(Names(vfs).rmdir, above, b"d", ME)))
        steps.append(n_steps(partial(vfs.lookups.getattr, above, ME)))
        found.append(steps)
    assert found[2] == found[1]


@pytest.fixture(params=["tmpfs", "ext4"])
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """With fewer fds than the tree has levels."""
    with fresh_mount(made=volume_of(request.param), n_fds_max=N_FDS) as mounted:
        yield mounted


def n_messages(mount: Mounted, act: Callable[[], object]) -> int:
    """But for those that take no answer."""

    def now() -> int:
        return sum(figures.n() for name, figures in mount.stats().operations.items() if name != "forget")

    before = now()
    act()
    return now() - before


def test_a_tree_deeper_than_the_daemon_has_fds_is_made_walked_moved_and_removed(mount: Mounted) -> None:
    a, b = mount.path / "a", mount.path / "b"
    make_chain(a, N_LEVELS)
    a.rename(b)
    assert walk_chain(b) == N_LEVELS
    mount.forget_all()
    assert walk_chain(b) == N_LEVELS
    subprocess.run(["rm", "-rf", b], check=True)
    assert os.listdir(mount.path) == []


def test_a_deep_tree_takes_no_more_messages_a_level(mount: Mounted) -> None:
    """What is made, what is found, and what is removed."""

    def of(n: int) -> list[float]:
        top = mount.path / f"{n}"
        acts = (
            lambda: make_chain(top, n),
            lambda: walk_chain(top),
            lambda: subprocess.run(["rm", "-rf", top], check=True),
        )
        return [n_messages(mount, act) / n for act in acts]

    for deep, shallow in zip(of(N_LEVELS), of(N_LEVELS_BESIDE), strict=True):
        assert deep < 1.5 * shallow
