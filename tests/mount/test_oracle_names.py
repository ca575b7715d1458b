"""Names: what makes, lists and removes them answers as the native filesystem does."""

import os
import stat

import pytest

from tests.support.make_trees import weird_names
from tests.support.oracle import EACH_WAY, Oracle, agreed
from tests.support.oracle_subjects import Story, Subject

pytestmark = [pytest.mark.needs("root", "fuse", "loop"), EACH_WAY]

TOO_LONG = b"y" * 256


@agreed
def test_mkdir(s: Subject, tell: Story) -> None:
    tell(s.mkdir, b"d", 0o751)
    tell(s.mkdir, b"d")
    tell(s.mkdir, b"d/e/f")
    s.put(b"file")
    tell(s.mkdir, b"file")
    tell(s.mkdir, b"file/d")
    tell(s.mkdir, TOO_LONG)
    tell(s.mkdir, b"x" * 255)
    tell(s.mkdir, b"sticky", 0o1777)
    tell(s.stat, b"sticky")
    tell(s.stat, b"d")


@agreed
def test_rmdir(s: Subject, tell: Story) -> None:
    s.mkdir(b"d")
    s.put(b"d/file")
    s.symlink(b"d", b"link")
    tell(s.rmdir, b"d")
    tell(s.rmdir, b"d/file")
    tell(s.rmdir, b"link")
    tell(s.rmdir, b"absent")
    tell(s.rmdir, TOO_LONG)
    s.unlink(b"d/file")
    tell(s.rmdir, b"d")
    tell(s.stat, b"d")


@agreed
def test_unlink(s: Subject, tell: Story) -> None:
    s.mkdir(b"d")
    s.put(b"file")
    s.symlink(b"absent", b"dangling")
    tell(s.unlink, b"d")
    tell(s.unlink, b"absent")
    tell(s.unlink, b"absent/x")
    tell(s.unlink, b"file/x")
    tell(s.unlink, TOO_LONG)
    tell(s.unlink, b"dangling")
    tell(s.unlink, b"file")
    tell(s.unlink, b"file")


@agreed
def test_symlink_and_readlink(s: Subject, tell: Story) -> None:
    s.mkdir(b"d")
    s.put(b"d/file", b"by a link")
    for i, target in enumerate((b"d/file", b"d", b"absent", b"loop", b"t" * 4000, b"\xff\n")):
        tell(s.symlink, target, b"l%d" % i)
        tell(s.readlink, b"l%d" % i)
        tell(s.stat, b"l%d" % i)
    tell(s.symlink, b"x", b"l0")
    tell(s.symlink, b"x", TOO_LONG)
    tell(s.symlink, b"loop", b"loop")
    tell(s.readlink, b"d")
    tell(s.get, b"l0")
    tell(s.get, b"l1/file")
    tell(s.get, b"loop")
    tell(s.opens, b"l0", os.O_RDONLY | os.O_NOFOLLOW)
    tell(s.opens, b"l2", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    s.close(s.open(b"l2", os.O_WRONLY | os.O_CREAT, 0o600))  # makes what it points to
    tell(s.stat, b"absent")


@agreed
def test_links_are_one_file(s: Subject, tell: Story) -> None:
    s.mkdir(b"d")
    s.put(b"a", b"one")
    tell(s.link, b"a", b"d/b")
    tell(s.link, b"d/b", b"c")
    tell(s.link, b"a", b"c")
    tell(s.link, b"absent", b"e")
    tell(s.link, b"d", b"e")
    tell(s.link, b"a", TOO_LONG)
    s.put(b"d/b", b"changed by another name")
    for name in (b"a", b"d/b", b"c"):
        tell(s.stat, name)
        tell(s.get, name)
    assert len({s.ino(name) for name in (b"a", b"d/b", b"c")}) == 1
    s.unlink(b"a")
    tell(s.stat, b"c")
    tell(s.chmod, b"c", 0o600)
    tell(s.stat, b"d/b")
    s.symlink(b"c", b"soft")
    tell(s.link, b"soft", b"soft too")  # a link to the link
    tell(s.stat, b"soft too")


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFREG], ids=oct)
def test_mknod(oracle: Oracle, kind: int) -> None:
    device = os.makedev(8, 77) if kind in (stat.S_IFCHR, stat.S_IFBLK) else 0

    def act(s: Subject, tell: Story) -> None:
        tell(s.mknod, b"node", kind | 0o640, device)
        tell(s.mknod, b"node", kind | 0o640, device)
        tell(s.mknod, b"absent/node", kind | 0o640, device)
        tell(s.mknod, TOO_LONG, kind | 0o640, device)
        tell(s.stat, b"node")
        s.link(b"node", b"again")
        s.chown(b"node", 1, 2)
        tell(s.stat, b"again")
        s.rename(b"node", b"other")
        tell(s.listdir, b".")

    oracle.agree(act)


@agreed
def test_listing_has_names_of_any_bytes(s: Subject, tell: Story) -> None:
    for i, name in enumerate(weird_names()):
        if i % 2:
            tell(s.put, name, name)
        else:
            tell(s.mkdir, name)
    tell(s.listdir, b".")
    for name in weird_names()[1::2]:
        tell(s.get, name)


@agreed
def test_listing_of_what_is_no_directory(s: Subject, tell: Story) -> None:
    s.put(b"file")
    s.mkdir(b"empty")
    s.symlink(b"empty", b"link")
    for name in (b"file", b"absent", b"empty", b"link", b"file/x"):
        tell(s.listdir, name)


@agreed
def test_listing_of_a_thousand(s: Subject, tell: Story) -> None:
    s.mkdir(b"d")
    for i in range(1000):
        s.mknod(b"d/%d" % i, stat.S_IFREG | 0o600)
    tell(s.listdir, b"d")
    for i in range(0, 1000, 3):
        s.unlink(b"d/%d" % i)
    tell(s.listdir, b"d")
    tell(s.stat, b"d")


def test_listing_tells_numbers_and_kinds(oracle: Oracle) -> None:
    """d_ino and d_type, which find(1) and rsync(1) believe."""
    native, mounted = oracle.native, oracle.mounted
    for s in (native, mounted):
        s.mkdir(b"d")
        s.put(b"file")
        s.symlink(b"file", b"link")
        s.mknod(b"fifo", stat.S_IFIFO | 0o600)
    for _ in range(2):  # cold, then with what the kernel has cached
        with os.scandir(mounted.top) as entries:
            told = {e.name: (e.inode(), e.is_dir(follow_symlinks=False), e.is_symlink()) for e in entries}
        there = oracle.behind["mount"].top
        assert told == {
            os.fsencode(e.name): (e.inode(), e.is_dir(follow_symlinks=False), e.is_symlink()) for e in os.scandir(there)
        }


@agreed
def test_unlinked_file_works_while_it_is_open(s: Subject, tell: Story) -> None:
    s.put(b"a", b"content")
    s.link(b"a", b"b")
    h = s.open(b"a", os.O_RDWR)
    s.unlink(b"a")
    tell(s.fstat, h)
    s.unlink(b"b")
    tell(s.fstat, h)
    tell(s.pread, h, 100, 0)
    tell(s.pwrite, h, b"more", 7)
    tell(s.ftruncate, h, 9)
    tell(s.fchmod, h, 0o600)
    tell(s.fsync, h)
    tell(s.pread, h, 100, 0)
    tell(s.fstat, h)
    s.put(b"a", b"another")  # may get the same number only after the close
    tell(s.pread, h, 100, 0)
    tell(s.get, b"a")
    tell(s.close, h)
    tell(s.get, b"a")


@agreed
def test_replaced_file_works_while_it_is_open(s: Subject, tell: Story) -> None:
    s.put(b"a", b"old")
    s.put(b"b", b"new")
    h = s.open(b"a", os.O_RDWR)
    s.rename(b"b", b"a")
    tell(s.pwrite, h, b"OLD", 0)
    tell(s.pread, h, 10, 0)
    tell(s.fstat, h)
    tell(s.get, b"a")
    tell(s.close, h)


@agreed
def test_path_walks_end_as_they_do_below(s: Subject, tell: Story) -> None:
    s.put(b"file")
    s.mkdir(b"d")
    for path in (b"file/x", b"file/x/y", b"d/x/y", b"x", TOO_LONG, b"d/" + TOO_LONG, TOO_LONG + b"/x"):
        tell(s.stat, path)
        tell(s.opens, path)
        tell(s.opens, path, os.O_WRONLY | os.O_CREAT)
        tell(s.chmod, path, 0o600)
        tell(s.rename, b"d", path)
        if b"d" not in s.listdir(b"."):
            s.rename(path, b"d")


@agreed
def test_deep_chain(s: Subject, tell: Story) -> None:
    path = b"d"
    for _ in range(60):
        s.mkdir(path)
        path += b"/d"
    s.put(path, b"deep")
    tell(s.get, path)
    s.rename(b"d/d/d", b"e")
    tell(s.get, b"e" + path[5:])
    tell(s.stat, path)
