"""Files: opened, read, written and cut as on the native filesystem."""

import errno
import itertools
import mmap
import os
from collections.abc import Callable

import pytest

from tests.support.move_entries import pass_a_tick
from tests.support.oracle import EACH_WAY, Oracle, agreed
from tests.support.oracle_subjects import Story, Subject, outcome

pytestmark = [pytest.mark.needs("root", "fuse", "loop"), EACH_WAY]

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
                tell.told.append(errno.errorcode[error.errno or 0])
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
        tell.told.append(f"{label} moved {moved}")

    moved_by("mknod", lambda: s.mknod(b"d/new", 0o100600))
    moved_by("link", lambda: s.link(b"d/file", b"d/link"))
    moved_by("unlink of a link", lambda: s.unlink(b"d/link"))
    moved_by("rename within", lambda: s.rename(b"d/new", b"d/newer"))
    moved_by("rename of the file", lambda: (s.rename(b"d/file", b"d/f"), s.rename(b"d/f", b"d/file")))
    moved_by("rename away", lambda: s.rename(b"d/newer", b"gone"))
    moved_by("chmod", lambda: s.chmod(b"d/file", 0o600))
    moved_by("chown", lambda: s.chown(b"d/file", 5, 5))
    moved_by("setxattr", lambda: s.setxattr(b"d/file", "trusted.a", b"1"))  # user's: not on tmpfs before Linux 6.6
    moved_by("truncate", lambda: s.truncate(b"d/file", 3))
    moved_by("truncate to the same size", lambda: s.truncate(b"d/file", 3))
    moved_by("write", lambda: s.put(b"d/file", b"again", flags=0))
    moved_by("open to cut", lambda: s.put(b"d/file"))
    moved_by("read", lambda: (s.get(b"d/file"), s.listdir(b"d")))
