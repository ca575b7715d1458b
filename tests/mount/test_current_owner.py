"""An inode's present owner decides who may change it, not the one that the kernel knows: root may have taken it behind.

The mount is exclusive, so nothing tells the kernel, which believes what it knows for an hour. A plain directory tells
how it is without a mount.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.linux.credentials import Capability
from tests.support.acls import ACCESS, GROUP_OBJ, MASK, NOBODY, OTHER, USER, USER_OBJ, acl
from tests.support.mount_and_backing import Sides
from tests.support.other_users import as_user
from tests.support.privileges import FIRST, HE, as_root_in_there, in_child, keep_only

pytestmark = pytest.mark.needs("root", "fuse", "loop")

OTHERS, TEAM = 72_002, 72_100
HIS_OWN = acl((USER_OBJ, 6, NOBODY), (USER, 6, HE), (GROUP_OBJ, 4, NOBODY), (MASK, 6, NOBODY), (OTHER, 0, NOBODY))


def put(place: Sides, name: str, mode: int, *, is_directory: bool = False) -> Path:
    """Make something of the user's, which the kernel knows for that."""
    path = place.seen / name
    path.mkdir() if is_directory else path.write_bytes(b"content")
    os.setxattr(path, "user.his", b"1")
    os.chown(path, HE, HE)
    path.chmod(mode)
    path.stat()
    return path


@pytest.fixture
def place(users_sides: Sides, own_name: str) -> Sides:
    place = users_sides.below(own_name)
    place.seen.mkdir()
    place.seen.chmod(0o777)
    return place


class Target(NamedTuple):
    """What a user works on: by its path, or an fd of it."""

    path: Path
    fd: int = -1


Act = Callable[[Target], object]

FILES: dict[str, Act] = {
    "set-user-ID by fd": lambda at: os.fchmod(at.fd, 0o4755),
    "set-user-ID by path": lambda at: os.chmod(at.path, 0o4755),
    "owner": lambda at: os.fchown(at.fd, HE, -1),
    "group": lambda at: os.fchown(at.fd, -1, HE),
    "times": lambda at: os.utime(at.fd, (1, 1)),
    "now": lambda at: os.utime(at.fd),
    "ACL": lambda at: os.setxattr(at.fd, ACCESS, HIS_OWN),
    "no ACL": lambda at: os.removexattr(at.fd, ACCESS),
    "attribute": lambda at: os.setxattr(at.fd, "user.mine", b"1"),
    "no attribute": lambda at: os.removexattr(at.fd, "user.his"),
    "size": lambda at: os.truncate(at.path, 0),
}


def state(path: Path) -> object:
    """What must not have changed."""
    st = path.lstat()
    attributes = {name: os.getxattr(path, name) for name in os.listxattr(path)}
    return st.st_mode, st.st_uid, st.st_gid, st.st_size, st.st_atime_ns, st.st_mtime_ns, attributes


@contextmanager
def taken(place: Sides, path: Path, uid: int = 0, mode: int = 0o755) -> Iterator[int]:
    """An fd of what is another's by now, changed behind the mount; nothing of that may differ at the end."""
    behind = place.behind / path.name
    fd = os.open(path, os.O_RDONLY)
    try:
        os.chown(behind, uid, uid)
        behind.chmod(mode)
        before = state(behind)
        yield fd
        assert state(behind) == before
    finally:
        os.close(fd)


@pytest.mark.parametrize("act", FILES)
def test_who_owned_a_file_once_may_do_nothing_that_its_owner_may(place: Sides, act: str) -> None:
    path = put(place, "file", 0o755)
    if act == "no ACL":
        os.setxattr(path, ACCESS, HIS_OWN)
    with taken(place, path) as fd, pytest.raises(PermissionError):
        as_user(HE, lambda: FILES[act](Target(path, fd)) and None)


@pytest.mark.parametrize("act", ["mode", "owner", "times"])
def test_nor_of_a_directory(place: Sides, act: str) -> None:
    path = put(place, "directory", 0o755, is_directory=True)
    acts: dict[str, Act] = {**FILES, "mode": lambda at: os.fchmod(at.fd, 0o777)}
    with taken(place, path) as fd, pytest.raises(PermissionError):
        as_user(HE, lambda: acts[act](Target(path, fd)) and None)


def test_what_was_given_to_another_stays_his(place: Sides) -> None:
    path = put(place, "file", 0o644)
    with taken(place, path, OTHERS, 0o600) as fd:
        for act in FILES.values():
            with pytest.raises(PermissionError):
                as_user(HE, partial(act, Target(path, fd)))


def test_who_is_refused_sees_why(place: Sides) -> None:
    """The kernel asks again whose it is, though it might have believed that for an hour."""
    path = put(place, "file", 0o755)
    with taken(place, path) as fd:
        with pytest.raises(PermissionError):
            as_user(HE, lambda: os.fchmod(fd, 0o4755))
        assert os.fstat(fd).st_uid == 0


def test_who_chmods_while_root_takes_over_gets_no_program_of_roots(place: Sides) -> None:
    for i in range(20):
        path = put(place, f"file-{i}", 0o755)
        behind = place.behind / path.name
        pid = os.fork()
        if pid == 0:
            try:
                as_user(HE, partial(_chmod_until_refused, path))
            finally:
                os._exit(0)
        os.chown(behind, 0, 0)
        os.waitpid(pid, 0)
        assert not behind.stat().st_mode & stat.S_ISUID


def _chmod_until_refused(path: Path) -> None:
    for _ in range(1000):
        try:
            path.chmod(0o4755)
        except PermissionError:
            return


# What goes on working.


@pytest.mark.parametrize("how", ["times", "now", "size", "attribute"])
def test_who_may_write_by_another_group_of_his_may_do_what_writers_may(place: Sides, how: str) -> None:
    path = put(place, "file", 0o664)
    os.chown(path, OTHERS, TEAM)
    fd = os.open(path, os.O_RDONLY)
    try:
        if how == "times":
            with pytest.raises(PermissionError):
                as_user(HE, lambda: os.utime(fd, (1, 1)), groups=[TEAM])
        else:
            as_user(HE, lambda: FILES[how](Target(path, fd)) and None, groups=[TEAM])
    finally:
        os.close(fd)


def test_an_owner_gives_a_file_to_another_group_of_his(place: Sides) -> None:
    path = put(place, "file", 0o755)
    as_user(HE, lambda: os.chown(path, -1, TEAM), groups=[TEAM])
    as_user(HE, lambda: os.chmod(path, 0o2755), groups=[TEAM])
    st = (place.behind / "file").stat()
    assert (st.st_gid, stat.S_IMODE(st.st_mode)) == (TEAM, 0o2755)
    with pytest.raises(PermissionError):
        as_user(HE, lambda: os.chown(path, -1, OTHERS), groups=[TEAM])


CAPABLE: dict[str, tuple[Capability, Act]] = {
    "mode": (Capability.FOWNER, lambda at: os.chmod(at.path, 0o700)),
    "owner": (Capability.CHOWN, lambda at: os.chown(at.path, HE, HE)),
    "times": (Capability.FOWNER, lambda at: os.utime(at.path, (1, 1))),
    "now": (Capability.DAC_OVERRIDE, lambda at: os.utime(at.path)),
    "size": (Capability.DAC_OVERRIDE, lambda at: os.truncate(at.path, 0)),
    "ACL": (Capability.FOWNER, lambda at: os.setxattr(at.path, ACCESS, HIS_OWN)),
    "attribute": (Capability.DAC_OVERRIDE, lambda at: os.setxattr(at.path, "user.mine", b"1")),
    "trusted": (Capability.SYS_ADMIN, lambda at: os.setxattr(at.path, "trusted.mine", b"1")),
    "file's capability": (
        Capability.SETFCAP,
        lambda at: os.setxattr(at.path, "security.capability", struct.pack("<5I", 0x0200_0001, 1 << 13, 0, 0, 0)),
    ),
}


@pytest.mark.parametrize("act", CAPABLE)
def test_who_has_the_capability_may(place: Sides, act: str) -> None:
    path = put(place, "file", 0o600)
    os.chown(path, OTHERS, OTHERS)
    capability, do = CAPABLE[act]
    assert in_child(lambda: do(Target(path)), lambda: keep_only(capability)) == 0


@pytest.mark.needs("userns")
@pytest.mark.parametrize("owner", [FIRST, FIRST + 1])
@pytest.mark.parametrize("act", ["mode", "owner", "times", "size", "ACL"])
def test_root_of_a_user_namespace_may_where_that_knows_the_owner(place: Sides, act: str, owner: int) -> None:
    path = put(place, "file", 0o600)
    os.chown(path, owner, owner)
    path.stat()
    acts: dict[str, Act] = {name: do for name, (_capability, do) in CAPABLE.items()}
    acts["owner"] = lambda at: os.chown(at.path, 2, 2)  # in there
    acts["ACL"] = lambda at: os.setxattr(at.path, ACCESS, HIS_OWN.replace(struct.pack("<I", HE), struct.pack("<I", 7)))
    assert in_child(lambda: acts[act](Target(path)), as_root_in_there) == 0


@pytest.mark.needs("userns")
def test_but_not_where_the_owner_is_another_by_now(place: Sides) -> None:
    path = put(place, "file", 0o755)
    os.chown(path, FIRST + 1, FIRST + 1)
    path.stat()
    with taken(place, path, uid=HE) as fd:
        assert in_child(lambda: os.fchmod(fd, 0o4755), as_root_in_there) != 0
