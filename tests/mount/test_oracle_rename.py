"""Rename, with its flags honoured: answers as the native filesystem does, and walks nothing."""

import itertools
import os
import stat

import pytest

from fusefs.linux.syscalls import RENAME_EXCHANGE, RENAME_NOREPLACE
from tests.support.oracle import EACH_WAY, Oracle, agreed
from tests.support.oracle_subjects import Story, Subject

pytestmark = [pytest.mark.needs("root", "fuse", "loop"), EACH_WAY]

RENAME_WHITEOUT = 4
THINGS = (b"file", b"other", b"empty", b"void", b"full", b"link", b"fifo", b"absent", b"full/file", b"y" * 256)
FLAGS = {"plain": 0, "noreplace": RENAME_NOREPLACE, "exchange": RENAME_EXCHANGE}


def make_things(s: Subject, top: bytes, names: set[bytes]) -> None:
    """A directory with these of THINGS."""
    s.mkdir(top.rstrip(b"/"))
    if names & {b"full", b"full/file", b"link"}:
        s.mkdir(top + b"full")
        s.put(top + b"full/file", b"full/file")
    for name in sorted(names & {b"empty", b"void"}):
        s.mkdir(top + name)
    for name in sorted(names & {b"file", b"other"}):
        s.put(top + name, name)
    if b"link" in names:
        s.symlink(b"full", top + b"link")
    if b"fifo" in names:
        s.mknod(top + b"fifo", stat.S_IFIFO | 0o600)


@pytest.mark.parametrize("flags", FLAGS.values(), ids=list(FLAGS))
def test_rename_of_anything_over_anything(oracle: Oracle, flags: int) -> None:
    def act(s: Subject, tell: Story) -> None:
        for number, (old, new) in enumerate(itertools.product(THINGS, repeat=2)):
            top = b"%d/" % number  # each pair in a directory of its own
            make_things(s, top, {old, new})
            tell(s.rename, top + old, top + new, flags)

    oracle.agree(act)


@agreed
def test_rename_of_a_directory_into_itself(s: Subject, tell: Story) -> None:
    s.mkdir(b"a")
    s.mkdir(b"a/b")
    s.mkdir(b"a/b/c")
    for flags in FLAGS.values():
        tell(s.rename, b"a", b"a/b/c/d", flags)
        tell(s.rename, b"a", b"a/b", flags)
        tell(s.rename, b"a/b/c", b"a", flags)
        tell(s.rename, b"a/b", b"a/b", flags)


@pytest.mark.parametrize("flags", [RENAME_NOREPLACE | RENAME_EXCHANGE, RENAME_WHITEOUT | RENAME_EXCHANGE, 64])
def test_flags_that_make_no_sense_change_nothing(oracle: Oracle, flags: int) -> None:
    def act(s: Subject, tell: Story) -> None:
        s.put(b"a", b"a")
        s.put(b"b", b"b")
        tell(s.rename, b"a", b"b", flags)
        tell(s.get, b"a")

    oracle.agree(act)


@agreed
def test_names_of_one_file_are_not_renamed_over_each_other(s: Subject, tell: Story) -> None:
    """rename(2): between two links to one file it does nothing, and succeeds."""
    s.put(b"a", b"one")
    s.link(b"a", b"b")
    for flags in FLAGS.values():
        tell(s.rename, b"a", b"b", flags)
        tell(s.listdir, b".")
        tell(s.stat, b"a")


@agreed
def test_renamed_over_file_loses_a_link(s: Subject, tell: Story) -> None:
    s.put(b"a", b"a")
    s.link(b"a", b"a too")
    s.put(b"b", b"b")
    tell(s.stat, b"a too")
    tell(s.rename, b"b", b"a")
    tell(s.stat, b"a too")
    tell(s.get, b"a")
    tell(s.get, b"a too")


@agreed
def test_moved_subtree_is_at_its_new_place_at_once(s: Subject, tell: Story) -> None:
    for name in (b"a", b"b", b"a/deep", b"a/deep/er", b"b/x"):
        s.mkdir(name)
    s.put(b"a/deep/er/file", b"content")
    s.put(b"b/x/file", b"other")
    tell(s.get, b"a/deep/er/file")
    h = s.open(b"a/deep/er/file", os.O_RDWR)
    tell(s.rename, b"a/deep", b"b/moved")
    tell(s.get, b"b/moved/er/file")
    tell(s.get, b"a/deep/er/file")
    tell(s.pwrite, h, b"CON", 0)
    tell(s.rename, b"b/moved/er", b"b/x", RENAME_EXCHANGE)
    tell(s.get, b"b/x/file")
    tell(s.get, b"b/moved/er/file")
    tell(s.put, b"b/x/new", b"made in the exchanged one")
    tell(s.rename, b"a", b"b", RENAME_EXCHANGE)
    tell(s.tree)
    tell(s.pread, h, 99, 0)
    tell(s.fstat, h)
    s.close(h)


@agreed
def test_exchange_of_a_file_and_a_directory(s: Subject, tell: Story) -> None:
    s.mkdir(b"d")
    s.mkdir(b"top")
    s.put(b"d/file", b"inside")
    s.put(b"top/f", b"plain")
    tell(s.rename, b"d", b"top/f", RENAME_EXCHANGE)
    tell(s.get, b"d")
    tell(s.get, b"top/f/file")
    tell(s.stat, b"top")
    tell(s.stat, b".")


def test_directory_taken_for_another_keeps_working_in_a_held_listing(oracle: Oracle) -> None:
    """A cwd or a directory fd follows the directory, not its name."""
    for s in (oracle.native, oracle.mounted):
        s.mkdir(b"victim")
        s.put(b"victim/old")
        s.mkdir(b"fresh")
        fd = os.open(s.top + b"/victim", os.O_RDONLY | os.O_DIRECTORY)
        try:
            s.rename(b"fresh", b"victim", RENAME_EXCHANGE)
            assert os.listdir(fd) == ["old"]
            assert s.listdir(b"victim") == []
            os.mkdir(b"made by the holder", dir_fd=fd)
            assert s.listdir(b"fresh") == [b"made by the holder", b"old"]
        finally:
            os.close(fd)
