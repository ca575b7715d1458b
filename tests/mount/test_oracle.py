"""Names, renames, files and attributes: made, kept, listed and refused as on the native filesystem."""

import errno
import itertools
import mmap
import os
import stat
from collections.abc import Callable

import pytest

from fusefs.linux.syscalls import RENAME_EXCHANGE, RENAME_NOREPLACE
from tests.support.acls import ACCESS, DEFAULT, NOBODY, acl
from tests.support.make_trees import weird_names
from tests.support.move_entries import pass_a_tick
from tests.support.oracle import EACH_WAY, Oracle, agreed
from tests.support.oracle_subjects import KEEP, Story, Subject, outcome

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


LARGE = bytes(range(256)) * 4096  # 1 MiB: more than one request
HOW = {"r": os.O_RDONLY, "w": os.O_WRONLY, "rw": os.O_RDWR}
ALSO = {"creat": os.O_CREAT, "excl": os.O_EXCL, "trunc": os.O_TRUNC, "append": os.O_APPEND, "nofollow": os.O_NOFOLLOW}
LINKS = {b"to file": b"file", b"dangling": b"nowhere", b"loop": b"loop"}
KINDS = (b"file", b"absent", b"d", *LINKS)


def combinations() -> list[int]:
    """Every sensible set of open flags."""
    found = []
    for how in HOW.values():
        for n in range(len(ALSO) + 1):
            for others in itertools.combinations(ALSO.values(), n):
                flags = how | sum(others)
                if flags & os.O_EXCL and not flags & os.O_CREAT:
                    continue  # open(2): undefined
                if flags & os.O_TRUNC and how == os.O_RDONLY:
                    continue  # the same
                found.append(flags)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_open_with_every_flag(oracle: Oracle, kind: bytes) -> None:
    def act(s: Subject, tell: Story) -> None:
        for number, flags in enumerate(combinations()):
            top = b"%d/" % number
            s.mkdir(top[:-1])
            if kind.endswith(b"file"):
                s.put(top + b"file", b"0123456789", 0o640)
            if kind == b"d":
                s.mkdir(top + b"d")
            if kind in LINKS:
                s.symlink(LINKS[kind], top + kind)
            try:
                h = s.open(top + kind, flags, 0o751)
            except OSError as error:
                tell.lines.append(errno.errorcode[error.errno or 0])
                continue
            tell(s.pread, h, 4, 2)
            tell(s.pwrite, h, b"abc", 1)
            tell(s.pread, h, 99, 0)
            tell(s.fstat, h)
            s.close(h)

    oracle.agree(act)


@agreed
def test_large_writes_and_reads(s: Subject, tell: Story) -> None:
    s.put(b"file", LARGE)
    assert s.get(b"file") == LARGE
    h = s.open(b"file", os.O_RDWR)
    for offset in (0, 1, 4095, 4096, 65535, 131073, len(LARGE) - 1, len(LARGE), len(LARGE) + 5000):
        tell(s.pwrite, h, b"%d" % offset * 500, offset)
        tell(s.pread, h, 3000, max(offset - 1000, 0))
    s.fsync(h)
    s.close(h)
    tell(s.get, b"file")


@agreed
def test_append_goes_to_the_end_wherever_it_is(s: Subject, tell: Story) -> None:
    one = s.open(b"log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    two = s.open(b"log", os.O_WRONLY | os.O_APPEND)
    other = s.open(b"log", os.O_RDWR)
    tell(s.pwrite, one, b"one ", 0)
    tell(s.pwrite, two, b"two ", 0)
    tell(s.pwrite, one, b"three ", 0)
    tell(s.ftruncate, other, 4)
    tell(s.pwrite, two, b"after the cut", 0)
    tell(s.pread, other, 99, 0)
    tell(s.pread, one, 9, 0)  # EBADF: write only
    for h in (one, two, other):
        s.close(h)


@agreed
def test_truncate(s: Subject, tell: Story) -> None:
    s.put(b"file", b"0123456789")
    s.mkdir(b"d")
    s.symlink(b"file", b"link")
    tell(s.truncate, b"file", 4)
    tell(s.get, b"file")
    tell(s.truncate, b"link", 8)
    tell(s.get, b"file")
    tell(s.truncate, b"d", 0)
    tell(s.truncate, b"absent", 0)
    h = s.open(b"file", os.O_RDWR)
    tell(s.ftruncate, h, 100_000)
    tell(s.pread, h, 20, 0)
    tell(s.fstat, h)
    tell(s.ftruncate, h, 0)
    tell(s.fstat, h)
    s.close(h)
    h = s.open(b"file")
    tell(s.pread, h, 10, 0)
    s.close(h)


@agreed
def test_file_too_large_is_refused(s: Subject, tell: Story) -> None:
    s.put(b"file")
    tell(s.truncate, b"file", (1 << 63) - 1)
    h = s.open(b"file", os.O_RDWR)
    tell(s.pwrite, h, b"x", 1 << 45)
    tell(s.fstat, h)
    s.close(h)
    s.truncate(b"file", 0)


@agreed
def test_sparse_file_stays_sparse(s: Subject, tell: Story) -> None:
    h = s.open(b"sparse", os.O_RDWR | os.O_CREAT, 0o600)
    tell(s.pwrite, h, b"x" * 4096, 1 << 30)
    s.fsync(h)
    tell(s.fstat, h)
    tell(s.pread, h, 16, 1 << 29)
    tell(s.ftruncate, h, 1 << 20)
    s.fsync(h)
    tell(s.fstat, h)
    s.close(h)
    s.unlink(b"sparse")


@pytest.fixture
def direct(oracle: Oracle) -> Oracle:
    """Where the native filesystem opens files so: tmpfs does since Linux 6.6."""
    s = oracle.native
    s.put(b"direct")
    if outcome(lambda: s.close(s.open(b"direct", os.O_RDONLY | os.O_DIRECT))) == "EINVAL":
        pytest.skip("the native filesystem has no O_DIRECT")
    s.unlink(b"direct")
    return oracle


def test_direct_io(direct: Oracle) -> None:
    """What bypasses the page cache is read and written all the same."""
    for s in (direct.native, direct.mounted):
        page = mmap.mmap(-1, 4096)
        page.write(b"d" * 4096)
        fd = os.open(s.top + b"/file", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            assert os.pwritev(fd, [page], 4096) == 4096
            into = mmap.mmap(-1, 4096)
            assert os.preadv(fd, [into], 4096) == 4096
            assert into[:] == page[:]
        finally:
            os.close(fd)
        assert s.get(b"file") == bytes(4096) + b"d" * 4096


def test_mapped_file_and_its_reader_agree(oracle: Oracle) -> None:
    s = oracle.mounted
    s.put(b"file", bytes(8192))
    with open(s.top + b"/file", "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        view[5000:5005] = b"mmap!"
        view.flush()
        assert s.get(b"file")[5000:5005] == b"mmap!"
        assert oracle.behind["mount"].get(b"file")[5000:5005] == b"mmap!"
        h = s.open(b"file", os.O_WRONLY)
        s.pwrite(h, b"write", 100)
        s.close(h)
        assert view[100:105] == b"write"


@agreed
def test_what_touches_which_time(s: Subject, tell: Story) -> None:
    """Which of mtime and ctime each call moves, of the file and of its directory."""
    s.mkdir(b"d")
    s.put(b"d/file", b"content")

    def moved_by(label: str, call: Callable[[], object]) -> None:
        for path in (b"d", b"d/file"):
            s.utime(path, 1, 1)
        ctimes = [s.ctime_ns(path) for path in (b"d", b"d/file")]
        pass_a_tick()  # before Linux 6.13 a file that has been looked at has the clock of the last tick, too
        call()
        moved = [s.times(path).mtime_ns != 1 for path in (b"d", b"d/file")]
        moved += [s.ctime_ns(path) != older for path, older in zip((b"d", b"d/file"), ctimes, strict=True)]
        tell.lines.append(f"{label} moved {moved}")

    def there_and_back() -> None:
        s.rename(b"d/file", b"d/f")
        s.rename(b"d/f", b"d/file")

    moved_by("mknod", lambda: s.mknod(b"d/new", 0o100600))
    moved_by("link", lambda: s.link(b"d/file", b"d/link"))
    moved_by("unlink of a link", lambda: s.unlink(b"d/link"))
    moved_by("rename within", lambda: s.rename(b"d/new", b"d/newer"))
    moved_by("rename of the file", there_and_back)
    moved_by("rename away", lambda: s.rename(b"d/newer", b"gone"))
    moved_by("chmod", lambda: s.chmod(b"d/file", 0o600))
    moved_by("chown", lambda: s.chown(b"d/file", 5, 5))
    moved_by("setxattr", lambda: s.setxattr(b"d/file", "trusted.a", b"1"))  # user's: not on tmpfs before Linux 6.6
    moved_by("truncate", lambda: s.truncate(b"d/file", 3))
    moved_by("truncate to the same size", lambda: s.truncate(b"d/file", 3))
    moved_by("write", lambda: s.put(b"d/file", b"again", flags=0))
    moved_by("open to cut", lambda: s.put(b"d/file"))
    moved_by("read", lambda: (s.get(b"d/file"), s.listdir(b"d")))


FOR_USER_7 = acl((1, 6, NOBODY), (2, 6, 7), (4, 4, NOBODY), (16, 6, NOBODY), (32, 0, NOBODY))
PLAIN = acl((1, 7, NOBODY), (4, 5, NOBODY), (32, 1, NOBODY))


@pytest.mark.parametrize("mode", [0, 0o644, 0o4755, 0o2755, 0o1777, 0o7777])
def test_chmod(oracle: Oracle, mode: int) -> None:
    def act(s: Subject, tell: Story) -> None:
        s.put(b"file")
        s.mkdir(b"d")
        s.symlink(b"file", b"link")
        for name in (b"file", b"d", b"link"):
            tell(s.chmod, name, mode)
        tell(s.chmod, b"absent", mode)
        h = s.open(b"file")
        tell(s.fchmod, h, mode ^ 0o111)
        tell(s.fstat, h)
        s.close(h)

    oracle.agree(act)


@agreed
def test_chown_takes_suid_away(s: Subject, tell: Story) -> None:
    s.mkdir(b"d")
    s.put(b"file")
    s.symlink(b"file", b"link")
    for uid, gid in ((1, 2), (KEEP, 3), (4, KEEP), (KEEP, KEEP), (0, 0), (3_000_000_000, 5)):
        for name in (b"d", b"file", b"link"):
            if name != b"link":
                s.chmod(name, 0o6755)
            tell(s.chown, name, uid, gid)
            tell(s.stat, name)


@agreed
def test_times_to_the_nanosecond(s: Subject, tell: Story) -> None:
    s.put(b"file")
    s.mkdir(b"d")
    s.symlink(b"file", b"link")
    for ns in (0, 1, 999_999_999, 1_700_000_000_123_456_789, 2**32 * 10**9 + 7, 12 * 10**18, -1_000_000_001):
        for name in (b"file", b"d", b"link"):
            tell(s.utime, name, ns, ns + 1)
            tell(s.times, name)


@agreed
def test_xattrs(s: Subject, tell: Story) -> None:
    s.put(b"file")
    s.mkdir(b"d")
    s.symlink(b"file", b"link")
    s.mknod(b"fifo", stat.S_IFIFO | 0o600)
    for name in (b"file", b"d", b"link", b"fifo", b"absent"):
        for xattr in ("user.a", "trusted.a", "security.a", "strange.a", "user.", "a", "user." + "n" * 251):
            tell(s.getxattr, name, xattr)
            tell(s.setxattr, name, xattr, b"1")
            tell(s.getxattr, name, xattr)
            tell(s.setxattr, name, xattr, b"\x00\xff", os.XATTR_REPLACE)
            tell(s.setxattr, name, xattr, b"3", os.XATTR_CREATE)
            tell(s.getxattr, name, xattr)
        tell(s.setxattr, name, "user.empty", b"")
        tell(s.getxattr, name, "user.empty")
        tell(s.setxattr, name, "user.replaced", b"", os.XATTR_REPLACE)
        tell(s.listxattr, name)
        tell(s.removexattr, name, "user.a")
        tell(s.removexattr, name, "user.a")
        tell(s.listxattr, name)


@agreed
def test_xattr_too_large_is_refused(s: Subject, tell: Story) -> None:
    s.put(b"file")
    for size in (1000, 60_000, 65_536):
        tell(s.setxattr, b"file", f"user.{size}", bytes(size))
        tell(s.getxattr, b"file", f"user.{size}")
    tell(s.listxattr, b"file")


@agreed
def test_acl_changes_the_mode(s: Subject, tell: Story) -> None:
    s.put(b"file")
    s.mkdir(b"d")
    for name in (b"file", b"d"):
        for value in (FOR_USER_7, PLAIN, b"rubbish", FOR_USER_7):
            tell(s.setxattr, name, ACCESS, value)
            tell(s.getxattr, name, ACCESS)
            tell(s.stat, name)
        tell(s.chmod, name, 0o640)
        tell(s.getxattr, name, ACCESS)
        tell(s.setxattr, name, DEFAULT, FOR_USER_7)
        tell(s.listxattr, name)
        tell(s.removexattr, name, ACCESS)
        tell(s.stat, name)
        tell(s.listxattr, name)


@agreed
def test_default_acl_goes_to_what_is_made_inside(s: Subject, tell: Story) -> None:
    """And takes the umask's place."""
    s.mkdir(b"d")
    s.setxattr(b"d", DEFAULT, FOR_USER_7)
    with s.umask(0o077):
        s.put(b"d/file", mode=0o666)
        s.mkdir(b"d/sub", 0o777)
        s.mkdir(b"d/sub/sub", 0o700)
        s.mknod(b"d/node", stat.S_IFREG | 0o666)
        s.mknod(b"d/fifo", stat.S_IFIFO | 0o666)
        s.symlink(b"x", b"d/link")
    for name in (b"d/file", b"d/sub", b"d/sub/sub", b"d/node", b"d/fifo", b"d/link"):
        tell(s.stat, name)
        tell(s.getxattr, name, ACCESS)
        tell(s.getxattr, name, DEFAULT)


@pytest.mark.parametrize("mask", [0, 0o022, 0o077, 0o777])
def test_umask(oracle: Oracle, mask: int) -> None:
    def act(s: Subject, tell: Story) -> None:
        with s.umask(mask):
            s.close(s.open(b"created", os.O_WRONLY | os.O_CREAT, 0o6777))
            s.mkdir(b"d", 0o1777)
            s.mknod(b"node", stat.S_IFREG | 0o666)
            s.mknod(b"fifo", stat.S_IFIFO | 0o666)
            s.symlink(b"x", b"link")
        for name in (b"created", b"d", b"node", b"fifo", b"link"):
            tell(s.stat, name)

    oracle.agree(act)


@agreed
def test_setgid_directory_gives_its_group(s: Subject, tell: Story) -> None:
    s.mkdir(b"d")
    s.chown(b"d", 5, 77)
    s.chmod(b"d", 0o2775)
    s.put(b"d/file", mode=0o2755)
    s.mkdir(b"d/sub", 0o755)
    s.mkdir(b"d/sub/sub", 0o755)
    s.mknod(b"d/fifo", stat.S_IFIFO | 0o600)
    s.symlink(b"x", b"d/link")
    for name in (b"d/file", b"d/sub", b"d/sub/sub", b"d/fifo", b"d/link"):
        tell(s.stat, name)


@agreed
def test_statvfs(s: Subject, tell: Story) -> None:
    tell(s.statvfs)


def test_statvfs_counts_what_is_written(oracle: Oracle) -> None:
    """Free blocks and inodes are the backing's of this moment."""
    s, behind = oracle.mounted, oracle.behind["mount"]
    s.put(b"file", bytes(1 << 20))
    h = s.open(b"file")
    s.fsync(h)
    s.close(h)
    there, seen = free(behind.top), free(s.top)
    while (now := free(behind.top)) != there:  # what was unlinked before goes when it likes
        there, seen = now, free(s.top)
    assert seen == there


def free(top: bytes) -> tuple[int, ...]:
    st = os.statvfs(top)
    return st.f_bfree, st.f_bavail, st.f_ffree
