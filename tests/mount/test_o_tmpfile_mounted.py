"""Files without a name (O_TMPFILE), made and named as on the native filesystem."""

import errno
import mmap
import os
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from tests.support.acls import DEFAULT, GROUP_OBJ, MASK, NOBODY, OTHER, USER, USER_OBJ, acl
from tests.support.foreground_mount import Mounted, fresh_mount, trashd_mount, until
from tests.support.fuse_losing_tmpfiles import losing_volume
from tests.support.open_files import errno_of, opened
from tests.support.oracle import ALL_DIRECT, Oracle, agreed
from tests.support.oracle_subjects import Handle, Native, Story, Subject
from tests.support.other_users import as_user

pytestmark = [pytest.mark.needs("root", "fuse", "loop"), pytest.mark.takes_engine]

LIMIT_S = 60.0
ALICE, GROUP = 70_001, 70_002
_NUMBERS = count()


def naming(s: Subject) -> Callable[[Handle, bytes], None]:
    """What gives a file a name, as open(2) has it."""
    assert isinstance(s, Native)
    place = Path(os.fsdecode(s.top))

    def name_it(handle: Handle, path: bytes) -> None:
        with opened(place, os.O_PATH) as top:
            os.link(b"/proc/self/fd/%d" % handle.number, path, dst_dir_fd=top, follow_symlinks=True)

    return name_it


@ALL_DIRECT
@agreed
def test_a_file_without_a_name_is_written_and_named_as_below(s: Subject, tell: Story) -> None:
    s.mkdir(b"d")
    s.put(b"file")
    h = s.open(b"d", os.O_TMPFILE | os.O_RDWR, 0o640)
    tell(s.fstat, h)
    tell(s.pwrite, h, b"content" * 1000, 100)
    tell(s.pread, h, 9000, 95)
    tell(s.ftruncate, h, 5000)
    s.fsync(h)
    tell(s.fstat, h)
    tell(s.listdir, b"d")
    tell(s.rmdir, b"d")
    tell(naming(s), h, b"file")  # EEXIST
    tell(naming(s), h, b"one")
    tell(s.fstat, h)
    tell(naming(s), h, b"two")
    tell(s.unlink, b"one")
    tell(s.pwrite, h, b"more", 5000)
    tell(s.fchmod, h, 0o600)
    s.fsync(h)
    tell(s.fstat, h)
    s.close(h)
    tell(s.get, b"two")


@ALL_DIRECT
@agreed
def test_what_is_asked_wrong_is_refused_as_below(s: Subject, tell: Story) -> None:
    s.mkdir(b"d")
    s.put(b"file")
    tell(s.opens, b"d", os.O_TMPFILE)
    tell(s.opens, b"file", os.O_TMPFILE | os.O_RDWR)
    tell(s.opens, b"absent", os.O_TMPFILE | os.O_RDWR)
    tell(s.opens, b"d", os.O_TMPFILE | os.O_WRONLY)
    h = s.open(b"d", os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
    tell(naming(s), h, b"never")
    s.close(h)


@ALL_DIRECT
@pytest.mark.parametrize("mask", [0, 0o22, 0o77])
@pytest.mark.parametrize("mode", [0o666, 0o4755, 0o2775, 0])
def test_owner_mode_and_group_are_as_below(oracle: Oracle, mask: int, mode: int) -> None:
    def act(s: Subject, tell: Story) -> None:
        assert isinstance(s, Native)
        for name, bits in ((b"plain", 0o777), (b"setgid", 0o2777), (b"acl", 0o777)):
            s.mkdir(name)
            s.chown(name, 0, GROUP)
            s.chmod(name, bits)
        entries = (USER_OBJ, 7, NOBODY), (USER, 7, ALICE), (GROUP_OBJ, 5, NOBODY), (MASK, 7, NOBODY), (OTHER, 0, NOBODY)
        tell(s.setxattr, b"acl", DEFAULT, acl(*entries))
        for name in (b"plain", b"setgid", b"acl"):

            def make(name: bytes = name) -> list[object]:
                with s.umask(mask):
                    h = s.open(name, os.O_TMPFILE | os.O_RDWR, mode)
                    told: list[object] = [s.fstat(h), sorted(os.listxattr(h.number))]
                    s.close(h)
                return told

            def make_as_alice(make: Callable[[], list[object]] = make) -> list[object]:
                return as_user(ALICE, make)

            tell(make)
            tell(make_as_alice)

    oracle.agree(act)


def unnamed(mounted: Mounted, flags: int = os.O_RDWR) -> int:
    return os.open(mounted.path, os.O_TMPFILE | flags, 0o600)


def test_its_blocks_are_free_when_it_is_closed(mounted: Mounted) -> None:
    free, n_fds = os.statvfs(mounted.backing).f_bfree, mounted.n_fds()
    fd = unnamed(mounted)
    os.write(fd, bytes(8 << 20))
    os.fsync(fd)
    assert os.statvfs(mounted.backing).f_bfree < free
    os.close(fd)
    assert until(lambda: os.statvfs(mounted.backing).f_bfree >= free)
    assert until(lambda: mounted.n_fds() <= n_fds)


def test_a_named_one_is_the_same_file_for_all(mounted: Mounted) -> None:
    path = mounted.path / f"named{next(_NUMBERS)}"
    fd = unnamed(mounted)
    os.write(fd, b"before")
    with opened(mounted.path, os.O_PATH) as top:
        os.link(f"/proc/self/fd/{fd}", path.name, dst_dir_fd=top, follow_symlinks=True)
    with mmap.mmap(fd, 6) as mapped, path.open("r+b", buffering=0) as other:
        other.write(b"b")
        mapped[1:3] = b"EF"
        assert other.read() == b"EFore"
        assert os.path.samestat(os.fstat(fd), path.stat())
    os.write(fd, b" and after")
    os.close(fd)
    below = mounted.backing / path.name
    assert below.read_bytes() == path.read_bytes() == b"bEFore and after"
    assert path.stat().st_ino == below.stat().st_ino
    assert path.stat().st_nlink == below.stat().st_nlink == 1


def test_it_is_opened_again_by_its_fd(mounted: Mounted) -> None:
    fd = unnamed(mounted)
    os.write(fd, b"content")
    with opened(Path(f"/proc/self/fd/{fd}"), os.O_RDWR) as again:
        os.pwrite(again, b"C", 0)
        os.close(fd)
        assert os.pread(again, 9, 0) == b"Content"
        assert os.fstat(again).st_nlink == 0


def test_a_user_has_his_own(mounted: Mounted) -> None:
    def make() -> tuple[int, int]:
        with tempfile.TemporaryFile(dir=mounted.path) as file:
            file.write(b"his")
            file.flush()
            st = os.fstat(file.fileno())
            return st.st_uid, st.st_size

    before = mounted.stats().operations["tmpfile"].n()
    assert as_user(ALICE, make) == (ALICE, 3)
    assert mounted.stats().operations["tmpfile"].n() == before + 1


def test_in_a_directory_that_is_gone_there_is_none_or_one_that_goes(mounted: Mounted) -> None:
    """Filesystems differ in that."""
    gone = mounted.path / "gone"
    gone.mkdir()
    with opened(gone, os.O_RDONLY) as fd:
        gone.rmdir()
        made = errno_of(lambda: os.close(os.open(f"/proc/self/fd/{fd}", os.O_TMPFILE | os.O_RDWR)))
        assert made in (0, errno.ENOENT, errno.EPERM)


def test_where_nobody_answers_programs_take_a_name() -> None:
    with fresh_mount("coherence=exclusive", "engine=plain", limit_s=LIMIT_S) as mounted:
        assert errno_of(lambda: unnamed(mounted)) == errno.EOPNOTSUPP
        with tempfile.TemporaryFile(dir=mounted.path) as file:
            file.write(b"content")


@pytest.mark.parametrize("option", ["backing=slow", "backing=local"])
def test_none_is_made_where_closing_it_would_lose_it(option: str) -> None:
    with losing_volume() as losing, tempfile.TemporaryDirectory() as point:
        options = ["coherence=exclusive", option]
        with trashd_mount(losing.path / "d", Path(point), options, limit_s=LIMIT_S) as mounted:
            before = losing.n_unnamed()
            for _ in range(2):
                with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
                    os.open(mounted.path, os.O_TMPFILE | os.O_RDWR)
            assert losing.n_unnamed() == before
