"""Attributes: modes, owners, times, xattrs and ACLs are kept and refused as on the native filesystem."""

import os
import stat

import pytest

from tests.support.acls import ACCESS, DEFAULT, NOBODY, acl
from tests.support.oracle import EACH_WAY, Oracle, agreed
from tests.support.oracle_subjects import KEEP, Story, Subject

pytestmark = [pytest.mark.needs("root", "fuse", "loop"), EACH_WAY]

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
