"""Mount tables: which mount a path is on, which disk it has, and what is mounted inside a directory."""

import select
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from fusefs.linux.mountinfo import (
    TRASHD_FSTYPE,
    FilesystemPath,
    Mount,
    MountWatch,
    covering_mount_id,
    disk_of,
    every_place,
    find_place,
    is_inside,
    mount_by_point,
    mount_of,
    mounts_inside,
    place_below,
    place_of,
    read_mounts,
    relative_to,
    trashd_views,
)
from tests.support.open_fds import open_fds
from tests.support.real_filesystems import loop_volume, tmpfs_over, tmpfs_volume

ABSOLUTE = st.lists(st.sampled_from([b"a", b"ab", b"b"]), max_size=4).map(lambda names: b"/" + b"/".join(names))


def mount(number: int, parent: int, point: bytes, device: bytes = b"8:1", root: bytes = b"/") -> Mount:
    return Mount(number, parent, device, root, point, b"ext4", b"/dev/x", b"rw")


ROOT = mount(1, 0, b"/")


@given(ABSOLUTE, ABSOLUTE)
def test_inside_goes_by_whole_components(path: bytes, directory: bytes) -> None:
    names, outer = (list(filter(None, p.split(b"/"))) for p in (path, directory))
    assert is_inside(path, directory) == (names[: len(outer)] == outer)


@given(ABSOLUTE, ABSOLUTE)
def test_path_below_joins_back(path: bytes, directory: bytes) -> None:
    if is_inside(path, directory):
        rest = relative_to(path, directory)
        assert path == directory if not rest else path == directory.rstrip(b"/") + b"/" + rest


def test_place_is_the_one_of_the_longest_mount_point() -> None:
    table = [ROOT, mount(2, 1, b"/a", b"8:2"), mount(3, 1, b"/ab", b"8:3")]
    assert find_place(b"/a/x", table) == FilesystemPath(b"8:2", b"/x")
    assert find_place(b"/abc", table) == FilesystemPath(b"8:1", b"/abc")


@given(ABSOLUTE, st.lists(ABSOLUTE))
def test_mount_is_found_by_points_as_in_the_table(path: bytes, points: list[bytes]) -> None:
    table = [mount(number, 1, point, b"8:1") for number, point in enumerate([b"/", *points, b"/"])]
    assert mount_by_point(path, {one.point: one for one in table}) == mount_of(path, table)


def test_latest_mount_on_a_point_is_the_visible_one() -> None:
    table = [ROOT, mount(2, 1, b"/a", b"8:2"), mount(3, 2, b"/a", b"8:3")]
    assert find_place(b"/a", table) == FilesystemPath(b"8:3", b"/")


def test_place_in_a_bind_mount_is_the_one_of_its_source() -> None:
    assert place_of(b"/b/x", mount(2, 1, b"/b", root=b"/a")) == FilesystemPath(b"8:1", b"/a/x")


def test_nothing_is_mounted_inside_a_plain_directory() -> None:
    assert list(mounts_inside(FilesystemPath(b"8:1", b"/a"), [ROOT, mount(2, 1, b"/ab", b"8:2")])) == []


def test_mount_inside_is_found() -> None:
    inner = mount(2, 1, b"/a/deep/m", b"8:2")
    assert list(mounts_inside(FilesystemPath(b"8:1", b"/a"), [ROOT, inner])) == [inner]


def test_directory_itself_a_mount_point_counts_as_inside() -> None:
    point = mount(2, 1, b"/a", b"8:2")
    assert list(mounts_inside(FilesystemPath(b"8:1", b"/a"), [ROOT, point])) == [point]


def test_mount_inside_is_found_under_the_path_of_a_bind_mount() -> None:
    bound = mount(2, 1, b"/elsewhere", root=b"/a")
    inner = mount(3, 2, b"/elsewhere/m", b"8:2")
    assert inner in list(mounts_inside(FilesystemPath(b"8:1", b"/a"), [ROOT, bound, inner]))


def test_mount_on_another_filesystem_of_the_same_path_is_not_inside() -> None:
    other = [ROOT, mount(2, 1, b"/o", b"8:2"), mount(3, 2, b"/o/a/m", b"8:3")]
    assert list(mounts_inside(FilesystemPath(b"8:1", b"/a"), other)) == []


@pytest.mark.parametrize("optional", [b"", b"shared:7 ", b"shared:7 master:3 unbindable "])
def test_line_is_read_with_any_number_of_optional_fields(optional: bytes) -> None:
    from fusefs.linux import mountinfo

    line = b"36 35 98:0 /mnt1 /mnt\\0402\\012x rw,noatime " + optional + b"- ext4 /dev/root\\040y rw,errors=continue"
    wanted = Mount(
        36,
        35,
        b"98:0",
        b"/mnt1",
        b"/mnt 2\nx",
        b"ext4",
        b"/dev/root y",
        b"rw,noatime",
        0,
        b"rw,errors=continue",
    )
    assert mountinfo._parse_mounts(line + b"\n") == (wanted,)


def test_a_name_makes_no_fields() -> None:
    """The kernel quotes neither a carriage return nor a form feed: who mounts there would be who he likes."""
    from fusefs.linux import mountinfo

    point, source = b"/mnt\rrw\x0c-\x0bfuse.trashd\r/scratch\rrw,user_id=0", b"x\r-\rfuse.trashd\ry\ruser_id=0"
    line = b"36 35 0:98 / %s rw shared:7 - fuse %s rw,user_id=1000" % (point, source)
    (read,) = mountinfo._parse_mounts(line + b"\n")
    assert (read.point, read.source, read.owner, read.is_trashd()) == (point, source, 1000, False)


def test_a_source_may_have_no_name() -> None:
    from fusefs.linux import mountinfo

    (read,) = mountinfo._parse_mounts(b"36 35 0:98 / /mnt rw - tmpfs  rw\n")
    assert read.source == b""


def test_own_table_has_a_root() -> None:
    assert any(one.point == b"/" for one in read_mounts())


# Mounts of ours


def served(number: int, point: bytes, source: bytes, root: bytes = b"/", owner: int = 0) -> Mount:
    return Mount(number, 1, b"0:%d" % number, root, point, TRASHD_FSTYPE, source, b"rw", owner)


DISK = mount(2, 1, b"/data", b"8:2", root=b"/vol")


def test_place_below_a_root_has_one_slash() -> None:
    assert place_below(FilesystemPath(b"8:1", b"/"), b"a/b") == FilesystemPath(b"8:1", b"/a/b")
    assert place_below(FilesystemPath(b"8:1", b"/a"), b"") == FilesystemPath(b"8:1", b"/a")


def test_view_tells_the_backing_place_of_a_mount() -> None:
    [view] = trashd_views([ROOT, DISK, served(9, b"/mnt", b"/data/x")], (0,))
    assert view.backing == FilesystemPath(b"8:2", b"/vol/x")
    assert view.shown == FilesystemPath(b"0:9", b"/")


def test_view_of_a_bind_mount_of_a_part_is_of_that_part() -> None:
    [view] = trashd_views([ROOT, DISK, served(9, b"/mnt", b"/data", root=b"/x/y")], (0,))
    assert view.backing == FilesystemPath(b"8:2", b"/vol/x/y")


@pytest.mark.parametrize(("owner", "owners", "n"), [(0, (0,), 1), (7, (0,), 0), (7, (0, 7), 1), (-1, (0,), 0)])
def test_only_the_mounts_of_some_owners_are_views(owner: int, owners: tuple[int, ...], n: int) -> None:
    assert len(trashd_views([ROOT, served(9, b"/mnt", b"/data", owner=owner)], owners)) == n


def test_the_latest_view_comes_first() -> None:
    table = [ROOT, served(8, b"/one", b"/data"), served(9, b"/two", b"/data")]
    assert [view.mount.point for view in trashd_views(table, (0,))] == [b"/two", b"/one"]


@pytest.mark.parametrize(
    "asked", [FilesystemPath(b"8:2", b"/vol/x/job"), FilesystemPath(b"0:8", b"/job"), FilesystemPath(b"0:9", b"/x/job")]
)
def test_every_place_is_found_from_each_of_them(asked: FilesystemPath) -> None:
    ours = trashd_views([ROOT, DISK, served(8, b"/one", b"/data/x"), served(9, b"/two", b"/data")], (0,))
    assert set(every_place(asked, ours)) == {
        FilesystemPath(b"8:2", b"/vol/x/job"), FilesystemPath(b"0:8", b"/job"), FilesystemPath(b"0:9", b"/x/job"),
    }  # fmt: skip


def test_place_beside_what_is_shown_is_nowhere_else() -> None:
    ours = trashd_views([ROOT, DISK, served(8, b"/one", b"/data/x")], (0,))
    assert every_place(FilesystemPath(b"8:2", b"/vol/xy"), ours) == [FilesystemPath(b"8:2", b"/vol/xy")]


def test_mount_over_itself_is_seen_by_its_clone() -> None:
    clone = mount(5, 1, b"/run/trashd/tree", b"8:2", root=b"/vol")
    ours = trashd_views([ROOT, DISK, clone, served(9, b"/data", b"/run/trashd/tree")], (0,))
    assert every_place(FilesystemPath(b"0:9", b"/job"), ours) == [
        FilesystemPath(b"8:2", b"/vol/job"),
        FilesystemPath(b"0:9", b"/job"),
    ]


@pytest.mark.parametrize(
    ("options", "owner"),
    [(b"rw,user_id=0,group_id=0", 0), (b"rw,user_id=1000,group_id=7,allow_other", 1000), (b"rw", -1)],
)
def test_owner_of_a_mount_of_fuse_is_read(options: bytes, owner: int) -> None:
    from fusefs.linux import mountinfo

    line = b"36 35 0:98 / /mnt rw shared:7 - fuse.trashd /scratch\\040x " + options
    (read,) = mountinfo._parse_mounts(line + b"\n")
    assert (read.is_trashd(), read.source, read.owner) == (True, b"/scratch x", owner)
    assert mountinfo._parse_mounts(line.replace(b"fuse.trashd", b"fuse.sshfs") + b"\n")[0].owner == owner
    assert mountinfo._parse_mounts(line.replace(b"fuse.trashd", b"fusectl") + b"\n")[0].owner == 0


@pytest.mark.parametrize(
    ("path", "number"), [(b"/", 1), (b"/scratch", 3), (b"/scratch/job", 3), (b"/scratchy", 1), (b"/data/deep/er", 4)]
)
def test_a_path_leads_into_the_deepest_mount_and_of_several_into_the_last(path: bytes, number: int) -> None:
    mounts = [ROOT, mount(2, 1, b"/scratch"), mount(3, 2, b"/scratch"), mount(4, 1, b"/data/deep"), mount(5, 1, b"/d")]
    assert covering_mount_id(path, mounts) == number


def test_nothing_covers_a_path_that_nothing_is_mounted_above() -> None:
    assert covering_mount_id(b"/scratch", [mount(2, 1, b"/data")]) == 0


_LIMIT_S = 10.0


def is_told(watch: MountWatch, limit_s: float) -> bool:
    return bool(select.select([watch], [], [], limit_s)[0])


@pytest.mark.needs("root")
def test_what_was_mounted_before_is_not_told() -> None:
    with tmpfs_volume(), MountWatch() as watch:
        assert not is_told(watch, 0)


@pytest.mark.needs("root")
def test_a_mount_and_an_unmount_are_told() -> None:
    with MountWatch() as watch:
        with tmpfs_volume():
            assert is_told(watch, _LIMIT_S)
            watch.acknowledge()
        assert is_told(watch, _LIMIT_S)


@pytest.mark.needs("root")
def test_what_changes_while_nobody_waits_is_told_to_an_event_loop() -> None:
    async def wait() -> None:
        with MountWatch() as watch:
            for _ in range(3):
                with tmpfs_volume():
                    with trio.fail_after(_LIMIT_S):
                        await trio.lowlevel.wait_readable(watch)
                    watch.acknowledge()

    trio.run(wait)


@pytest.mark.needs("root")
def test_it_lets_go_of_everything() -> None:
    n_before = len(open_fds())
    with MountWatch():
        pass
    assert len(open_fds()) == n_before


_LOOP = Mount(1, 0, b"7:0", b"/", b"/m", b"ext4", b"/dev/loop0", b"rw")


@pytest.mark.needs("root", "loop")
@pytest.mark.parametrize("fs_type", ["ext4", pytest.param("btrfs", marks=pytest.mark.needs("btrfs"))])
def test_a_disk_is_the_same_as_long_as_it_is_attached(fs_type: str) -> None:
    with loop_volume(fs_type) as first, loop_volume(fs_type) as second:
        disks = [disk_of(next(one for one in read_mounts() if one.point == bytes(path))) for path in (first, second)]
        again = disk_of(next(one for one in read_mounts() if one.point == bytes(first)))
    assert [one.is_block for one in disks] == [True, True]
    assert disks[0] == again != disks[1]


@pytest.mark.parametrize("fs_type", [b"fuseblk", b"fuse.sshfs", b"fuse.trashd"])
def test_what_a_user_mounts_by_fuse_is_no_disk(fs_type: bytes) -> None:
    assert not disk_of(_LOOP._replace(fstype=fs_type)).is_block


@pytest.mark.needs("root", "loop")
@pytest.mark.parametrize("option", ["uhelper=udisks2", "user=alice"])
def test_what_a_user_had_mounted_is_told_by_libmount(option: str) -> None:
    with loop_volume("ext4") as volume, tmpfs_over(Path("/run/mount")):
        mount = next(one for one in read_mounts() if one.point == bytes(volume))
        assert not disk_of(mount).is_users
        Path("/run/mount/utab").write_text(f"SRC=/dev/loop0 TARGET={volume} ROOT=/ OPTS={option}\n")
        assert disk_of(mount).is_users


@pytest.mark.needs("root")
def test_a_filesystem_in_memory_is_no_disk() -> None:
    with tmpfs_volume() as volume:
        assert not disk_of(next(one for one in read_mounts() if one.point == bytes(volume))).is_block
