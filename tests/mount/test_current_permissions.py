"""Opening, making and removing is judged by how the filesystem below is now, not by how the kernel takes it to be.

The mount is exclusive, so nothing tells the kernel, which believes what it knows for an hour. A plain directory tells
how it is without a mount. What a handle may do was judged when it was opened.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from fusefs.linux.credentials import Capability, drop_capabilities
from fusefs.linux.syscalls import RENAME_EXCHANGE, renameat2
from tests.support.acls import ACCESS, GROUP, GROUP_OBJ, MASK, NOBODY, OTHER, USER_OBJ, acl
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
    (place.seen / "sub").mkdir()
    for name in ("file", "other"):
        (place.seen / name).write_bytes(b"content")
    for name in ("sub", "file", "other", "."):
        os.chown(place.seen / name, uid, uid)
    (place.seen / "file").chmod(0o755)
    place.seen.chmod(mode)
    for path in (place.seen, *place.seen.iterdir()):
        path.stat()


def fresh(users_sides: Sides) -> Sides:
    place = users_sides.below(f"case-{next(_NUMBERS)}")
    place.seen.mkdir()
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
        return {act: errno_of(place.seen, act) for act, place in places.items()}

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
        place.seen.chmod(0o1777)
        os.chown(place.seen, 0, 0)
        place.seen.stat()
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
        (place.seen / "file").chmod(0o666)
        (place.seen / "file").stat()
        os.chown(place.behind / "file", OTHERS, TEAM)
        (place.behind / "file").chmod(0o606)
    refused(for_opens, partial(become, HE, groups=(TEAM,)))


def test_nor_whose_group_an_acl_names(for_opens: Places) -> None:
    """The mode says nothing of it: its group is the mask."""
    entries = (USER_OBJ, 6, NOBODY), (GROUP_OBJ, 6, NOBODY), (GROUP, 0, TEAM), (MASK, 6, NOBODY), (OTHER, 6, NOBODY)
    for place in for_opens.values():
        make_known(place, OTHERS, 0o777)
        (place.seen / "file").chmod(0o666)
        (place.seen / "file").stat()
        os.setxattr(place.behind / "file", ACCESS, acl(*entries))
    refused(for_opens, partial(become, HE, groups=(TEAM,)))


@pytest.mark.parametrize("users_sides", ["native", "opened"], indirect=True)
@pytest.mark.parametrize("is_listed", [True, False])
def test_whose_directory_it_was_may_not_list_it(place: Sides, is_listed: bool) -> None:
    """Where the kernel has us open it; where it opens it alone, that is the kernel's to allow."""
    make_known(place)
    sub = place.behind / "sub"
    if is_listed:
        as_user(HE, lambda: os.listdir(place.seen / "sub"))
    (sub / "changed").touch()
    os.chown(sub, OTHERS, OTHERS)
    sub.chmod(0o700)
    with pytest.raises(PermissionError):
        as_user(HE, lambda: os.listdir(place.seen / "sub"))


def test_a_directorys_fd_may_be_read_by_whom_it_was_given(place: Sides) -> None:
    make_known(place, OTHERS, 0o700)
    fd = os.open(place.seen, os.O_RDONLY | os.O_DIRECTORY)
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
    program = place.seen / "program"
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
        assert (place.seen / "file" if act in OPENS else place.seen).stat().st_uid == OTHERS, act


def test_a_whiteout_is_whose_rename_leaves_it(place: Sides) -> None:
    make_known(place)
    as_user(HE, lambda: NAMES["whiteout"](place.seen) and None)
    st = (place.behind / "file").lstat()
    assert (stat.S_ISCHR(st.st_mode), st.st_rdev, st.st_uid, st.st_gid) == (True, 0, HE, HE)


# What goes on working.


@pytest.mark.parametrize("n_groups", [1, 64, 65])
def test_who_may_by_another_group_of_his_does(for_all: Places, n_groups: int) -> None:
    """The native core knows those of 64 at most."""
    for place in for_all.values():
        make_known(place, OTHERS, 0o770)
        for path in (place.seen, *place.seen.iterdir()):
            os.chown(path, OTHERS, TEAM)
        (place.seen / "file").chmod(0o664)
    done(for_all, partial(become, HE, groups=tuple(range(TEAM - n_groups + 1, TEAM + 1))))


def test_what_a_member_makes_where_a_group_works_is_the_members_and_the_groups(place: Sides) -> None:
    make_known(place, OTHERS)
    for path in (place.seen, *place.seen.iterdir()):
        os.chown(path, OTHERS, TEAM)
    place.seen.chmod(0o2775)

    def work() -> list[tuple[str, int, int, int]]:
        os.umask(0o022)
        opened(place.seen / "made", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        (place.seen / "directory").mkdir()
        (place.seen / "made").rename(place.seen / "moved")
        (place.seen / "moved").rename(place.seen / "other")  # what is another's goes
        (place.seen / "file").unlink()
        (place.seen / "sub").rmdir()
        found = (path.lstat() for path in sorted(place.seen.iterdir()))
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
        (place.seen / "file").chmod(0o666)
        for path in (place.seen, place.seen / "file"):
            path.stat()
        place.behind.chmod(0o755)
        (place.behind / "file").chmod(0o600)
    over_modes = Capability.DAC_OVERRIDE, Capability.DAC_READ_SEARCH
    refused(for_all, partial(drop_capabilities, *over_modes), numbers=(errno.EACCES,))
    for act, place in for_all.items():
        (place.seen / "file").stat()
        ACTS[act](place.seen)  # with them


def test_a_member_who_may_write_a_file_sets_its_times_to_now_and_to_nothing_else(place: Sides) -> None:
    make_known(place, OTHERS)
    os.chown(place.seen / "file", OTHERS, TEAM)
    (place.seen / "file").chmod(0o664)
    os.utime(place.seen / "file", (1, 1))
    began_s = time.time()
    as_user(HE, lambda: os.utime(place.seen / "file"), groups=(TEAM,))
    assert (place.behind / "file").stat().st_mtime >= began_s - 1  # clocks of files are coarse
    with pytest.raises(PermissionError):
        as_user(HE, lambda: os.utime(place.seen / "file", (1, 1)), groups=(TEAM,))
    with pytest.raises(PermissionError):
        as_user(HE, lambda: os.utime(place.seen / "file"))


def test_who_has_the_capability_does(for_all: Places) -> None:
    for act, place in for_all.items():
        make_known(place, OTHERS, 0o700)
        (place.seen / "file").chmod(0o666 if act == "link" or "rename" in act else 0o600)
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
        (place.seen / "file").chmod(0o600)
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
    (place.seen / "file").chmod(mode)
    with overlay_on(place.seen) as overlay:
        file = overlay.path / "file"
        assert as_user(HE, file.read_bytes) == b"content"
        if mode == 0o600:
            with pytest.raises(PermissionError):
                as_user(OTHERS, file.read_bytes)
        as_user(HE, lambda: file.write_bytes(b"his own") and None)
        assert file.read_bytes() == b"his own"
    assert (place.behind / "file").read_bytes() == b"content"
