"""For any caller the mount creates, refuses and clears bits for each user as the filesystem below does."""

import os
import stat
from collections.abc import Callable

import pytest

from tests.support.acls import ACCESS, DEFAULT, NOBODY, acl
from tests.support.oracle import Oracle
from tests.support.oracle_subjects import Native, Story
from tests.support.other_users import as_user

pytestmark = pytest.mark.needs("root", "fuse", "loop")

ALICE, BOB, TEAM = 70_001, 70_002, 70_100


def agree_as(
    oracle: Oracle,
    prepare: Callable[[Native], None],
    act: Callable[[Native, Story], None],
    uid: int,
    groups: tuple[int, ...] = (),
) -> None:
    """Root prepares, the user acts; answers and trees are equal, to root's eye."""
    told = []
    for s in (oracle.native, oracle.mounted):
        os.chmod(s.top, 0o755)
        prepare(s)

        def work(s: Native = s) -> list[str]:
            story = Story()
            act(s, story)
            return story.lines

        told.append(as_user(uid, work, groups=groups))
    assert told[1] == told[0]
    assert oracle.mounted.tree() == oracle.native.tree()


def shared(s: Native) -> None:
    """A directory for all, one for the team, one of Bob's, and a file of each kind of right."""
    for name, mode, uid, gid in (
        (b"all", 0o777, 0, 0),
        (b"sticky", 0o1777, 0, 0),
        (b"team", 0o2770, 0, TEAM),
        (b"bobs", 0o755, BOB, BOB),
        (b"secret", 0o700, BOB, BOB),
    ):
        s.mkdir(name)
        s.chown(name, uid, gid)
        s.chmod(name, mode)
        s.put(name + b"/of bob", b"bob")
        s.chown(name + b"/of bob", BOB, TEAM)
        s.chmod(name + b"/of bob", 0o640)
        s.mkdir(name + b"/empty")


PLACES = (b"all", b"sticky", b"team", b"bobs", b"secret")


@pytest.mark.parametrize("groups", [(), (TEAM,)], ids=["alone", "in the team"])
def test_what_a_user_makes_is_his(oracle: Oracle, groups: tuple[int, ...]) -> None:
    def act(s: Native, tell: Story) -> None:
        for top in PLACES:
            with s.umask(0o027):
                tell(s.put, top + b"/file", b"alice", 0o666)
                tell(s.put, top + b"/setgid", b"", 0o2775)
                tell(s.put, top + b"/setuid", b"", 0o6777)
                tell(s.mkdir, top + b"/d", 0o777)
                tell(s.mkdir, top + b"/d/d", 0o1777)
                tell(s.symlink, b"x", top + b"/link")
                tell(s.mknod, top + b"/fifo", stat.S_IFIFO | 0o666)
                tell(s.mknod, top + b"/reg", stat.S_IFREG | 0o2775)
                tell(s.mknod, top + b"/device", stat.S_IFCHR | 0o666, os.makedev(1, 3))
                tell(s.link, top + b"/file", top + b"/again")
                tell(s.tree, top)

    agree_as(oracle, shared, act, ALICE, groups)


@pytest.mark.parametrize("groups", [(), (TEAM,)], ids=["alone", "in the team"])
def test_what_a_user_may_do_to_anothers_files(oracle: Oracle, groups: tuple[int, ...]) -> None:
    def act(s: Native, tell: Story) -> None:
        for top in PLACES:
            file = top + b"/of bob"
            tell(s.get, file)
            tell(s.opens, file, os.O_WRONLY)
            tell(s.truncate, file, 0)
            tell(s.chmod, file, 0o666)
            tell(s.chown, file, ALICE, -1)
            tell(s.utime, file, 1, 1)
            tell(s.setxattr, file, "user.a", b"1")
            tell(s.getxattr, file, "user.a")
            tell(s.link, file, top + b"/link")
            tell(s.rename, top + b"/empty", top + b"/renamed")
            tell(s.rmdir, top + b"/empty")
            tell(s.unlink, file)
            tell(s.listdir, top)

    agree_as(oracle, shared, act, ALICE, groups)


@pytest.mark.parametrize("groups", [(), (TEAM,)], ids=["alone", "in the team"])
def test_what_a_user_may_do_to_his_own(oracle: Oracle, groups: tuple[int, ...]) -> None:
    def act(s: Native, tell: Story) -> None:
        s.put(b"all/mine", b"mine")
        for gid in (TEAM, BOB, ALICE):
            tell(s.chmod, b"all/mine", 0o6755)
            tell(s.stat, b"all/mine")
            tell(s.chown, b"all/mine", -1, gid)
            tell(s.stat, b"all/mine")
            tell(s.chmod, b"all/mine", 0o6755)
            tell(s.stat, b"all/mine")
        tell(s.chown, b"all/mine", BOB, -1)
        tell(s.setxattr, b"all/mine", "trusted.a", b"1")
        tell(s.setxattr, b"all/mine", "user.a", b"1")
        tell(s.listxattr, b"all/mine")
        tell(s.utime, b"all/mine", 5, 6)
        tell(s.times, b"all/mine")

    agree_as(oracle, shared, act, ALICE, groups)


def test_default_acl_of_a_team(oracle: Oracle) -> None:
    """setfacl -d: what one makes, all may use, whatever the umask."""
    for_team = acl((1, 7, NOBODY), (2, 7, BOB), (4, 5, NOBODY), (8, 7, TEAM), (16, 7, NOBODY), (32, 0, NOBODY))

    def prepare(s: Native) -> None:
        s.mkdir(b"d")
        s.chmod(b"d", 0o777)
        s.setxattr(b"d", DEFAULT, for_team)

    def act(s: Native, tell: Story) -> None:
        with s.umask(0o077):
            tell(s.put, b"d/file", b"", 0o666)
            tell(s.mkdir, b"d/sub")
            tell(s.put, b"d/sub/file", b"", 0o644)
            tell(s.mknod, b"d/node", stat.S_IFREG | 0o660)
        for name in (b"d/file", b"d/sub", b"d/sub/file", b"d/node"):
            tell(s.stat, name)
            tell(s.getxattr, name, ACCESS)

    agree_as(oracle, prepare, act, ALICE)


def test_acl_lets_in_and_keeps_out(oracle: Oracle) -> None:

    def prepare(s: Native) -> None:
        for name, entry in (
            (b"for alice", (2, 6, ALICE)),
            (b"not for alice", (2, 0, ALICE)),
            (b"for team", (8, 6, TEAM)),
        ):
            s.put(name, b"content", 0o600)
            s.setxattr(name, ACCESS, acl((1, 6, NOBODY), *_sorted_in(entry)))

    def _sorted_in(entry: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        return sorted([entry, (4, 4, NOBODY), (16, 6, NOBODY), (32, 4, NOBODY)])

    def act(s: Native, tell: Story) -> None:
        for name in (b"for alice", b"not for alice", b"for team"):
            tell(s.get, name)
            tell(s.opens, name, os.O_WRONLY)
            tell(s.setxattr, name, ACCESS, acl((1, 6, NOBODY), (4, 6, NOBODY), (32, 6, NOBODY)))

    for groups in ((), (TEAM,)):
        agree_as(oracle, prepare, act, ALICE, groups)


@pytest.mark.parametrize("groups", [(), (TEAM,)], ids=["alone", "in the team"])
@pytest.mark.parametrize("uid", [0, ALICE, BOB])
def test_acl_of_who_is_not_in_the_group_takes_set_group_id(oracle: Oracle, uid: int, groups: tuple[int, ...]) -> None:
    for_all = acl((1, 7, NOBODY), (4, 5, NOBODY), (32, 5, NOBODY))
    for_bob = acl((1, 7, NOBODY), (2, 6, BOB), (4, 5, NOBODY), (16, 7, NOBODY), (32, 5, NOBODY))

    def prepare(s: Native) -> None:
        for kind in (b"file", b"directory"):
            for name, mode in ((b"set", 0o6755), (b"extended", 0o2755), (b"default", 0o2755)):
                s.put(kind + name) if kind == b"file" else s.mkdir(kind + name)
                s.chown(kind + name, ALICE, TEAM)
                s.setxattr(kind + name, ACCESS, for_bob)
                s.chmod(kind + name, mode)

    def act(s: Native, tell: Story) -> None:
        for kind in (b"file", b"directory"):
            tell(s.setxattr, kind + b"set", ACCESS, for_all)
            tell(s.setxattr, kind + b"extended", ACCESS, for_bob)
            tell(s.setxattr, kind + b"default", DEFAULT, for_all)
            tell(s.tree)

    agree_as(oracle, prepare, act, uid, groups)


def test_directory_that_may_not_be_read_or_searched(oracle: Oracle) -> None:
    def prepare(s: Native) -> None:
        for name, mode in ((b"no search", 0o644), (b"no read", 0o711), (b"no write", 0o755)):
            s.mkdir(name)
            s.put(name + b"/file", b"content")
            s.chmod(name, mode)

    def act(s: Native, tell: Story) -> None:
        for name in (b"no search", b"no read", b"no write"):
            tell(s.listdir, name)
            tell(s.get, name + b"/file")
            tell(s.stat, name + b"/absent")
            tell(s.put, name + b"/new")
            tell(s.unlink, name + b"/file")
            tell(s.rmdir, name)

    agree_as(oracle, prepare, act, ALICE)
