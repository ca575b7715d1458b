"""Where the backing filesystem has no file handles, a node is found by its names alone, however they change."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from fusefs.core.metadata_cache import ROOT
from fusefs.linux.syscalls import RENAME_EXCHANGE
from fusefs.mount.tree.vfs import Vfs
from tests.support.real_filesystems import overlay_volume
from tests.support.vfs_without_mount import Files, Names, Somebody, vfs_at

pytestmark = pytest.mark.needs("root")

ME = Somebody(0, 0, os.getpid(), 0o022)


@pytest.fixture
def vfs() -> Iterator[Vfs]:
    """On an overlay, with the tree a/x/f and b/y/f."""
    with overlay_volume() as overlay:
        for path in ("a/x", "b/y"):
            (overlay.path / path).mkdir(parents=True)
            (overlay.path / path / "f").write_text(path)
        with vfs_at(overlay.path, max_fds=0) as vfs:
            yield vfs


def look_up(vfs: Vfs, path: bytes) -> int:
    """The nodeid at a path; every node on the way stays known."""
    nodeid: int = ROOT
    for name in path.split(b"/"):
        nodeid = Names(vfs).lookup(nodeid, name, ME).nodeid
    return nodeid


def close_directories(vfs: Vfs) -> None:
    """As if many others had been needed since."""
    for node in vfs.nodes:
        vfs.nodes.drop_directory_fd(node)


def content(vfs: Vfs, nodeid: int) -> bytes:
    """What is in a file, no directory being open before."""
    close_directories(vfs)
    fh = Files(vfs).open(nodeid, os.O_RDONLY, ME).fh
    try:
        return Files(vfs).read(fh, 0, 99)
    finally:
        Files(vfs).release(fh)


def test_both_of_two_exchanged_directories_are_found(vfs: Vfs) -> None:
    a, b = look_up(vfs, b"a/x/f"), look_up(vfs, b"b/y/f")
    Names(vfs).rename(ROOT, b"a", ROOT, b"b", RENAME_EXCHANGE, ME)
    assert (content(vfs, a), content(vfs, b)) == (b"a/x", b"b/y")


def test_directories_exchanged_over_different_parents_are_found(vfs: Vfs) -> None:
    a, b = look_up(vfs, b"a/x/f"), look_up(vfs, b"b/y/f")
    Names(vfs).rename(look_up(vfs, b"a"), b"x", look_up(vfs, b"b"), b"y", RENAME_EXCHANGE, ME)
    assert (content(vfs, a), content(vfs, b)) == (b"a/x", b"b/y")


def test_what_is_below_a_renamed_directory_is_found(vfs: Vfs) -> None:
    file = look_up(vfs, b"a/x/f")
    Names(vfs).rename(ROOT, b"a", look_up(vfs, b"b/y"), b"moved", 0, ME)
    assert content(vfs, file) == b"a/x"


def test_linked_file_is_found_by_the_name_that_is_left(vfs: Vfs) -> None:
    file, elsewhere = look_up(vfs, b"a/x/f"), look_up(vfs, b"b/y")
    Names(vfs).link(file, elsewhere, b"link", ME)
    Names(vfs).unlink(look_up(vfs, b"a/x"), b"f", ME)
    assert content(vfs, file) == b"a/x"


def test_deep_chain_is_opened_with_two_fds(vfs: Vfs) -> None:
    nodeid: int = ROOT
    for _ in range(1500):
        nodeid = Names(vfs).mkdir(nodeid, b"d", 0o755, ME).nodeid
    close_directories(vfs)
    made = Names(vfs).mkdir(nodeid, b"last", 0o755, ME)
    close_directories(vfs)
    assert Files(vfs).getattr(made.nodeid, ME).attributes.is_directory()
