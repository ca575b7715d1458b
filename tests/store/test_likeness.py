"""Likeness: what a fresh directory has of the old one, what it must not have, and when a swap is refused for it."""

import errno
import json
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.core.errors import NotAlike
from fusefs.linux.directory_metadata import apply_metadata, differences, read_metadata
from fusefs.linux.kernel import Kernel
from fusefs.store.check_swap import check_swap
from fusefs.store.stage import SwapOptions
from tests.support.acls import ACCESS, DEFAULT, GROUP, GROUP_OBJ, MASK, NOBODY, OTHER, USER, USER_OBJ, acl
from tests.support.crash_scenarios import wipe
from tests.support.make_trees import (
    APPEND_ONLY,
    IMMUTABLE,
    Dir,
    EntrySnapshot,
    flags_of,
    make_tree,
    remove_tree_hard,
    set_flags,
    snapshot,
)
from tests.support.other_users import as_user, run_as
from tests.support.real_filesystems import (
    FSXATTR,
    btrfs_subvolume,
    fsxattr,
    loop_volume,
    set_project,
    volume_of,
)
from tests.support.store_verbs import (
    ActingBefore,
    assert_silent,
    entries,
    folder_of,
    init,
    raw,
    recover_all,
    restore,
    swap,
    users_own,
)
from tests.support.trashd_command import TRASHD
from tests.support.two_users_store import shared_store

pytestmark = pytest.mark.needs("root")

ALICE, BOB, TEAM = 12001, 12002, 4242
NODUMP, NOATIME, DIRSYNC, TOPDIR, NOCOW = 0x40, 0x80, 0x1_0000, 0x2_0000, 0x80_0000
_EXTENT_SIZE_INHERIT, _COW_EXTENT_SIZE, _NODEFRAG, _DAX = 0x1000, 0x1_0000, 0x2000, 0x8000
_BEEGFS = 0x19830326

Dress = Callable[[Path], None]


PLAIN = [(USER_OBJ, 7, NOBODY), (GROUP_OBJ, 5, NOBODY), (MASK, 7, NOBODY), (OTHER, 5, NOBODY)]
ALICES_ACL = acl(*sorted([*PLAIN, (USER, 7, ALICE), (GROUP, 5, TEAM)]))


class Extended(NamedTuple):
    """struct fsxattr, asked of the kernel without the code under test."""

    flags: int
    extent_size: int
    n_extents: int
    project: int
    cow_extent_size: int


def extended(path: Path) -> Extended | None:
    """None where the filesystem has no such thing."""
    try:
        return Extended(*FSXATTR.unpack(fsxattr(path)))._replace(n_extents=0)
    except OSError:
        return None


def looks(path: Path) -> tuple[EntrySnapshot, Extended | None]:
    return snapshot(path)[0], extended(path)


def set_extended(path: Path, added_flags: int, extent_size: int = 0) -> None:
    """Add flags of struct fsxattr, and extent size hints for new extents and for copies."""
    flags, _, _, project, _ = FSXATTR.unpack(fsxattr(path))
    fsxattr(path, FSXATTR.pack(flags | added_flags, extent_size, 0, project, extent_size))


def xattrs(*names: str, value: bytes = b"\0value") -> Dress:
    def dress(path: Path) -> None:
        for name in names:
            os.setxattr(path, name, value)

    return dress


def owned(mode: int, dress: Dress = lambda _path: None) -> Dress:
    """Make a directory Alice's and the team's, with a mode."""

    def owned_dress(path: Path) -> None:
        os.chown(path, ALICE, TEAM)
        dress(path)
        path.chmod(mode)

    return owned_dress


ASPECTS: dict[str, Dress] = {
    "owner and group": owned(0o755),
    "closed": lambda path: path.chmod(0o000),
    "setgid": owned(0o2775),
    "sticky": lambda path: path.chmod(0o1777),
    "all set-id bits": owned(0o7751),
    "access ACL": xattrs(ACCESS, value=ALICES_ACL),
    "default ACL": xattrs(DEFAULT, value=ALICES_ACL),
    "both ACLs and setgid": owned(0o2770, xattrs(DEFAULT, ACCESS, value=ALICES_ACL)),
    "user xattrs": xattrs("user.one", "user.two"),
    "an empty xattr": xattrs("user.empty", value=b""),
    "a long trusted xattr": xattrs("trusted.one", value=b"t" * 700),
    "a label": xattrs("security.label"),
    "noatime and nodump": lambda path: set_flags(path, NOATIME | NODUMP),
}
EXT4: dict[str, Dress] = {
    "dirsync": lambda path: set_flags(path, DIRSYNC),
    "topdir": lambda path: set_flags(path, TOPDIR),
}
XFS: dict[str, Dress] = {
    "project": lambda path: set_project(path, 42, is_inherited=False),
    "inherited project": lambda path: set_project(path, 42),
    "extent size hint": lambda path: set_extended(path, _EXTENT_SIZE_INHERIT | _COW_EXTENT_SIZE, 1 << 16),
    "no defragmentation": lambda path: set_extended(path, _NODEFRAG),
    "dax": lambda path: set_extended(path, _DAX),
}
BTRFS: dict[str, Dress] = {
    "dirsync": lambda path: set_flags(path, DIRSYNC),
    "nocow": lambda path: set_flags(path, NOCOW),
    "zlib": xattrs("btrfs.compression", value=b"zlib"),
    "zstd": xattrs("btrfs.compression", value=b"zstd"),
    "lzo": xattrs("btrfs.compression", value=b"lzo"),
    "never compressed": xattrs("btrfs.compression", value=b"none"),
}
NEEDS = {"ext4": ["loop"], "xfs": ["loop", "xfs"], "btrfs": ["loop", "btrfs"], "tmpfs": [], "overlay": []}
CASES = [
    pytest.param(filesystem, dress, id=f"{filesystem}-{aspect}", marks=pytest.mark.needs(*NEEDS[filesystem]))
    for filesystem, more in {"ext4": EXT4, "xfs": XFS, "btrfs": BTRFS, "tmpfs": {}, "overlay": {}}.items()
    for aspect, dress in {**ASPECTS, **more}.items()
]


@pytest.fixture(scope="module")
def mounted() -> Iterator[Callable[[str], Path]]:
    """One volume of each filesystem, mounted when first asked for."""
    with ExitStack() as stack:
        yield cache(lambda name: stack.enter_context(loop_volume(name, 64) if NEEDS[name] else volume_of(name)))


@pytest.fixture
def volume() -> Iterator[Path]:
    """A tmpfs with a store and Alice's home; in the end the checker has nothing to say."""
    with shared_store(home=ALICE) as path:
        yield path
        assert_silent(path)


def emptied(volume: Path) -> Path:
    wipe(volume)
    init(volume)
    return volume


# What it has


@pytest.mark.parametrize(("filesystem", "dress"), CASES)
def test_a_fresh_directory_has_the_victims_likeness(
    mounted: Callable[[str], Path], filesystem: str, dress: Dress
) -> None:
    volume = emptied(mounted(filesystem))
    job = make_tree(volume / "job", {"results": "x"})
    plain = looks(job)
    dress(job)
    before = looks(job)
    assert before != plain
    swapped = swap(job)
    assert swapped.unlike == ()
    assert looks(job) == before
    assert os.listdir(job) == []
    restore(volume, swapped.id)
    assert looks(job) == before
    assert_silent(volume)


# What it has not


@pytest.mark.parametrize("name", ["security.evm", "security.ima", "trusted.overlay.opaque", "trusted.overlay.redirect"])
def test_what_speaks_of_one_inode_is_not_copied(volume: Path, name: str) -> None:
    job = make_tree(volume / "job", Dir({}, xattrs={name: b"y", "trusted.other": b"z"}))
    assert swap(job).unlike == ()
    assert os.listxattr(job) == ["trusted.other"]


@pytest.mark.needs("loop")
@pytest.mark.parametrize("flag", [IMMUTABLE, APPEND_ONLY])
def test_immutable_and_append_only_are_not_copied(mounted: Callable[[str], Path], flag: int) -> None:
    volume = emptied(mounted("ext4"))
    kernel = Kernel()
    for name in ("job", "fresh"):
        (volume / name).mkdir()
    set_flags(volume / "job", flag | NODUMP)
    with (
        kernel.open_path(raw(volume)) as base,
        kernel.open_dir(base, b"job") as job,
        kernel.open_dir(base, b"fresh") as fresh,
    ):
        wanted = read_metadata(kernel, job)
        apply_metadata(kernel, fresh, wanted)
        assert differences(wanted, read_metadata(kernel, fresh)) == []
    assert flags_of(volume / "fresh") & (flag | NODUMP) == NODUMP
    remove_tree_hard(volume / "job")
    assert_silent(volume)


def leaks(base: Path) -> list[Path]:
    """What in the store has an ACL, a set-group-id bit or a group that its owner did not choose."""
    (store,) = base.glob(".trashd*")
    return [
        path
        for path in (store, *store.rglob("*"))
        if any("acl" in name for name in os.listxattr(path))
        or path.stat().st_mode & stat.S_ISGID
        or path.stat().st_gid == TEAM
    ]


@pytest.mark.parametrize("uid", [0, ALICE])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("filesystem", ["tmpfs", pytest.param("ext4", marks=pytest.mark.needs("loop"))])
def test_a_base_with_a_default_acl_and_setgid_leaks_nothing(
    mounted: Callable[[str], Path], filesystem: str, is_first: bool, uid: int
) -> None:
    volume = mounted(filesystem)
    wipe(volume)
    base = make_tree(volume / "base", {})
    make_tree(base / "job", Dir({"results": "x"}, 0o750, (uid, uid)))
    before = looks(base / "job")
    if not is_first:
        init(base)
    os.chown(base, uid, TEAM)
    xattrs(DEFAULT, ACCESS, value=acl(*sorted([*PLAIN, (USER, 7, BOB), (GROUP, 7, TEAM)])))(base)
    base.chmod(0o2775)
    if is_first and uid == 0:
        init(base)  # a root without capabilities could not note that it was root
    elif is_first:
        as_user(uid, partial(init, base))
    as_user(uid, partial(swap, base / "job"))
    assert looks(base / "job") == before
    assert leaks(base) == []
    (base / "job" / "new").mkdir()
    assert snapshot(base / "job")[1].xattrs == ()
    assert (base / "job" / "new").stat().st_gid == 0
    store = users_own(base, uid) if is_first and uid else base / ".trashd"
    assert (store / "volume.json").stat().st_mode & 0o7777 == 0o644
    as_user(uid, partial(assert_silent, base))


# When it can't be had


def hers(volume: Path, victim: Dir) -> Path:
    return make_tree(volume / "home" / "job", victim)


STRANGE = [
    ("group 12001 instead of 4242", Dir({"results": "x"}, 0o770, (ALICE, TEAM))),
    ("group 12001 instead of 4242", Dir({"results": "x"}, 0o2770, (ALICE, TEAM))),
    ("owner 12001 instead of 12002", Dir({"results": "x"}, 0o777, (BOB, ALICE))),
    ("security.label none instead of 6c", Dir({"results": "x"}, 0o755, (ALICE, ALICE), {"security.label": b"l"})),
]
strange = pytest.mark.parametrize(("told", "victim"), STRANGE)


@strange
def test_what_can_not_be_had_is_refused_by_name_with_nothing_changed(volume: Path, told: str, victim: Dir) -> None:
    job = hers(volume, victim)
    before = snapshot(volume / "home", with_times=True), job.stat().st_ino
    with pytest.raises(NotAlike) as caught:
        as_user(ALICE, partial(swap, job))
    assert told in caught.value.message()
    assert "--unlike" in caught.value.hint
    assert (snapshot(volume / "home", with_times=True), job.stat().st_ino) == before
    assert entries(volume) == []
    assert os.listdir(folder_of(volume, ALICE) / "stage") == []


def test_an_attributes_name_reaches_no_terminal_raw(volume: Path) -> None:
    job = hers(volume, Dir({"results": "x"}, 0o755, (ALICE, ALICE), {"security.\x1b[31m": b"l"}))
    with pytest.raises(NotAlike) as caught:
        as_user(ALICE, partial(swap, job))
    assert r"security.\x1b[31m none instead of 6c" in caught.value.message()


@strange
def test_unlike_accepts_what_can_not_be_had_and_tells(volume: Path, told: str, victim: Dir) -> None:
    job = hers(volume, victim)
    before = snapshot(job)
    swapped = as_user(ALICE, partial(swap, job, options=SwapOptions(accept_differences=True)))
    assert told in [f"{d.what} {d.got} instead of {d.wanted}" for d in swapped.unlike]
    assert os.listdir(job) == []
    os.rmdir(job)
    as_user(ALICE, partial(restore, volume, swapped.id))
    assert snapshot(job) == before


def test_a_member_of_the_group_keeps_it_though_the_owner_changes(volume: Path) -> None:
    job = make_tree(volume / "home" / "job", Dir({"results": "x"}, 0o2775, (BOB, TEAM)))
    as_member = ["setpriv", f"--reuid={ALICE}", f"--regid={ALICE}", f"--groups={TEAM}"]
    done = subprocess.run([*as_member, TRASHD, "swap", "--unlike", "--json", job], capture_output=True, check=True)
    assert [one["what"] for one in json.loads(done.stdout)["unlike"]] == ["owner"]
    assert (job.stat().st_uid, job.stat().st_gid, job.stat().st_mode & 0o7777) == (ALICE, TEAM, 0o2775)


def test_the_command_refuses_names_the_difference_and_takes_unlike(volume: Path) -> None:
    job = hers(volume, STRANGE[0][1])
    refused = run_as(ALICE, [TRASHD, "swap", job], cwd=volume)
    assert refused.returncode == NotAlike.exit_code
    assert b"group 12001 instead of 4242" in refused.stderr
    assert b"--unlike" in refused.stderr
    done = run_as(ALICE, [TRASHD, "swap", "--unlike", job], cwd=volume)
    assert done.returncode == 0, done
    assert b"differs: group is 12001, was 4242" in done.stdout
    assert recover_all(volume) == []


def test_who_may_not_write_in_it_is_refused_and_unlike_does_not_help(volume: Path) -> None:
    job = hers(volume, Dir({"results": "x"}, 0o755, (BOB, BOB)))
    before = snapshot(volume / "home", with_times=True)
    for options in (SwapOptions(), SwapOptions(accept_differences=True)):
        with pytest.raises(Exception, match="job") as caught:
            as_user(ALICE, partial(swap, job, options=options))
        assert getattr(caught.value, "exit_code", 0) in (3, 4)
    assert snapshot(volume / "home", with_times=True) == before
    assert entries(volume) == []


def refused_with(number: int) -> Callable[[], None]:
    """Make a call fail with an errno."""

    def refuse() -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize(
    ("call", "n", "number", "told"),
    [
        ("setxattr", 1, errno.EOPNOTSUPP, "user.one none instead of 31"),
        ("getxattr", 2, errno.EACCES, "user.one unreadable"),  # the first is the store's
        ("ioctl", 1, errno.EPERM, "inode flags and project id unreadable"),
    ],
)
def test_what_can_not_be_read_or_given_is_refused_by_name(
    volume: Path, call: str, n: int, number: int, told: str
) -> None:
    job = make_tree(volume / "job", Dir({"results": "x"}, xattrs={"user.one": b"1"}))
    with pytest.raises(NotAlike) as caught:
        swap(job, Kernel(ActingBefore(call, refused_with(number), n)))
    assert told in caught.value.message()
    assert (os.listdir(job), entries(volume)) == (["results"], [])


def test_what_only_a_filesystems_own_tools_read_is_refused_by_name(volume: Path) -> None:
    class BeeGfs(Kernel):
        def filesystem(self, fd: int) -> int:
            super().filesystem(fd)
            return _BEEGFS

    job = make_tree(volume / "job", {"results": "x"})
    kernel = BeeGfs()
    with kernel.open_path(raw(volume)) as base, kernel.open_dir(base, b"job") as fd:
        likeness = read_metadata(kernel, fd)
    assert [one.what for one in differences(likeness, likeness)] == ["stripe pattern and storage pool (BeeGFS)"]
    with pytest.raises(NotAlike, match=r"stripe pattern and storage pool \(BeeGFS\) unreadable"):
        swap(job, BeeGfs())


@pytest.mark.needs("loop", "btrfs")
def test_a_subvolume_becomes_a_directory_only_with_unlike(mounted: Callable[[str], Path]) -> None:
    volume = emptied(mounted("btrfs"))
    job = btrfs_subvolume(volume, "job")
    found = check_swap(Kernel(), raw(job)).refusals
    with pytest.raises(NotAlike, match="kind directory instead of btrfs subvolume") as caught:
        swap(job)
    assert found == ((caught.value.message(), caught.value.hint),)
    swapped = swap(job, options=SwapOptions(accept_differences=True))
    assert [tuple(one) for one in swapped.unlike] == [("kind", "btrfs subvolume", "directory")]
    assert_silent(volume)


@pytest.mark.needs("loop", "btrfs")
def test_compression_is_had_in_a_store_that_is_compressed_itself(mounted: Callable[[str], Path]) -> None:
    volume = emptied(mounted("btrfs"))
    make_tree(volume / "home", {"job": {}})
    xattrs("btrfs.compression", value=b"zstd")(volume / "home")
    init(volume / "home")
    set_flags(volume / "home" / "job", NODUMP)
    xattrs("btrfs.compression", value=b"zstd")(volume / "home" / "job")
    before = looks(volume / "home" / "job")
    os.rename(volume / ".trashd", volume / "aside")
    swap(volume / "home" / "job")
    os.rename(volume / "aside", volume / ".trashd")
    assert looks(volume / "home" / "job") == before
