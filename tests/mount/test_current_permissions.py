"""Opening, making, removing and changing is judged by how the filesystem below is now, owners above all."""

import errno
import itertools
import os
import stat
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.linux.credentials import Capability, drop_capabilities
from fusefs.linux.syscalls import RENAME_EXCHANGE, renameat2
from tests.support.acls import ACCESS, GROUP, GROUP_OBJ, MASK, NOBODY, OTHER, USER, USER_OBJ, acl
from tests.support.mount_and_backing import Sides
from tests.support.other_users import as_user, become, called_by
from tests.support.privileges import FIRST, HE, Credentials, as_root_in_there, in_child, keep_only
from tests.support.real_filesystems import overlay_on
from tests.support.transports import is_plain

pytestmark = pytest.mark.needs("root", "fuse", "loop")


OTHERS, TEAM = 72_002, 72_100
_NUMBERS = itertools.count()
RENAME_WHITEOUT = 4
_CAP_SETGID = 6


def make_known(place: Sides, uid: int = HE, mode: int = 0o755) -> None:
    """Make it a user's, with some things in it, which the kernel knows for that."""
    (place.mount_path / "sub").mkdir()
    for name in ("file", "other"):
        (place.mount_path / name).write_bytes(b"content")
    for name in ("sub", "file", "other", "."):
        os.chown(place.mount_path / name, uid, uid)
    (place.mount_path / "file").chmod(0o755)
    place.mount_path.chmod(mode)
    for path in (place.mount_path, *place.mount_path.iterdir()):
        path.stat()


def fresh(users_sides: Sides) -> Sides:
    place = users_sides.below(f"fresh-{next(_NUMBERS)}")
    place.mount_path.mkdir()
    return place


@pytest.fixture
def place(users_sides: Sides) -> Sides:
    return fresh(users_sides)


def opened(path: Path, flags: int) -> None:
    os.close(os.open(path, flags, 0o666))


Act = Callable[[Path], object]
NAMES: dict[str, Act] = {
    "create": lambda at: opened(at / "new", os.O_CREAT | os.O_WRONLY),
    "O_TMPFILE": lambda at: opened(at, os.O_TMPFILE | os.O_RDWR),
    "mkdir": lambda at: (at / "new").mkdir(),
    "mknod": lambda at: os.mkfifo(at / "new"),
    "symlink": lambda at: (at / "new").symlink_to("target"),
    "link": lambda at: os.link(at / "file", at / "new"),
    "unlink": lambda at: (at / "file").unlink(),
    "rmdir": lambda at: (at / "sub").rmdir(),
    "rename": lambda at: (at / "file").rename(at / "new"),
    "rename over": lambda at: (at / "file").rename(at / "other"),
    "exchange": lambda at: rename2(at / "file", at / "other", RENAME_EXCHANGE),
    "whiteout": lambda at: rename2(at / "file", at / "new", RENAME_WHITEOUT),
}
OPENS: dict[str, Act] = {
    "read": lambda at: opened(at / "file", os.O_RDONLY),
    "write": lambda at: opened(at / "file", os.O_WRONLY),
    "append": lambda at: opened(at / "file", os.O_WRONLY | os.O_APPEND),
    "cut": lambda at: opened(at / "file", os.O_WRONLY | os.O_TRUNC),
    "truncate": lambda at: os.truncate(at / "file", 0),
}
ACTS = {**NAMES, **OPENS}
Places = Mapping[str, Sides]
"""A directory for each act: one process does them all, each in its own."""


def is_missing(act: str) -> bool:
    """Whether a mount has no such act."""
    return is_plain() and act == "O_TMPFILE"


@pytest.fixture
def for_names(users_sides: Sides) -> Places:
    return {act: fresh(users_sides) for act in NAMES if not is_missing(act)}


@pytest.fixture
def for_opens(users_sides: Sides) -> Places:
    return {act: fresh(users_sides) for act in OPENS}


@pytest.fixture
def for_all(users_sides: Sides) -> Places:
    return {act: fresh(users_sides) for act in ACTS if not is_missing(act)}


def rename2(old: Path, new: Path, flags: int) -> None:
    renameat2(-100, os.fsencode(old), -100, os.fsencode(new), flags)


def tree(at: Path) -> object:
    """What must not have changed."""
    return sorted(
        (path.name, st.st_ino, st.st_mode, st.st_uid, st.st_size, st.st_nlink)
        for path in [at, *at.iterdir()]
        for st in [path.lstat()]
    )


def each_done(places: Places, be: Callable[[], object], before_each: Act = lambda _at: None) -> dict[str, int]:
    """The errno of each act by one process; 0: it was done. be: makes that process a user"""

    def work() -> dict[str, int]:
        return {act: errno_of(place.mount_path, act) for act, place in places.items()}

    def errno_of(at: Path, act: str) -> int:
        before_each(at)
        try:
            ACTS[act](at)
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    return called_by(be, work, "each_done")


def refused(
    places: Places,
    be: Callable[[], object] = lambda: become(HE),
    before_each: Act = lambda _at: None,
    numbers: tuple[int, ...] = (errno.EACCES, errno.EPERM),
) -> None:
    """All acts, and nothing has changed. numbers: the errno that each may have"""
    before = {act: tree(place.behind) for act, place in places.items()}
    answers = each_done(places, be, before_each)
    assert not {act: number for act, number in answers.items() if number not in numbers}
    assert {act: tree(place.behind) for act, place in places.items()} == before


def done(places: Places, be: Callable[[], object]) -> None:
    assert each_done(places, be) == dict.fromkeys(places, 0)


def test_whose_directory_it_was_may_change_no_name_in_it(for_names: Places) -> None:
    for place in for_names.values():
        make_known(place)
        os.chown(place.behind, 0, 0)
    refused(for_names)


def test_nor_in_a_sticky_one_what_is_anothers_by_now(users_sides: Sides) -> None:
    places = {act: fresh(users_sides) for act in ("unlink", "rmdir", "rename", "rename over", "exchange", "whiteout")}
    for place in places.values():
        make_known(place)
        place.mount_path.chmod(0o1777)
        os.chown(place.mount_path, 0, 0)
        place.mount_path.stat()
        for name in ("file", "sub"):
            os.chown(place.behind / name, OTHERS, OTHERS)
    refused(places)


def test_nor_where_his_group_may_less_than_others(for_names: Places) -> None:
    """Which the process is in still."""
    for place in for_names.values():
        make_known(place, OTHERS, 0o777)
        os.chown(place.behind, OTHERS, TEAM)
        place.behind.chmod(0o757)
    refused(for_names, partial(become, HE, groups=(TEAM,)))


def test_whose_file_it_was_may_not_open_it(for_opens: Places) -> None:
    for place in for_opens.values():
        make_known(place)
        os.chown(place.behind / "file", OTHERS, OTHERS)
        (place.behind / "file").chmod(0o600)
    refused(for_opens)


def test_nor_whose_group_may_less_than_others(for_opens: Places) -> None:
    for place in for_opens.values():
        make_known(place, OTHERS, 0o777)
        (place.mount_path / "file").chmod(0o666)
        (place.mount_path / "file").stat()
        os.chown(place.behind / "file", OTHERS, TEAM)
        (place.behind / "file").chmod(0o606)
    refused(for_opens, partial(become, HE, groups=(TEAM,)))


def test_nor_whose_group_an_acl_names(for_opens: Places) -> None:
    """The mode says nothing of it: its group is the mask."""
    entries = (USER_OBJ, 6, NOBODY), (GROUP_OBJ, 6, NOBODY), (GROUP, 0, TEAM), (MASK, 6, NOBODY), (OTHER, 6, NOBODY)
    for place in for_opens.values():
        make_known(place, OTHERS, 0o777)
        (place.mount_path / "file").chmod(0o666)
        (place.mount_path / "file").stat()
        os.setxattr(place.behind / "file", ACCESS, acl(*entries))
    refused(for_opens, partial(become, HE, groups=(TEAM,)))


@pytest.mark.parametrize("users_sides", ["native", "opened"], indirect=True)
@pytest.mark.parametrize("is_listed", [True, False])
def test_whose_directory_it_was_may_not_list_it(place: Sides, is_listed: bool) -> None:
    """Where the kernel has us open it; where it opens it alone, that is the kernel's to allow."""
    make_known(place)
    sub = place.behind / "sub"
    if is_listed:
        as_user(HE, lambda: os.listdir(place.mount_path / "sub"))
    (sub / "changed").touch()
    os.chown(sub, OTHERS, OTHERS)
    sub.chmod(0o700)
    with pytest.raises(PermissionError):
        as_user(HE, lambda: os.listdir(place.mount_path / "sub"))


def test_a_directorys_fd_may_be_read_by_whom_it_was_given(place: Sides) -> None:
    make_known(place, OTHERS, 0o700)
    fd = os.open(place.mount_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert as_user(HE, lambda: sorted(os.listdir(fd))) == ["file", "other", "sub"]
    finally:
        os.close(fd)


def test_a_link_to_what_is_anothers_by_now_is_not_made(place: Sides) -> None:
    """fs.protected_hardlinks: not to what the user may not write."""
    make_known(place)
    os.chown(place.behind / "file", OTHERS, OTHERS)
    refused({"link": place})


def test_a_program_that_may_not_be_run_any_more_is_not(place: Sides) -> None:
    make_known(place)
    program = place.mount_path / "program"
    program.write_bytes(Path("/bin/true").read_bytes())
    program.chmod(0o711)  # not to be read
    assert (
        in_child(lambda: as_user(HE, lambda: os.spawnv(os.P_WAIT, program, ["program"])) and os._exit(9), lambda: None)
        == 0
    )
    (place.behind / "program").chmod(0o700)
    with pytest.raises(PermissionError):
        as_user(HE, lambda: subprocess.run([program], check=True))


def test_who_is_refused_may_again_when_the_kernel_has_asked(for_all: Places) -> None:
    """What was forgotten for the refusal is seen as it is."""
    for place in for_all.values():
        make_known(place)
        for path in (place.behind, *place.behind.iterdir()):
            os.chown(path, OTHERS, OTHERS)
        (place.behind / "file").chmod(0o600)
    refused(for_all)
    for act, place in for_all.items():
        assert (place.mount_path / "file" if act in OPENS else place.mount_path).stat().st_uid == OTHERS, act


def test_a_whiteout_is_whose_rename_leaves_it(place: Sides) -> None:
    make_known(place)
    as_user(HE, lambda: NAMES["whiteout"](place.mount_path) and None)
    st = (place.behind / "file").lstat()
    assert (stat.S_ISCHR(st.st_mode), st.st_rdev, st.st_uid, st.st_gid) == (True, 0, HE, HE)


# What goes on working.


@pytest.mark.parametrize("n_groups", [1, 64, 65])
def test_who_may_by_another_group_of_his_does(for_all: Places, n_groups: int) -> None:
    """The native core knows those of 64 at most."""
    for place in for_all.values():
        make_known(place, OTHERS, 0o770)
        for path in (place.mount_path, *place.mount_path.iterdir()):
            os.chown(path, OTHERS, TEAM)
        (place.mount_path / "file").chmod(0o664)
    done(for_all, partial(become, HE, groups=tuple(range(TEAM - n_groups + 1, TEAM + 1))))


def test_what_a_member_makes_where_a_group_works_is_the_members_and_the_groups(place: Sides) -> None:
    make_known(place, OTHERS)
    for path in (place.mount_path, *place.mount_path.iterdir()):
        os.chown(path, OTHERS, TEAM)
    place.mount_path.chmod(0o2775)

    def work() -> list[tuple[str, int, int, int]]:
        os.umask(0o022)
        opened(place.mount_path / "made", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        (place.mount_path / "directory").mkdir()
        (place.mount_path / "made").rename(place.mount_path / "moved")
        (place.mount_path / "moved").rename(place.mount_path / "other")  # what is another's goes
        (place.mount_path / "file").unlink()
        (place.mount_path / "sub").rmdir()
        found = (path.lstat() for path in sorted(place.mount_path.iterdir()))
        return [(stat.filemode(st.st_mode), st.st_uid, st.st_gid, st.st_size) for st in found]

    team = as_user(HE, work, groups=(TEAM,))
    assert [told[:3] for told in team] == [("drwxr-sr-x", HE, TEAM), ("-rw-r--r--", HE, TEAM)]
    assert sorted(path.name for path in place.behind.iterdir()) == ["directory", "other"]


def test_who_has_left_a_group_a_moment_ago_may_not(for_names: Places) -> None:
    for place in for_names.values():
        make_known(place, OTHERS, 0o777)
        for path in (place.behind, *place.behind.iterdir()):
            os.chown(path, OTHERS, TEAM)
        place.behind.chmod(0o770)

    def be_member_and_leave(at: Path) -> None:
        os.setgroups((TEAM,))
        (at / "his").mkdir()
        (at / "his").rmdir()
        os.setgroups(())

    may_leave = Credentials(HE, HE, (TEAM,), capability=_CAP_SETGID)
    refused(for_names, may_leave.be, be_member_and_leave, (errno.EACCES,))


def test_root_without_those_over_modes_may_what_others_may(for_all: Places) -> None:
    for place in for_all.values():
        make_known(place, OTHERS, 0o777)
        (place.mount_path / "file").chmod(0o666)
        for path in (place.mount_path, place.mount_path / "file"):
            path.stat()
        place.behind.chmod(0o755)
        (place.behind / "file").chmod(0o600)
    over_modes = Capability.DAC_OVERRIDE, Capability.DAC_READ_SEARCH
    refused(for_all, partial(drop_capabilities, *over_modes), numbers=(errno.EACCES,))
    for act, place in for_all.items():
        (place.mount_path / "file").stat()
        ACTS[act](place.mount_path)  # with them


def test_a_member_who_may_write_a_file_sets_its_times_to_now_and_to_nothing_else(place: Sides) -> None:
    make_known(place, OTHERS)
    os.chown(place.mount_path / "file", OTHERS, TEAM)
    (place.mount_path / "file").chmod(0o664)
    os.utime(place.mount_path / "file", (1, 1))
    began_s = time.time()
    as_user(HE, lambda: os.utime(place.mount_path / "file"), groups=(TEAM,))
    assert (place.behind / "file").stat().st_mtime >= began_s - 1  # clocks of files are coarse
    with pytest.raises(PermissionError):
        as_user(HE, lambda: os.utime(place.mount_path / "file", (1, 1)), groups=(TEAM,))
    with pytest.raises(PermissionError):
        as_user(HE, lambda: os.utime(place.mount_path / "file"))


def test_who_has_the_capability_does(for_all: Places) -> None:
    for act, place in for_all.items():
        make_known(place, OTHERS, 0o700)
        (place.mount_path / "file").chmod(0o666 if act == "link" or "rename" in act else 0o600)
    done(for_all, partial(keep_only, Capability.DAC_OVERRIDE))


def test_root_without_any_may_what_an_owner_may(for_all: Places) -> None:
    for place in for_all.values():
        make_known(place, 0, 0o755)
    done(for_all, partial(become, 0))


def test_but_nothing_that_is_anothers_by_now(for_all: Places) -> None:
    for place in for_all.values():
        make_known(place, 0, 0o755)
        for path in (place.behind, *place.behind.iterdir()):
            os.chown(path, OTHERS, OTHERS)
        (place.behind / "file").chmod(0o600)
    refused(for_all, partial(become, 0))


@pytest.mark.needs("userns")
def test_root_of_a_user_namespace_does_where_that_knows_whose_it_is(for_all: Places) -> None:
    for place in for_all.values():
        make_known(place, FIRST + 1, 0o700)
        (place.mount_path / "file").chmod(0o600)
    done(for_all, as_root_in_there)


@pytest.mark.needs("userns")
def test_and_does_not_where_it_does_not(for_all: Places) -> None:
    for place in for_all.values():
        make_known(place, FIRST + 1, 0o755)
        for path in (place.behind, *place.behind.iterdir()):
            os.chown(path, HE, HE)
        (place.behind / "file").chmod(0o600)
    refused(for_all, as_root_in_there, numbers=(*{*errno.errorcode} - {errno.EIO},))


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_an_overlay_on_a_mount_shows_users_their_files(place: Sides, mode: int) -> None:
    """It reads what is below as root, which mounted it, for every caller: no thread of root's is to be seen."""
    make_known(place)
    (place.mount_path / "file").chmod(mode)
    with overlay_on(place.mount_path) as overlay:
        file = overlay.path / "file"
        assert as_user(HE, file.read_bytes) == b"content"
        if mode == 0o600:
            with pytest.raises(PermissionError):
                as_user(OTHERS, file.read_bytes)
        as_user(HE, lambda: file.write_bytes(b"his own") and None)
        assert file.read_bytes() == b"his own"
    assert (place.behind / "file").read_bytes() == b"content"


HIS_OWN = acl((USER_OBJ, 6, NOBODY), (USER, 6, HE), (GROUP_OBJ, 4, NOBODY), (MASK, 6, NOBODY), (OTHER, 0, NOBODY))


def put(own_place: Sides, name: str, mode: int, *, is_directory: bool = False) -> Path:
    """Make something of the user's, which the kernel knows for that."""
    path = own_place.mount_path / name
    path.mkdir() if is_directory else path.write_bytes(b"content")
    os.setxattr(path, "user.his", b"1")
    os.chown(path, HE, HE)
    path.chmod(mode)
    path.stat()
    return path


@pytest.fixture
def own_place(users_sides: Sides, own_name: str) -> Sides:
    own_place = users_sides.below(own_name)
    own_place.mount_path.mkdir()
    own_place.mount_path.chmod(0o777)
    return own_place


class Target(NamedTuple):
    """What a user works on: by its path, or an fd of it."""

    path: Path
    fd: int = -1


TargetAct = Callable[[Target], object]
FILES: dict[str, TargetAct] = {
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
def taken(own_place: Sides, path: Path, uid: int = 0, mode: int = 0o755) -> Iterator[int]:
    """An fd of what is another's by now, changed behind the mount; nothing of that may differ at the end."""
    behind = own_place.behind / path.name
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
def test_who_owned_a_file_once_may_do_nothing_that_its_owner_may(own_place: Sides, act: str) -> None:
    path = put(own_place, "file", 0o755)
    if act == "no ACL":
        os.setxattr(path, ACCESS, HIS_OWN)
    with taken(own_place, path) as fd, pytest.raises(PermissionError):
        as_user(HE, lambda: FILES[act](Target(path, fd)) and None)


@pytest.mark.parametrize("act", ["mode", "owner", "times"])
def test_nor_of_a_directory(own_place: Sides, act: str) -> None:
    path = put(own_place, "directory", 0o755, is_directory=True)
    acts: dict[str, TargetAct] = {**FILES, "mode": lambda at: os.fchmod(at.fd, 0o777)}
    with taken(own_place, path) as fd, pytest.raises(PermissionError):
        as_user(HE, lambda: acts[act](Target(path, fd)) and None)


def test_what_was_given_to_another_stays_his(own_place: Sides) -> None:
    path = put(own_place, "file", 0o644)
    with taken(own_place, path, OTHERS, 0o600) as fd:
        for act in FILES.values():
            with pytest.raises(PermissionError):
                as_user(HE, partial(act, Target(path, fd)))


def test_who_is_refused_sees_why(own_place: Sides) -> None:
    """The kernel asks again whose it is, though it might have believed that for an hour."""
    path = put(own_place, "file", 0o755)
    with taken(own_place, path) as fd:
        with pytest.raises(PermissionError):
            as_user(HE, lambda: os.fchmod(fd, 0o4755))
        assert os.fstat(fd).st_uid == 0


def test_who_chmods_while_root_takes_over_gets_no_program_of_roots(own_place: Sides) -> None:
    for i in range(20):
        path = put(own_place, f"file-{i}", 0o755)
        behind = own_place.behind / path.name
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
def test_who_may_write_by_another_group_of_his_may_do_what_writers_may(own_place: Sides, how: str) -> None:
    path = put(own_place, "file", 0o664)
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


def test_an_owner_gives_a_file_to_another_group_of_his(own_place: Sides) -> None:
    path = put(own_place, "file", 0o755)
    as_user(HE, lambda: os.chown(path, -1, TEAM), groups=[TEAM])
    as_user(HE, lambda: os.chmod(path, 0o2755), groups=[TEAM])
    st = (own_place.behind / "file").stat()
    assert (st.st_gid, stat.S_IMODE(st.st_mode)) == (TEAM, 0o2755)
    with pytest.raises(PermissionError):
        as_user(HE, lambda: os.chown(path, -1, OTHERS), groups=[TEAM])


CAPABLE: dict[str, tuple[Capability, TargetAct]] = {
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
def test_who_has_the_capability_may(own_place: Sides, act: str) -> None:
    path = put(own_place, "file", 0o600)
    os.chown(path, OTHERS, OTHERS)
    capability, do = CAPABLE[act]
    assert in_child(lambda: do(Target(path)), lambda: keep_only(capability)) == 0


@pytest.mark.needs("userns")
@pytest.mark.parametrize("owner", [FIRST, FIRST + 1])
@pytest.mark.parametrize("act", ["mode", "owner", "times", "size", "ACL"])
def test_root_of_a_user_namespace_may_where_that_knows_the_owner(own_place: Sides, act: str, owner: int) -> None:
    path = put(own_place, "file", 0o600)
    os.chown(path, owner, owner)
    path.stat()
    acts: dict[str, TargetAct] = {name: do for name, (_capability, do) in CAPABLE.items()}
    acts["owner"] = lambda at: os.chown(at.path, 2, 2)  # in there
    acts["ACL"] = lambda at: os.setxattr(at.path, ACCESS, HIS_OWN.replace(struct.pack("<I", HE), struct.pack("<I", 7)))
    assert in_child(lambda: acts[act](Target(path)), as_root_in_there) == 0


@pytest.mark.needs("userns")
def test_but_not_where_the_owner_is_another_by_now(own_place: Sides) -> None:
    path = put(own_place, "file", 0o755)
    os.chown(path, FIRST + 1, FIRST + 1)
    path.stat()
    with taken(own_place, path, uid=HE) as fd:
        assert in_child(lambda: os.fchmod(fd, 0o4755), as_root_in_there) != 0
